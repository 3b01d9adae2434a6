"""Builds a compiled catalogue from arrays or from JSONL.

Codes and row number of an item are packed into one 64-bit value when they fit and the values are sorted: that is one
plain sort in place of an indirect sort a level, and it carries the row along. Larger shapes use lexsort. Positions are
ordered by (SID, weight descending, item id ascending), items that are not servable behind all others, so the same set
of items gives the same file whatever the order of the rows, and the items of a SID are one contiguous range.

SIDs are not stored beside the trie: the trie holds each of them once and gives them back (`trie.leaf_sids`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.catalog_file import FORMAT_VERSION, section_table, write_file
from xgr_runtime.xbeam.catalog_header import (
    MAX_VERSION_LENGTH,
    CatalogMeta,
    content_digest,
    is_version,
)
from xgr_runtime.xbeam.catalog_input import refuse_overwrite, shown
from xgr_runtime.xbeam.catalog_jsonl import items_from_jsonl
from xgr_runtime.xbeam.catalog_source import ItemTable, items_from_arrays
from xgr_runtime.xbeam.catalog_text import index_keys, pack_strings
from xgr_runtime.xbeam.token_map import token_tables
from xgr_runtime.xbeam.trie import Trie, build_trie, code_dtype, index_dtype, max_fanout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray


def build_catalog(
    path: str | Path,
    *,
    sids: ArrayLike,
    item_ids: ArrayLike | None = None,
    keys: Sequence[str | None] | None = None,
    titles: Sequence[str] | None = None,
    weights: ArrayLike | None = None,
    servable: ArrayLike | None = None,
    tags: Mapping[str, ArrayLike] | Sequence[Sequence[str]] | None = None,
    num_codes: Sequence[int] | None = None,
    token_of: Sequence[ArrayLike] | None = None,
    token_offsets: Sequence[int] | None = None,
    version: str | None = None,
) -> None:
    """Compiles a catalogue and writes it to `path`, atomically and synced.

    Args:
        path: destination; an existing file is replaced in one step, anything else that exists is refused.
        sids: whole numbers [items, levels], 1 to 8 levels.
        item_ids: int64 [items], distinct; by default the row numbers from 0.
        keys: a distinct string per item of at most 4,096 bytes in UTF-8, None or "" where it has none.
        titles: a string per item.
        weights: finite numbers [items]; larger comes first among the items of one SID. Default 0.
        servable: bool [items]; false = known in histories, never recommended. Default true.
        tags: either tag name -> row numbers, or a list of tag names per item. A name has 1 to 4,096 bytes in UTF-8 and
            no control characters.
        num_codes: codes per level; needed with `token_offsets`, else the lengths of the `token_of` tables.
        token_of: per level, the token of each code, -1 = none.
        token_offsets: per level the token of code 0, the others following it.
        version: name of this version, 1 to 128 printable characters; by default a digest of the content.

    Raises:
        CatalogError: an input is not acceptable (the message names the row) or the file cannot be written; then
            nothing new is left in the folder.
    """
    _check_version(version)
    refuse_overwrite(path, {})
    tokens = token_tables(num_codes, token_of, token_offsets)
    table = items_from_arrays(
        "items",
        len(tokens),
        sids=sids,
        item_ids=item_ids,
        keys=keys,
        titles=titles,
        weights=weights,
        servable=servable,
        tags=tags,
    )
    _compile(path, table, tokens, version)


def build_catalog_from_jsonl(
    path_out: str | Path,
    path_in: str | Path,
    *,
    num_codes: Sequence[int] | None = None,
    token_of: Sequence[ArrayLike] | None = None,
    token_offsets: Sequence[int] | None = None,
    sid_field: str = "sid",
    id_field: str = "item_id",
    version: str | None = None,
) -> None:
    """Compiles a catalogue from a file with one JSON object a line.

    Fields: `sid` (list of codes) and at least one of `item_id` (or `id`) and `key`; optional `title`, `weight`, `tags`
    (list of names) and `servable`. Other fields are ignored, a name given twice in one object is refused. Ids are given in
    all rows or in none (then generated). Keys, tags and the version are limited as in `build_catalog`.

    Args:
        path_out: destination, as in `build_catalog`; not `path_in` under any name.
        path_in: the JSONL file, a regular one.
        num_codes: as in `build_catalog`.
        token_of: as in `build_catalog`.
        token_offsets: as in `build_catalog`.
        sid_field: name of the field with the codes.
        id_field: name of the field with the id.
        version: as in `build_catalog`.

    Raises:
        CatalogError: as `build_catalog`; the row number is the line number.
    """
    _check_version(version)
    refuse_overwrite(path_out, {"the items": path_in})
    tokens = token_tables(num_codes, token_of, token_offsets)
    table = items_from_jsonl(path_in, len(tokens), sid_field=sid_field, id_field=id_field)
    _compile(path_out, table, tokens, version)


def _compile(
    path: str | Path, table: ItemTable, tokens: tuple[NDArray[np.int32], ...], version: str | None
) -> None:
    _check_codes(table, tokens)
    num_codes = [len(level) for level in tokens]
    served, others = _split_servable(table)
    order, trie, sid_starts = _order_items(table, num_codes, served)
    sections: dict[str, NDArray[Any]] = {
        f"token_of_{level}": codes for level, codes in enumerate(tokens)
    }
    for level in range(trie.num_levels):
        sections[f"offsets_{level}"] = trie.offsets[level]
        sections[f"codes_{level}"] = trie.codes[level]
    if len(sid_starts) < len(order):
        ends = np.append(sid_starts, len(order))
        sections["sid_item_offsets"] = ends.astype(index_dtype(len(order)))
    num_servable = len(order)
    if others is not None:
        other_order, _, _ = _order_items(table, num_codes, others)
        sections["other_sids"] = table.sids[other_order].astype(code_dtype(max(num_codes)))
        order = np.concatenate([order, other_order])
    sections |= _item_sections(table, order)
    sizes = (len(order), num_servable, tuple(num_codes), max_fanout(trie))
    checksums = section_table(sections)
    digest = content_digest(FORMAT_VERSION, *sizes, checksums)
    name = digest if version is None else version
    write_file(path, CatalogMeta(name, digest, *sizes), sections, checksums)


def _check_version(version: str | None) -> None:
    if version is not None and not is_version(version):
        raise CatalogError(
            f"a version is 1 to {MAX_VERSION_LENGTH} printable characters, not all blank, got {shown(version)}"
        )


def _check_codes(table: ItemTable, tokens: tuple[NDArray[np.int32], ...]) -> None:
    for level, level_tokens in enumerate(tokens):
        codes = table.sids[:, level]
        size = len(level_tokens)
        if int(codes.min()) < 0 or int(codes.max()) >= size:
            row = int(((codes < 0) | (codes >= size)).argmax())
            table.refuse(row, f"code {codes[row]} of level {level} is outside [0, {size})")
        if level_tokens.min() < 0:
            is_bare = level_tokens[codes] < 0
            if is_bare.any():
                row = int(is_bare.argmax())
                table.refuse(
                    row, f"code {codes[row]} of level {level} has no token in the token map"
                )


def _split_servable(table: ItemTable) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Row numbers of the servable items and of the others; None = all and none."""
    if table.servable is None or table.servable.all():
        return None, None
    if not table.servable.any():
        raise CatalogError(f"{table.source}: the catalogue is empty: none of its items is servable")
    return np.flatnonzero(table.servable), np.flatnonzero(~table.servable)


