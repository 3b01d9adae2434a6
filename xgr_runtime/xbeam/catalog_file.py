"""The compiled catalogue's container: a checked header and named arrays behind it.

    prefix (32 bytes)   magic, format version, header bytes, file bytes, CRC-32 of prefix and header, reserved (0)
    header (JSON)       {"meta": {...}, "sections": [{"name", "dtype", "shape", "crc32"}, ...]}
    sections            raw little-endian arrays, each starting at a multiple of 64, in table order

Offsets are not stored: they follow from the table, so a table cannot contradict itself. The gaps are zero and are
checked, hence every byte of the file is covered by the prefix comparison, a CRC-32 or the zero check: CRC-32 finds
every single flipped bit. `map_file` reads the prefix and header only; `check_contents` reads everything.

A file is written beside its destination, synced, renamed over it, and the folder is synced: a reader sees the old file
or the whole new one, and a failed build leaves nothing behind (a process killed outright may leave its hidden
`.NAME.*.tmp`, which nothing reads).
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.errors import CatalogError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

MAGIC = b"XGRCATLG"
FORMAT_VERSION = 1
ALIGNMENT = 64
_PREFIX = struct.Struct("<8sIIQII")
_MAX_HEADER_BYTES = 1 << 24
_DTYPES = ("|u1", "<u2", "<u4", "<u8", "<i4", "<i8", "<f8")


@dataclass(frozen=True)
class Section:
    """One named array of a mapped file, the byte it starts at, and the checksum its bytes must have."""

    array: NDArray[Any]
    start: int
    crc32: int


@dataclass(frozen=True)
class MappedFile:
    """A mapped catalogue file whose header was checked; `sections` are read-only views into the mapping."""

    path: str
    meta: dict[str, Any]
    sections: dict[str, Section]
    view: memoryview
    header_end: int

    def check_contents(self) -> None:
        """Compares every section with its checksum and every gap with zero; raises CatalogError."""
        end = self.header_end
        for name, section in self.sections.items():
            self._check_gap(end, section.start)
            end = section.start + section.array.nbytes
            got = zlib.crc32(self.view[section.start : end])
            if got != section.crc32:
                raise CatalogError(
                    f"{self.path}: section {name!r} is damaged: checksum {section.crc32:08x} expected, "
                    f"got {got:08x}; copy or build the catalogue again"
                )
        self._check_gap(end, len(self.view))

    def _check_gap(self, start: int, end: int) -> None:
        if any(self.view[start:end]):
            raise CatalogError(
                f"{self.path}: the gap at byte {start} must be zero and is not; the file is damaged, "
                "copy or build the catalogue again"
            )


def _aligned(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT


def section_table(sections: Mapping[str, NDArray[Any]]) -> list[dict[str, Any]]:
    """The header's entry of each array: name, dtype, shape and the checksum of its bytes."""
    table = []
    for name, array in sections.items():
        assert array.flags.c_contiguous, name
        assert array.dtype.str in _DTYPES, (name, array.dtype)
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data)
        table.append(
            {"name": name, "dtype": array.dtype.str, "shape": list(array.shape), "crc32": crc}
        )
    return table


def write_file(
    path: str | Path,
    meta: Mapping[str, Any],
    sections: Mapping[str, NDArray[Any]],
    table: list[dict[str, Any]],
) -> None:
    """Writes a catalogue file atomically and durably. Raises CatalogError; then `path` is what it was before."""
    target = os.fspath(path)
    folder = os.path.dirname(target) or "."
    temporary = os.path.join(folder, f".{os.path.basename(target)}.{secrets.token_hex(6)}.tmp")
    chunks = _chunks(meta, sections, table)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                for chunk in chunks:
                    _write_all(file.fileno(), chunk)
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            if os.path.lexists(temporary):
                os.unlink(temporary)
        folder_descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(folder_descriptor)
        finally:
            os.close(folder_descriptor)
    except OSError as error:
        raise CatalogError(
            f"cannot write the catalogue {target}: {error.strerror or error}"
        ) from error


