"""From checked items to a compiled file.

Codes and row number of an item are packed into one 64-bit value when they fit and the values are sorted: that is one
plain sort in place of an indirect sort a level, and it carries the row along. Larger shapes use lexsort. Positions are
ordered by (SID, weight descending, item id ascending), items that are not servable behind all others, so the same set
of items gives the same file whatever the order of the rows, and the items of a SID are one contiguous range.

SIDs are not stored beside the trie: the trie holds each of them once and gives them back (`trie.leaf_sids`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.errors import CatalogError, shown
from xgr_runtime.xbeam.catalog_file import FORMAT_VERSION, section_table, write_file
from xgr_runtime.xbeam.catalog_header import CatalogMeta, content_digest
from xgr_runtime.xbeam.catalog_text import equal_keys, gather_strings, index_keys, pack_strings
from xgr_runtime.xbeam.trie import Trie, build_trie, code_dtype, index_dtype, max_fanout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from xgr_runtime.xbeam.catalog_source import ItemTable
    from xgr_runtime.xbeam.catalog_text import KeyIndex


def compile_items(
    path: str | Path, table: ItemTable, tokens: tuple[NDArray[np.int32], ...], version: str | None
) -> None:
    """Writes the compiled catalogue of `table`. Raises CatalogError; then `path` is what it was before."""
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
    if table.weights is not None and table.weights.any():
        sections["weights"] = table.weights[order]
    if table.keys is not None and len(table.keys.blob):
        index = index_keys(gather_strings(table.keys, order))
        _refuse_repeated_keys(table, index, order)
        sections |= {"key_offsets": index.keys.offsets, "key_bytes": index.keys.blob}
        sections |= {"key_hashes": index.hashes, "key_order": index.order}
    if table.titles is not None and len(table.titles.blob):
        titles = gather_strings(table.titles, order)
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


def _refuse_repeated_keys(table: ItemTable, index: KeyIndex, order: NDArray[np.int64]) -> None:
    repeated = [np.sort(order[positions]).tolist() for positions in equal_keys(index)]
    if repeated:
        first, row, *_ = min(repeated, key=lambda rows: rows[1])
        key = index.keys.encoded(int(np.flatnonzero(order == row)[0])).decode()
        table.refuse(row, f"key {shown(key)} is already that of row {first + 1}")
