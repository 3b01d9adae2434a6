"""Items from an NPZ file, numpy's archive of named arrays (`numpy.savez`), for catalogues that never were text.

Headers come first: every array's type and shape is compared with what its name promises before any of its bytes is read,
and nothing is ever unpickled. So a file of objects is refused by name, and what an archive unpacks to is bounded by the
number of items that `sids` declares.

    sids         whole numbers [n, levels]        item_ids     integers [n]            weights  floats or integers [n]
    servable     bool [n]                         keys, titles  str or UTF-8 bytes [n] ("" = none)
    tag_names    str or UTF-8 bytes [T], distinct; tag_offsets  integers [n + 1]; tag_indices  integers [tags of all items]:
                 item i has tag_names[tag_indices[tag_offsets[i] : tag_offsets[i + 1]]]
"""

from __future__ import annotations

import ast
import difflib
import lzma
import math
import struct
import zipfile
import zlib
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xgr_runtime.errors import CatalogError, shown
from xgr_runtime.files import open_regular
from xgr_runtime.xbeam.catalog_columns import refuse_unreadable
from xgr_runtime.xbeam.catalog_source import ItemTable, check_size, items_from_arrays

if TYPE_CHECKING:
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
_MAGIC = b"\x93NUMPY"
_LENGTH_FORMATS = {b"\x01\x00": "<H", b"\x02\x00": "<I"}
_MAX_HEADER_BYTES = 10_000
_CHUNK_BYTES = 1 << 20
# What zipfile, zlib and ast.literal_eval raise for bytes that are not what they should be.
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    ValueError,
    TypeError,
    SyntaxError,
    RecursionError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
)


class _Header(NamedTuple):
    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_column_order: bool


def items_from_npz(
    path: str | Path, num_levels: int, *, sid_field: str, id_field: str
) -> ItemTable:
    """Reads arrays by name (see the head of this file); `sid_field` + "s" and `id_field` + "s" are the names of two.

    Raises:
        CatalogError: the file is no archive of arrays, or an array is missing, unknown, or of another type or shape.
    """
    source = str(path)
    names = {f"{sid_field}s": "sids", f"{id_field}s": "item_ids"}
    try:
        with open_regular(source, "read", CatalogError) as file, _open(source, file) as archive:
            headers = _headers(source, archive, names)
            _check_shapes(source, headers, num_levels)
            arrays = {
                name: _read(source, archive, name, header) for name, header in headers.items()
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


def _open(source: str, file: Any) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except _BROKEN as error:
        raise CatalogError(
            f"{source} is no NPZ file: {error}; write it with numpy.savez"
        ) from error


def _headers(source: str, archive: zipfile.ZipFile, names: dict[str, str]) -> dict[str, _Header]:
    """What each array of the archive says it is, by the names of `_EXPECTED`."""
    headers: dict[str, _Header] = {}
    known = {**{name: name for name in _EXPECTED if name not in ("sids", "item_ids")}, **names}
    for member in archive.namelist():
        given = member.removesuffix(_SUFFIX)
        if given not in known or not member.endswith(_SUFFIX):
            close = difflib.get_close_matches(given[:80], known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise CatalogError(f"{source}: unknown array {shown(given)}; {hint}")
        if known[given] in headers:
            raise CatalogError(f"{source}: the array {given!r} is there twice")
        headers[known[given]] = _header(source, archive, member, given)
    lacking = [given for given, name in names.items() if name == "sids" and name not in headers]
    if lacking:
        raise CatalogError(f"{source}: the array {lacking[0]!r} is needed, got {shown([*headers])}")
    present = [name for name in _TAG_ARRAYS if name in headers]
    if 0 < len(present) < len(_TAG_ARRAYS):
        raise CatalogError(
            f"{source}: tags are the three arrays {', '.join(_TAG_ARRAYS)}, got only {', '.join(present)}"
        )
    return headers


def _header(source: str, archive: zipfile.ZipFile, member: str, name: str) -> _Header:
    try:
        with archive.open(member) as stream:
            header = _parse_header(member, stream)
    except _BROKEN as error:
        raise CatalogError(f"{source}: array {name!r} cannot be read: {error}") from error
    if header.dtype.hasobject:
        raise CatalogError(
            f"{source}: array {name!r} holds Python objects, which are never loaded; give it a plain type such as "
            "numpy.array(texts, dtype=str)"
        )
    return header


def _parse_header(member: str, stream: IO[bytes]) -> _Header:
    """Reads up to the first byte of the content. numpy's own reader mends headers on the way; here they are right or not."""
    magic = stream.read(len(_MAGIC) + 2)
    length_format = _LENGTH_FORMATS.get(magic[len(_MAGIC) :])
    if not magic.startswith(_MAGIC) or length_format is None:
        raise ValueError(f"it starts with {magic!r}, which is no array of plain type")
    length_bytes = stream.read(struct.calcsize(length_format))
    length = struct.unpack(length_format, length_bytes)[0]
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes, at most {_MAX_HEADER_BYTES} are possible")
    content = ast.literal_eval(stream.read(length).decode("latin1").strip())
    if not isinstance(content, dict) or set(content) != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"its header is {shown(content)}")
    shape, descr, is_column_order = content["shape"], content["descr"], content["fortran_order"]
    is_shape = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or not isinstance(descr, str) or type(is_column_order) is not bool:
        raise ValueError(f"its header is {shown(content)}")
    return _Header(member, shape, np.dtype(descr), is_column_order)


def _check_shapes(source: str, headers: dict[str, _Header], num_levels: int) -> None:
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
    if "tag_offsets" in headers and headers["tag_offsets"].shape[0] != num_items + 1:
        raise CatalogError(
            f"{source}: array 'tag_offsets' must have {num_items + 1} entries, one an item and the end, "
            f"got {headers['tag_offsets'].shape[0]}"
        )


def _read(source: str, archive: zipfile.ZipFile, name: str, header: _Header) -> NDArray[Any]:
    try:
        with archive.open(header.member) as stream:
            _parse_header(header.member, stream)
            return _content(stream, header)
    except _BROKEN as error:
        raise CatalogError(
            f"{source}: array {name!r} is damaged or cut short: {error}; write the file again"
        ) from error


def _content(stream: IO[bytes], header: _Header) -> NDArray[Any]:
    """The array behind the header; at its end the archive compares the checksum."""
    if not header.dtype.itemsize:  # texts that are all empty; numpy makes no arrays of such a type
        return np.zeros(header.shape, f"{header.dtype.kind}1")
    array = np.empty(math.prod(header.shape), header.dtype)
    num_read = 0
    with memoryview(array.view(np.uint8)).cast("B") as target:  # type: ignore[arg-type]
        while chunk := stream.read(_CHUNK_BYTES):
            if num_read + len(chunk) > len(target):
                raise ValueError(f"it has more than the {len(target)} bytes of its shape")
            target[num_read : num_read + len(chunk)] = chunk
            num_read += len(chunk)
        if num_read < len(target):
            raise ValueError(f"it has {num_read} of {len(target)} bytes")
    return array.reshape(header.shape, order="F" if header.is_column_order else "C")


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