def _chunks(
    meta: Mapping[str, Any], sections: Mapping[str, NDArray[Any]], table: list[dict[str, Any]]
) -> list[bytes | memoryview]:
    header = json.dumps({"meta": dict(meta), "sections": table}, separators=(",", ":")).encode()
    chunks: list[bytes | memoryview] = []
    end = _PREFIX.size + len(header)
    for array in sections.values():
        start = _aligned(end)
        chunks.append(bytes(start - end))
        if array.nbytes:
            chunks.append(array.reshape(-1).view(np.uint8).data)
        end = start + array.nbytes
    chunks.append(bytes(_aligned(end) - end))
    prefix = (MAGIC, FORMAT_VERSION, len(header), _aligned(end))
    crc = zlib.crc32(header, zlib.crc32(_PREFIX.pack(*prefix, 0, 0)))
    return [_PREFIX.pack(*prefix, crc, 0), header, *chunks]


def _write_all(descriptor: int, chunk: bytes | memoryview) -> None:
    left = memoryview(chunk)
    while left:
        left = left[os.write(descriptor, left) :]


def map_file(path: str | Path) -> MappedFile:
    """Maps a catalogue file and checks prefix, header, section table and exact length; reads no content.

    Raises:
        CatalogError: the file is missing, foreign, newer, truncated, too long, or its header is damaged.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _PREFIX.size:
                raise CatalogError(
                    f"{name} is no catalogue file: it has {size} bytes, a header alone has more"
                )
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CatalogError(
            f"cannot open the catalogue {name}: {error.strerror or error}"
        ) from error
    view = memoryview(mapping)
    header_end = _check_prefix(name, view)
    try:
        header = json.loads(bytes(view[_PREFIX.size : header_end]))
        meta, table = header["meta"], header["sections"]
        sections = _map_sections(table, view, header_end)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CatalogError(
            f"{name}: the header is not that of a catalogue ({error}); build it again"
        ) from error
    return MappedFile(name, meta, sections, view, header_end)


def _check_prefix(name: str, view: memoryview) -> int:
    magic, version, header_bytes, file_bytes, crc, reserved = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != MAGIC:
        raise CatalogError(
            f"{name} is no catalogue file: it starts with {magic!r}, expected {MAGIC!r}"
        )
    if version > FORMAT_VERSION:
        raise CatalogError(
            f"{name} has catalogue format {version}, this version of xgr-runtime reads up to {FORMAT_VERSION}; "
            "upgrade xgr-runtime or build the catalogue again with it"
        )
    if file_bytes != len(view):
        kind = "truncated" if file_bytes > len(view) else "too long"
        raise CatalogError(
            f"{name} is {kind}: its header says {file_bytes} bytes, it has {len(view)}"
        )
    end = _PREFIX.size + int(header_bytes)
    plain = _PREFIX.pack(magic, version, header_bytes, file_bytes, 0, 0)
    too_long = header_bytes > _MAX_HEADER_BYTES or end > len(view)
    if (
        too_long
        or reserved
        or version < 1
        or zlib.crc32(view[_PREFIX.size : end], zlib.crc32(plain)) != crc
    ):
        raise CatalogError(
            f"{name}: the header is damaged (checksum mismatch); copy or build the catalogue again"
        )
    return end


def _map_sections(
    table: list[dict[str, Any]], view: memoryview, header_end: int
) -> dict[str, Section]:
    sections: dict[str, Section] = {}
    end = header_end
    for entry in table:
        dtype, shape, start = entry["dtype"], entry["shape"], _aligned(end)
        if dtype not in _DTYPES or entry["name"] in sections or min(shape, default=-1) < 0:
            raise ValueError(f"section {entry['name']!r} has an illegal entry")
        count = int(np.prod(shape, dtype=object))
        end = start + count * np.dtype(dtype).itemsize
        if end > len(view):
            raise ValueError(f"section {entry['name']!r} ends at byte {end} of {len(view)}")
        array = np.frombuffer(view, dtype, count, start).reshape(shape)
        sections[entry["name"]] = Section(array, start, entry["crc32"])
    if _aligned(end) != len(view):
        raise ValueError(f"the sections end at byte {_aligned(end)} of {len(view)}")
    return sections
