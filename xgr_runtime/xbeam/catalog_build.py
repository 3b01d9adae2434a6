"""Builds a compiled catalogue from arrays or from a file: JSONL, CSV or NPZ.

The same items give the same bytes whatever they come from: every source ends in one table of checked columns
(catalog_source), and one compiler (catalog_compile) turns it into the file.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from xgr_runtime.errors import CatalogError, shown
from xgr_runtime.xbeam.catalog_compile import compile_items
from xgr_runtime.xbeam.catalog_csv import items_from_csv
from xgr_runtime.xbeam.catalog_header import MAX_VERSION_LENGTH, is_version
from xgr_runtime.xbeam.catalog_input import refuse_overwrite
from xgr_runtime.xbeam.catalog_jsonl import items_from_jsonl
from xgr_runtime.xbeam.catalog_npz import items_from_npz
from xgr_runtime.xbeam.catalog_source import items_from_arrays
from xgr_runtime.xbeam.token_map import token_tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike

_READERS = {"jsonl": items_from_jsonl, "csv": items_from_csv, "npz": items_from_npz}
FORMATS = tuple(_READERS)


def build_catalog(
    path: str | Path,
    *,
    sids: ArrayLike,
    item_ids: ArrayLike | None = None,
    keys: Iterable[str | None] | None = None,
    titles: Iterable[str] | None = None,
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
    compile_items(path, table, tokens, version)


def build_catalog_from_file(
    path_out: str | Path,
    path_in: str | Path,
    *,
    source_format: str | None = None,
    num_codes: Sequence[int] | None = None,
    token_of: Sequence[ArrayLike] | None = None,
    token_offsets: Sequence[int] | None = None,
    sid_field: str = "sid",
    id_field: str = "item_id",
    version: str | None = None,
) -> None:
    """Compiles a catalogue from a file. The file is read once, a row at a time; memory is that of its columns.

    JSONL: one object a line with `sid` (list of codes) and at least one of `item_id` (or `id`) and `key`; optional
    `title`, `weight`, `tags` (list of names) and `servable`. Other fields are ignored, but a name that is nearly one of
    these (`servabel`) is refused, and so is one given twice in an object.

    CSV: a header, then one item a row; the same columns, `sid` as one field "3 0 1" or as columns sid_0, sid_1, ...;
    `tags` with | between; `servable` true, false, 1 or 0. An empty field is a value that is not given. Unknown columns
    are refused.

    NPZ: arrays sids, item_ids, keys, titles, weights, servable, tag_names, tag_offsets, tag_indices; see
    `catalog_npz`. Only `sids` is needed.

    Ids are given in all rows or in none (then they are the row numbers from 0). Keys, tags and the version are limited as
    in `build_catalog`.

    Args:
        path_out: destination, as in `build_catalog`; not `path_in` under any name.
        path_in: the file, a regular one.
        source_format: jsonl, csv or npz; by default csv or npz where `path_in` ends so, else jsonl.
        num_codes: as in `build_catalog`.
        token_of: as in `build_catalog`.
        token_offsets: as in `build_catalog`.
        sid_field: name of the field with the codes; of the array with an s behind it.
        id_field: name of the field with the id; of the array with an s behind it.
        version: as in `build_catalog`.

    Raises:
        CatalogError: as `build_catalog`; names the file and the row, for JSONL the line.
    """
    _check_version(version)
    read = _READERS.get(source_format or guess_format(path_in))
    if read is None:
        raise CatalogError(
            f"source_format must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got {shown(source_format)}"
        )
    refuse_overwrite(path_out, {"the items": path_in})
    tokens = token_tables(num_codes, token_of, token_offsets)
    table = read(path_in, len(tokens), sid_field=sid_field, id_field=id_field)
    compile_items(path_out, table, tokens, version)


def build_catalog_from_jsonl(path_out: str | Path, path_in: str | Path, **options: Any) -> None:
    """`build_catalog_from_file` for JSONL, whatever the name of the file."""
    build_catalog_from_file(path_out, path_in, source_format="jsonl", **options)


def guess_format(path: str | Path) -> str:
    """csv or npz for a name that ends so, jsonl for every other one."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    return suffix[1:] if suffix in (".csv", ".npz") else "jsonl"


def _check_version(version: str | None) -> None:
    if version is not None and not is_version(version):
        raise CatalogError(
            f"a version is 1 to {MAX_VERSION_LENGTH} printable characters, not all blank, got {shown(version)}"
        )
