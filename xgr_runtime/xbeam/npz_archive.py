"""The arrays of an NPZ archive, headers first: what an array says it is, and then its bytes, which must be just that many.

Nothing is unpickled, and no byte of an array is read before somebody agreed to its type and shape. An archive that is broken
is a CatalogError; a machine without memory for a sound one is a MemoryError, and nothing is wrong with the file.
"""

from __future__ import annotations

import ast
import lzma
import math
import struct
import zipfile
import zlib
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xgr_runtime.errors import CatalogError, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGIC = b"\x93NUMPY"
_LENGTH_FORMATS = {b"\x01\x00": "<H", b"\x02\x00": "<I"}
_MAX_HEADER_BYTES = 10_000
_CHUNK_BYTES = 1 << 20
_ENCRYPTED = 0x1
# What zipfile, its decompressors and the reading of headers raise for bytes that are not what they should be.
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
    NotImplementedError,
)


class ArrayHeader(NamedTuple):
    """What an array says it is. member: its name in the archive."""

    member: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_column_order: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def open_archive(source: str, file: IO[bytes]) -> zipfile.ZipFile:
    """The archive in a file; `source` names it in errors. Raises CatalogError."""
    try:
        return zipfile.ZipFile(file)
    except _BROKEN as error:
        raise CatalogError(
            f"{source} is no NPZ file: {error}; write it with numpy.savez"
        ) from error


def read_header(source: str, archive: zipfile.ZipFile, member: str, name: str) -> ArrayHeader:
    """What a member says it is; `name` names it in errors. Raises CatalogError, also for arrays of Python objects."""
    if archive.getinfo(member).flag_bits & _ENCRYPTED:
        raise CatalogError(f"{source}: array {name!r} is encrypted; write it with numpy.savez")
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


def read_array(
    source: str, archive: zipfile.ZipFile, name: str, header: ArrayHeader
) -> NDArray[Any]:
    """The array behind a header. Raises CatalogError when it is damaged, MemoryError when there is no memory for it."""
    try:
        with archive.open(header.member) as stream:
            _parse_header(header.member, stream)
            return _content(stream, header)
    except _BROKEN as error:
        raise CatalogError(
            f"{source}: array {name!r} is damaged or cut short: {error}; write the file again"
        ) from error


def _parse_header(member: str, stream: IO[bytes]) -> ArrayHeader:
    """Reads up to the first byte of the content. numpy's own reader mends headers on the way; here they are right or not."""
    magic = stream.read(len(_MAGIC) + 2)
    length_format = _LENGTH_FORMATS.get(magic[len(_MAGIC) :])
    if not magic.startswith(_MAGIC) or length_format is None:
        raise ValueError(f"it starts with {magic!r}, which is no array of plain type")
    length_bytes = stream.read(struct.calcsize(length_format))
    length = struct.unpack(length_format, length_bytes)[0]
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes, at most {_MAX_HEADER_BYTES} are possible")
    content = _literal(stream.read(length).decode("latin1").strip())
    if not isinstance(content, dict) or set(content) != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"its header is {shown(content)}")
    shape, descr, is_column_order = content["shape"], content["descr"], content["fortran_order"]
    is_shape = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or not isinstance(descr, str) or type(is_column_order) is not bool:
        raise ValueError(f"its header is {shown(content)}")
    return ArrayHeader(member, shape, np.dtype(descr), is_column_order)


def _content(stream: IO[bytes], header: ArrayHeader) -> NDArray[Any]:
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


def _literal(text: str) -> Any:
    """A value as Python writes it. Of a few thousand characters, Python's parser runs out of depth and calls it memory."""
    try:
        return ast.literal_eval(text)
    except MemoryError as error:
        raise ValueError("its header is nested too deep") from error
