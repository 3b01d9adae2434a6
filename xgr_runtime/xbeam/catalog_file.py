"""The compiled catalogue's container: a checked header and named arrays behind it.

    prefix (32 bytes)   magic, format version, header bytes, file bytes, CRC-32 of prefix and header, reserved (0)
    header (JSON)       {"meta": {...}, "sections": [{"name", "dtype", "shape", "crc32"}, ...]}
    sections            raw little-endian arrays, each starting at a multiple of 64, in table order

Offsets are not stored: they follow from the table, so a table cannot contradict itself. The gaps are zero and are
checked, hence every byte of the file is covered by the prefix comparison, a CRC-32 or the zero check: CRC-32 finds
every single flipped bit. `check_contents` reads everything.

`map_file` reads prefix and header and maps the rest: cheap, but whoever writes into the file changes the arrays, and
whoever shortens it kills the process (SIGBUS) at the next look at a lost page. `read_file` copies the file into memory
of the process: what was verified there stays as it was verified, whatever happens to the file. A server uses that.

A file is written beside its destination, synced, renamed over it, and the folder is synced: a reader sees the old file
or the whole new one, and a failed build leaves nothing behind (a process killed outright may leave its hidden
`.NAME.*.tmp`, which nothing reads).
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import secrets
import struct
import zlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from xgr_runtime.errors import CatalogError, DeviceError
from xgr_runtime.files import open_regular
from xgr_runtime.xbeam.catalog_header import (
    SECTION_DTYPES,
    CatalogMeta,
    SectionEntry,
    content_digest,
    header_error,
    parse_header,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

MAGIC = b"XGRCATLG"
FORMAT_VERSION = 1
ALIGNMENT = 64
_PREFIX = struct.Struct("<8sIIQII")
_MAX_HEADER_BYTES = 1 << 24


@dataclass(frozen=True)
class Section:
    """One named array of a file, the byte it starts at, and the checksum its bytes must have."""

    array: NDArray[Any]
    start: int
    crc32: int


@dataclass(frozen=True)
class CatalogFile:
    """A catalogue file whose header was checked; `sections` are read-only views into the mapping or the copy."""

    path: str
    meta: CatalogMeta
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

    def check_digest(self) -> None:
        """Compares the digest with the sizes and checksums it stands for; raises CatalogError.

        Rule sets are shared between catalogues of one digest, so two contents must not go by the same.
        """
        content = [
            SectionEntry(n, s.array.dtype.str, s.array.shape, s.crc32)
            for n, s in self.sections.items()
        ]
        meta = self.meta
        got_digest = content_digest(
            FORMAT_VERSION,
            meta.num_items,
            meta.num_servable,
            meta.num_codes,
            meta.max_fanout,
            content,
        )
        if got_digest != meta.digest:
            raise header_error(
                self.path, f"digest {got_digest} fits the content, it says {meta.digest}"
            )

    def _check_gap(self, start: int, end: int) -> None:
        if any(self.view[start:end]):
            raise CatalogError(
                f"{self.path}: the gap at byte {start} must be zero and is not; the file is damaged, "
                "copy or build the catalogue again"
            )


def _aligned(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT


def section_table(sections: Mapping[str, NDArray[Any]]) -> list[SectionEntry]:
    """The header's entry of each array: name, dtype, shape and the checksum of its bytes."""
    table = []
    for name, array in sections.items():
        assert array.flags.c_contiguous, name
        assert array.dtype.str in SECTION_DTYPES, (name, array.dtype)
        crc = zlib.crc32(array.reshape(-1).view(np.uint8).data)
        table.append(SectionEntry(name, array.dtype.str, array.shape, crc))
    return table


def write_file(
    path: str | Path,
    meta: CatalogMeta,
    sections: Mapping[str, NDArray[Any]],
    table: Sequence[SectionEntry],
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
    meta: CatalogMeta, sections: Mapping[str, NDArray[Any]], table: Sequence[SectionEntry]
) -> list[bytes | memoryview]:
    content = {"meta": asdict(meta), "sections": [asdict(entry) for entry in table]}
    header = json.dumps(content, separators=(",", ":")).encode()
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