def _order_items(
    table: ItemTable, num_codes: Sequence[int], rows: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], Trie, NDArray[np.int64]]:
    """Rows in (SID, weight descending, id ascending) order, their trie, and where each SID starts among them."""
    sids = table.sids if rows is None else table.sids[rows]
    order, columns = _sort_sids(sids, num_codes)
    trie, starts = build_trie(columns)
    if rows is not None:
        order = rows[order]
    if len(starts) < len(order):
        lengths = np.diff(starts, append=len(order))
        groups = np.repeat(np.arange(len(starts)), lengths)
        shared = np.flatnonzero(lengths[groups] > 1)
        members = order[shared]
        keys: list[NDArray[Any]] = [table.item_ids[members], groups[shared]]
        if table.weights is not None:
            keys.insert(1, -table.weights[members])
        order[shared] = members[np.lexsort(keys)]
    return order, trie, starts


def _sort_sids(
    sids: NDArray[Any], num_codes: Sequence[int]
) -> tuple[NDArray[np.int64], list[NDArray[Any]]]:
    """The order that sorts the rows, and the sorted codes of each level."""
    num_rows, levels = sids.shape
    bits = [max(1, (size - 1).bit_length()) for size in num_codes]
    row_bits = max(1, (num_rows - 1).bit_length())
    if sum(bits) + row_bits > 64:
        order = np.lexsort([sids[:, level] for level in reversed(range(levels))])
        return order, [
            sids[order, level].astype(code_dtype(size)) for level, size in enumerate(num_codes)
        ]
    packed = np.zeros(num_rows, np.uint64)
    for level in range(levels):
        packed <<= np.uint64(bits[level])
        packed |= sids[:, level].astype(np.uint64)
    packed <<= np.uint64(row_bits)
    packed |= np.arange(num_rows, dtype=np.uint64)
    packed.sort()
    order = (packed & np.uint64((1 << row_bits) - 1)).astype(np.int64)
    columns, shift = [], row_bits + sum(bits)
    for level, size in enumerate(num_codes):
        shift -= bits[level]
        codes = (packed >> np.uint64(shift)) & np.uint64((1 << bits[level]) - 1)
        columns.append(codes.astype(code_dtype(size)))
    return order, columns


