"""The file: written whole or not at all, refused when anything is wrong with it."""

from __future__ import annotations

import errno
import json
import os
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.xbeam.catalogs import build_full
from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import build_catalog
from xgr_runtime.xbeam.catalog_file import map_file
from xgr_runtime.xbeam.catalog_header import parse_header

if TYPE_CHECKING:
    from numpy.typing import NDArray


DAMAGES = "not zero|is damaged|header is|lacks|no catalogue file|has catalogue format|truncated|too long|checksum mismatch"


@pytest.fixture
def full(tmp_path: Path) -> Path:
    build_full(tmp_path / "full")
    return tmp_path / "full"


def open_and_verify(path: Path) -> None:
    with Catalog.open(path) as catalog:
        catalog.verify()


def test_layout(full: Path) -> None:
    """Header and alignment as documented, read with struct and json only."""
    content = full.read_bytes()
    magic, version, header_bytes, file_bytes, crc, reserved = struct.unpack(
        "<8sIIQII", content[:32]
    )
    assert (magic, version, file_bytes, reserved) == (b"XGRCATLG", 1, len(content), 0)
    assert crc == zlib.crc32(content[32 : 32 + header_bytes], zlib.crc32(content[:24] + bytes(8)))
    end = 32 + header_bytes
    for entry in json.loads(content[32:end])["sections"]:
        start = end + -end % 64
        assert not any(content[end:start])
        end = start + int(np.prod(entry["shape"])) * np.dtype(entry["dtype"]).itemsize
        assert zlib.crc32(content[start:end]) == entry["crc32"]
    assert len(content) == end + -end % 64


def test_a_flipped_bit_anywhere_is_refused(full: Path, tmp_path: Path) -> None:
    """Prefix, header (every third byte), every byte of every gap and section; the bit moves along."""
    content = full.read_bytes()
    damaged = tmp_path / "damaged"
    header_end = map_file(full).header_end
    for index in (*range(32), *range(32, header_end, 3), *range(header_end, len(content))):
        wrong = bytearray(content)
        wrong[index] ^= 1 << (index % 8)
        damaged.write_bytes(wrong)
        with pytest.raises(CatalogError, match=DAMAGES):
            open_and_verify(damaged)


def test_damage_is_named(full: Path) -> None:
    file = map_file(full)
    for name, section in file.sections.items():
        assert section.array.nbytes, name
        content = bytearray(full.read_bytes())
        content[section.start] ^= 4
        full.write_bytes(content)
        with (
            Catalog.open(full) as catalog,
            pytest.raises(CatalogError, match=f"section '{name}' is damaged"),
        ):
            catalog.verify()
        content[section.start] ^= 4
        full.write_bytes(content)
    open_and_verify(full)


@pytest.mark.parametrize("length", [0, 1, 31, 32, 100, 1000, -1, -64])
def test_truncated_files_are_refused_at_open(full: Path, length: int) -> None:
    full.write_bytes(full.read_bytes()[:length])
    with pytest.raises(CatalogError, match=r"truncated|no catalogue file"):
        Catalog.open(full)


def test_long_foreign_and_newer_files_are_refused_at_open(full: Path) -> None:
    content = full.read_bytes()
    full.write_bytes(content + b"\0")
    with pytest.raises(CatalogError, match=r"too long"):
        Catalog.open(full)
    full.write_bytes(b"\x93NUMPY" + content)
    with pytest.raises(CatalogError, match=r"is no catalogue file: it starts with"):
        Catalog.open(full)
    full.write_bytes(content[:8] + struct.pack("<I", 2) + content[12:])
    with pytest.raises(
        CatalogError,
        match=r"catalogue format 2, this version of xgr-runtime reads up to 1; upgrade",
    ):
        Catalog.open(full)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"cannot open the catalogue .*No such file"):
        Catalog.open(tmp_path / "absent")
    with pytest.raises(CatalogError, match=r"cannot open the catalogue .*directory"):
        Catalog.open(tmp_path)