def map_file(path: str | Path) -> CatalogFile:
    """Maps a catalogue file and checks prefix, header, section table and exact length; reads no content.

    Raises:
        CatalogError: the file is missing, foreign, newer, truncated, too long, no regular file, or its header is damaged.
    """
    return _load(path, is_private=False)


def read_file(path: str | Path) -> CatalogFile:
    """As `map_file`, but reads the whole file into private memory; the file may change or go afterwards.

    Raises:
        CatalogError: as `map_file`, and where it shrinks while it is read.
        DeviceError: the host has no memory for the file.
    """
    return _load(path, is_private=True)


def _load(path: str | Path, is_private: bool) -> CatalogFile:
    name = os.fspath(path)
    with open_regular(name, "open the catalogue", CatalogError) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            header = _read_header(name, file, size)
            meta, table = parse_header(name, header)
            view = memoryview(
                _copy(name, file.fileno(), size)
                if is_private
                else mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            ).toreadonly()
        except (OSError, ValueError) as error:
            if isinstance(error, CatalogError):
                raise
            if getattr(error, "errno", None) == errno.ENOMEM:
                raise DeviceError(f"the host has no memory for the catalogue {name}") from error
            reason = (
                getattr(error, "strerror", None) or error
            )  # ValueError: shorter than `size` by now
            raise CatalogError(f"cannot open the catalogue {name}: {reason}") from error
    header_end = _PREFIX.size + len(header)
    sections = _map_sections(name, table, view, header_end)
    return CatalogFile(name, meta, sections, view, header_end)


def _copy(name: str, descriptor: int, size: int) -> mmap.mmap:
    """The whole file in anonymous memory, which goes back to the system as soon as it is let go."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with memoryview(memory) as target:
        num_read = 0
        while num_read < size:
            with target[num_read:] as rest:
                num_new = os.preadv(descriptor, [rest], num_read)
            if not num_new:
                raise CatalogError(
                    f"{name} is truncated: it had {size} bytes and lost all behind byte {num_read} while it was read"
                )
            num_read += num_new
    return memory


def _read_header(name: str, file: BinaryIO, size: int) -> bytes:
    """The header's bytes, checked against the prefix and the file's size. Read, not mapped: a short read is an error."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        raise CatalogError(
            f"{name} is no catalogue file: it has {len(prefix)} bytes, a header alone has more"
        )
    magic, version, header_bytes, file_bytes, crc, reserved = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise CatalogError(
            f"{name} is no catalogue file: it starts with {magic!r}, expected {MAGIC!r}"
        )
    if version > FORMAT_VERSION:
        raise CatalogError(
            f"{name} has catalogue format {version}, this version of xgr-runtime reads up to {FORMAT_VERSION}; "
            "upgrade xgr-runtime or build the catalogue again with it"
        )
    if file_bytes != size:
        kind = "truncated" if file_bytes > size else "too long"
        raise CatalogError(f"{name} is {kind}: its header says {file_bytes} bytes, it has {size}")
    is_too_long = header_bytes > _MAX_HEADER_BYTES or _PREFIX.size + header_bytes > size
    header = b"" if is_too_long else file.read(header_bytes)
    plain = _PREFIX.pack(magic, version, header_bytes, file_bytes, 0, 0)
    if (
        is_too_long
        or reserved
        or version < 1
        or len(header) != header_bytes
        or zlib.crc32(header, zlib.crc32(plain)) != crc
    ):
        raise CatalogError(
            f"{name}: the header is damaged (checksum mismatch); copy or build the catalogue again"
        )
    return header


def _map_sections(
    name: str, table: list[SectionEntry], view: memoryview, header_end: int
) -> dict[str, Section]:
    sections: dict[str, Section] = {}
    end = header_end
    for entry in table:
        start = _aligned(end)
        count = math.prod(entry.shape)
        end = start + count * np.dtype(entry.dtype).itemsize
        if end > len(view):
            raise header_error(name, f"section {entry.name!r} ends at byte {end} of {len(view)}")
        array = np.frombuffer(view, entry.dtype, count, start).reshape(entry.shape)
        sections[entry.name] = Section(array, start, entry.crc32)
    if _aligned(end) != len(view):
        raise header_error(name, f"the sections end at byte {_aligned(end)} of {len(view)}")
    return sections