def _item_sections(table: ItemTable, order: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Everything stored by item position: ids, weights, keys, titles, tags, and the look-ups over them."""
    small = index_dtype(len(order))
    item_ids = table.item_ids[order]
    id_order = np.argsort(item_ids)
    sorted_ids = item_ids[id_order]
    if (sorted_ids[1:] == sorted_ids[:-1]).any():
        _refuse_repeated_id(table)
    sections: dict[str, NDArray[Any]] = {"item_ids": item_ids, "id_order": id_order.astype(small)}
    rows = order.tolist() if table.keys is not None or table.titles is not None else []
    if table.weights is not None and table.weights.any():
        sections["weights"] = table.weights[order]
    if table.keys is not None and any(table.keys):
        index = index_keys([table.keys[row] for row in rows])
        sections |= {"key_offsets": index.keys.offsets, "key_bytes": index.keys.blob}
        sections |= {"key_hashes": index.hashes, "key_order": index.order}
    if table.titles is not None and any(table.titles):
        titles = pack_strings([table.titles[row] for row in rows])
        sections |= {"title_offsets": titles.offsets, "title_bytes": titles.blob}
    if table.tags:
        position_of_row = np.empty(len(order), small)
        position_of_row[order] = np.arange(len(order), dtype=small)
        positions = [np.sort(position_of_row[rows_of_tag]) for rows_of_tag in table.tags.values()]
        names = pack_strings([name.encode() for name in table.tags])
        ends = np.cumsum([0, *map(len, positions)])
        sections |= {"tag_name_offsets": names.offsets, "tag_name_bytes": names.blob}
        sections["tag_offsets"] = ends.astype(np.int64)
        sections["tag_positions"] = np.concatenate(positions)
    return sections


def _refuse_repeated_id(table: ItemTable) -> None:
    order = np.argsort(table.item_ids, kind="stable")
    ids = table.item_ids[order]
    row = int(order[1:][ids[1:] == ids[:-1]].min())
    first = int((table.item_ids == table.item_ids[row]).argmax())
    table.refuse(row, f"item id {table.item_ids[row]} is already that of row {first + 1}")