def write_header(path: Path, header: object) -> None:
    """A file whose prefix and checksum are right and whose header is `header`."""
    text = json.dumps(header).encode()
    size = -(-(32 + len(text)) // 64) * 64
    prefix = struct.pack("<8sIIQ", b"XGRCATLG", 1, len(text), size)
    crc = zlib.crc32(text, zlib.crc32(prefix + bytes(8)))
    path.write_bytes((prefix + struct.pack("<II", crc, 0) + text).ljust(size, b"\0"))


@pytest.mark.parametrize(
    "header",
    [
        [],
        {},
        {"meta": {}, "sections": 3},
        {"meta": {}, "sections": []},
        {"meta": {}, "sections": [{"name": "a", "dtype": "|O", "shape": [1], "crc32": 0}]},
        {"meta": {}, "sections": [{"name": "a", "dtype": "<i8", "shape": [-1], "crc32": 0}]},
        {
            "meta": {},
            "sections": [{"name": "a", "dtype": "<i8", "shape": [2**40, 2**40], "crc32": 0}],
        },
        {"meta": {}, "sections": [{"name": "a", "dtype": "<i8", "shape": [0], "crc32": 0}] * 2},
        {"meta": {}, "sections": [{"name": "a", "dtype": "<i8"}]},
    ],
)
def test_wrong_headers_are_refused_at_open(tmp_path: Path, header: object) -> None:
    write_header(tmp_path / "c", header)
    with pytest.raises(
        CatalogError, match=r"the header is not that of a catalogue|the header lacks"
    ):
        Catalog.open(tmp_path / "c")


def test_replacing_a_file_leaves_open_catalogs_alone(tmp_path: Path) -> None:
    path = tmp_path / "c"
    build_catalog(path, sids=[[0], [1]], num_codes=[2], token_offsets=[0], version="one")
    old = Catalog.open(path)
    build_catalog(path, sids=[[1]], num_codes=[2], token_offsets=[0], version="two")
    old.verify()
    assert (old.version, old.num_items) == ("one", 2)
    with Catalog.open(path) as new:
        assert (new.version, new.num_items) == ("two", 1)
    assert os.listdir(tmp_path) == ["c"]


def test_a_private_catalog_does_not_follow_its_file(full: Path, tmp_path: Path) -> None:
    """Overwritten and shortened in place: the copy verifies and answers as before, and no mapping is left."""
    build_catalog(tmp_path / "o", sids=[[2, 2]], num_codes=[3, 3], token_offsets=[0, 3])
    content = full.read_bytes()
    catalog = Catalog.open(full, is_private=True)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert str(full) not in maps
    with open(full, "r+b") as file:
        file.write(bytes(len(content)))
    catalog.verify()
    os.truncate(full, 0)
    catalog.verify()
    assert catalog.titles_of(range(5)) == ["", "seven", "big", "четыре", "five"]
    assert catalog.positions_of_keys(["ключ", "k7", "no"]).tolist() == [3, 1, -1]
    assert catalog.sids_of_positions(range(5)).tolist() == [[0, 1], [0, 1], [1, 2], [2, 0], [1, 1]]
    full.write_bytes(content)
    with Catalog.open(full) as mapped:
        mapped.verify()
        assert str(full) in Path("/proc/self/maps").read_text(encoding="utf-8")
        for one, two in zip(_arrays(catalog), _arrays(mapped), strict=True):
            assert (one.dtype, one.shape, one.tobytes()) == (two.dtype, two.shape, two.tobytes())
            assert not one.flags.writeable
            assert not two.flags.writeable


def _arrays(catalog: Catalog) -> list[NDArray[Any]]:
    file = catalog._file
    assert file is not None
    return [section.array for section in file.sections.values()]


@pytest.mark.parametrize("is_private", [False, True])
def test_a_file_that_shrinks_while_it_is_opened(
    full: Path, monkeypatch: pytest.MonkeyPatch, is_private: bool
) -> None:
    """The size is taken, then the file shrinks: still a CatalogError."""
    size = os.path.getsize(full)

    def parse_late(name: str, header: bytes) -> Any:
        os.truncate(full, size - 100)
        return parse_header(name, header)

    monkeypatch.setattr("xgr_runtime.xbeam.catalog_file.parse_header", parse_late)
    with pytest.raises(CatalogError, match="full"):
        Catalog.open(full, is_private=is_private)


@pytest.mark.parametrize("is_private", [False, True])
def test_special_files_and_impossible_names_are_refused(tmp_path: Path, is_private: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CatalogError, match="a regular file is needed, this is a pipe"):
        Catalog.open(tmp_path / "pipe", is_private=is_private)
    with pytest.raises(CatalogError, match="this is a character device"):
        Catalog.open("/dev/zero", is_private=is_private)
    for name in ("a\0b", "\ud800"):
        with pytest.raises(CatalogError, match="cannot open the catalogue"):
            Catalog.open(name, is_private=is_private)


def test_an_unrelated_huge_file_is_not_read(tmp_path: Path) -> None:
    """8 TiB of holes: refused by its first bytes."""
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(CatalogError, match="is no catalogue file"):
        Catalog.open(tmp_path / "huge", is_private=True)


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        build_catalog(tmp_path / "c", sids=[[0]], num_codes=[1], token_offsets=[0])
    finally:
        os.umask(old)
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o640


def test_failed_writes_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(CatalogError, match=r"cannot write the catalogue .*folder"):
        build_catalog(tmp_path / "folder", sids=[[0]], num_codes=[1], token_offsets=[0])
    with pytest.raises(CatalogError, match=r"cannot write the catalogue .*No such file"):
        build_catalog(tmp_path / "absent" / "c", sids=[[0]], num_codes=[1], token_offsets=[0])
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(tmp_path / "folder") == []


def test_a_write_that_fails_half_way_leaves_the_old_file(full: Path) -> None:
    """A real limit on the size of files, in a process of its own."""
    before = full.read_bytes()
    limit = len(before) // 2
    script = (
        "import pathlib, sys; from tests.xbeam.catalogs import build_full; "
        "build_full(pathlib.Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", script, str(full)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    assert f"cannot write the catalogue {full}: {os.strerror(errno.EFBIG)}" in done.stderr
    assert full.read_bytes() == before
    assert os.listdir(full.parent) == ["full"]
