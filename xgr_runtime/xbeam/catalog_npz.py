"""Items from an NPZ file, numpy's archive of named arrays (`numpy.savez`), for catalogues that never were text.

Headers come first: every array's type and shape is compared with what its name promises before any of its bytes is read,
and nothing is ever unpickled. So a file of objects is refused by name, and what an archive unpacks to is bounded by the
number of items that `sids` declares: a small file cannot ask for the memory of a large catalogue.

    sids         whole numbers [n, levels]        item_ids     integers [n]            weights  floats or integers [n]
    servable     bool [n]                         keys, titles  str or UTF-8 bytes [n] ("" = none)
    tag_names    str or UTF-8 bytes [T], distinct; tag_offsets  integers [n + 1]; tag_indices  integers [tags of all items]:
                 item i has tag_names[tag_indices[tag_offsets[i] : tag_offsets[i + 1]]]
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.errors import CatalogError, shown
from xgr_runtime.files import open_regular
from xgr_runtime.xbeam.catalog_columns import refuse_unreadable
from xgr_runtime.xbeam.catalog_input import MAX_LINE_BYTES
from xgr_runtime.xbeam.catalog_source import (
    MAX_KEY_BYTES,
    MAX_TAG_BYTES,
    ItemTable,
    check_size,
    items_from_arrays,
)
from xgr_runtime.xbeam.npz_archive import ArrayHeader, open_archive, read_array, read_header

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

_SUFFIX = ".npy"
_CHUNK = 1 << 14
_TAG_ARRAYS = ("tag_names", "tag_offsets", "tag_indices")
# name -> numpy kinds, number of dimensions, whether the first one is that of the items
_EXPECTED = {
    "sids": ("iu", 2, True),
    "item_ids": ("iu", 1, True),
    "keys": ("US", 1, True),
    "titles": ("US", 1, True),
    "weights": ("iuf", 1, True),
    "servable": ("b", 1, True),
    "tag_names": ("US", 1, False),
    "tag_offsets": ("iu", 1, False),
    "tag_indices": ("iu", 1, False),
}
_KIND_NAMES = {"iu": "integers", "iuf": "numbers", "b": "bool", "US": "str or bytes"}
# name -> bytes an item, where the shape alone sets no bound; numpy's characters have four. A few items may have as much text
# as one line of JSONL beyond it.
_BYTES_AN_ITEM = {
    "keys": 4 * MAX_KEY_BYTES,
    "titles": 1 << 16,
    "tag_names": 4 * MAX_TAG_BYTES,
    "tag_indices": 1 << 13,
}


def items_from_npz(
    path: str | Path, num_levels: int, *, sid_field: str, id_field: str
) -> ItemTable:
    """Reads arrays by name (see the head of this file); `sid_field` + "s" and `id_field` + "s" are the names of two.

    Raises:
        CatalogError: the file is no archive of arrays, or an array is missing, unknown, or of another type, shape or size.
        MemoryError: there is no memory for the arrays.
    """
    source = str(path)
    names = {f"{sid_field}s": "sids", f"{id_field}s": "item_ids"}
    try:
        with (
            open_regular(source, "read", CatalogError) as file,
            open_archive(source, file) as archive,
        ):
            headers = _headers(source, archive, names)
            _check_shapes(source, headers, num_levels)
            arrays = {
                name: read_array(source, archive, name, header) for name, header in headers.items()
            }
    except OSError as error:
        raise refuse_unreadable(source, error) from error
    texts = {
        name: _decoded(source, name, arrays[name]) for name in ("keys", "titles") if name in arrays
    }
    tags = _tags(source, arrays)
    table = items_from_arrays(
        source,
        num_levels,
        sids=arrays["sids"],
        item_ids=arrays.get("item_ids"),
        keys=texts.get("keys"),
        titles=texts.get("titles"),
        weights=arrays.get("weights"),
        servable=arrays.get("servable"),
        tags=tags,
    )
    return table


def _headers(
    source: str, archive: zipfile.ZipFile, names: dict[str, str]
) -> dict[str, ArrayHeader]:
    """What each array of the archive says it is, by the names of `_EXPECTED`."""
    headers: dict[str, ArrayHeader] = {}
    known = {**{name: name for name in _EXPECTED if name not in ("sids", "item_ids")}, **names}
    for member in archive.namelist():
        given = member.removesuffix(_SUFFIX)
        if given not in known or not member.endswith(_SUFFIX):
            close = difflib.get_close_matches(given[:80], known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise CatalogError(f"{source}: unknown array {shown(given)}; {hint}")
        if known[given] in headers:
            raise CatalogError(f"{source}: the array {given!r} is there twice")
        headers[known[given]] = read_header(source, archive, member, given)
    lacking = [given for given, name in names.items() if name == "sids" and name not in headers]
    if lacking:
        raise CatalogError(f"{source}: the array {lacking[0]!r} is needed, got {shown([*headers])}")
    present = [name for name in _TAG_ARRAYS if name in headers]
    if 0 < len(present) < len(_TAG_ARRAYS):
        raise CatalogError(
            f"{source}: tags are the three arrays {', '.join(_TAG_ARRAYS)}, got only {', '.join(present)}"
        )
    return headers


def _check_shapes(source: str, headers: dict[str, ArrayHeader], num_levels: int) -> None:
    for name, header in headers.items():
        kinds, num_dimensions, _ = _EXPECTED[name]
        if header.dtype.kind not in kinds or len(header.shape) != num_dimensions:
            raise CatalogError(
                f"{source}: array {name!r} must be {_KIND_NAMES[kinds]} in {num_dimensions} dimension(s), "
                f"got shape {header.shape} of {header.dtype}"
            )
    num_items, num_codes = headers["sids"].shape
    if num_codes != num_levels:
        raise CatalogError(
            f"{source}: array 'sids' must be [items, {num_levels} levels], got shape {headers['sids'].shape}"
        )
    check_size(source, num_items)
    for name, header in headers.items():
        if _EXPECTED[name][2] and header.shape[0] != num_items:
            raise CatalogError(
                f"{source}: array {name!r} has {header.shape[0]} entries, there are {num_items} items"
            )
    for name, bytes_an_item in _BYTES_AN_ITEM.items():
        most = MAX_LINE_BYTES + num_items * bytes_an_item
        if name in headers and headers[name].num_bytes > most:
            raise CatalogError(
                f"{source}: array {name!r} takes {headers[name].num_bytes} bytes, at most {most} are allowed for "
                f"{num_items} items; shorten its entries, or write JSONL"
            )
    if "tag_offsets" in headers and headers["tag_offsets"].shape[0] != num_items + 1:
        raise CatalogError(
            f"{source}: array 'tag_offsets' must have {num_items + 1} entries, one an item and the end, "
            f"got {headers['tag_offsets'].shape[0]}"
        )


def _decoded(source: str, name: str, array: NDArray[Any]) -> Iterator[str]:
    """The texts of an array, a few thousand at a time."""
    for first in range(0, len(array), _CHUNK):
        for row, text in enumerate(array[first : first + _CHUNK].tolist(), first):
            if isinstance(text, bytes):
                try:
                    text = text.decode()
                except UnicodeDecodeError as error:
                    raise CatalogError(
                        f"{source}, row {row + 1}: array {name!r} holds bytes that are not UTF-8: {error}"
                    ) from error
            yield text


def _tags(source: str, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[np.int32]] | None:
    """Tag name -> rows, from the lists of tag numbers."""
    if "tag_names" not in arrays:
        return None
    names = list(_decoded(source, "tag_names", arrays["tag_names"]))
    if len(set(names)) < len(names):
        raise CatalogError(f"{source}: array 'tag_names' holds a name twice")
    offsets, indices = arrays["tag_offsets"], arrays["tag_indices"]
    is_rising = offsets[0] == 0 and bool((offsets[1:] >= offsets[:-1]).all())
    if not is_rising or int(offsets[-1]) != len(indices):
        raise CatalogError(
            f"{source}: array 'tag_offsets' must rise from 0 to {len(indices)}, the length of 'tag_indices'"
        )
    is_outside = (indices < 0) | (indices >= len(names))
    if is_outside.any():
        at = int(is_outside.argmax())
        row = int(np.searchsorted(offsets, at, side="right"))
        raise CatalogError(
            f"{source}, row {row}: array 'tag_indices' must be in [0, {len(names)}), got {indices[at]}"
        )
    # Tag number above, row below: one plain sort groups the rows by tag and keeps them rising.
    pairs = indices.astype(np.uint64)
    pairs <<= np.uint64(32)
    ends = offsets.astype(np.int64)
    lengths = ends[1:] - ends[:-1]
    pairs |= np.repeat(np.arange(len(lengths), dtype=np.uint64), lengths)
    pairs.sort()
    ends = np.searchsorted(pairs >> np.uint64(32), np.arange(len(names) + 1, dtype=np.uint64))
    rows = (pairs & np.uint64(0xFFFFFFFF)).astype(np.int32)
    return {name: rows[ends[i] : ends[i + 1]] for i, name in enumerate(names)}
