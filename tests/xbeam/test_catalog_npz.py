"""NPZ input: every array is checked by its name before it is believed, nothing is unpickled."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xbeam.sources import TOKENS
from xgr_runtime.cli import EXIT_SYSTEM
from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import build_catalog_from_file

if TYPE_CHECKING:
    from pathlib import Path

GOOD: dict[str, Any] = {
    "sids": np.array([[0, 1], [3, 2], [1, 1]], np.uint8),
    "item_ids": np.array([5, 6, 7]),
    "keys": np.array(["a", "", "c"]),
    "titles": np.array([b"x", "é".encode(), b""]),
    "weights": np.array([0, 1, 2], np.float32),
    "servable": np.array([True, True, False]),
    "tag_names": np.array(["t", "u"]),
    "tag_offsets": np.array([0, 2, 2, 3]),
    "tag_indices": np.array([1, 0, 1]),
}


def save(path: Path, **change: Any) -> Path:
    arrays = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    np.savez(path, **arrays)
    return path


def build(folder: Path, source: Path) -> Catalog:
    build_catalog_from_file(folder / "c", source, **TOKENS)
    catalog = Catalog.open(folder / "c")
    catalog.verify()
    return catalog


def test_the_good_file_is_good(tmp_path: Path) -> None:
    with build(tmp_path, save(tmp_path / "i.npz")) as catalog:
        assert catalog.item_ids.tolist() == [5, 6, 7]
        assert catalog.titles_of([0, 1, 2]) == ["x", "é", ""]
        found = [catalog.tag_positions(tag) for tag in ("t", "u")]
        assert [p.tolist() for p in found if p is not None] == [[0], [0, 2]]


def test_sids_alone_are_items_by_their_rows(tmp_path: Path) -> None:
    np.savez(tmp_path / "i.npz", sids=np.array([[3, 2], [0, 0]]))
    with build(tmp_path, tmp_path / "i.npz") as catalog:
        assert catalog.item_ids.tolist() == [1, 0]


def test_arrays_in_column_order_and_big_endian(tmp_path: Path) -> None:
    sids = np.asfortranarray(GOOD["sids"].astype(">i4"))
    save(tmp_path / "a.npz", sids=sids, item_ids=GOOD["item_ids"].astype(">i8"))
    save(tmp_path / "b.npz")
    built = []
    for name in ("a", "b"):
        build(tmp_path, tmp_path / f"{name}.npz").close()
        built.append((tmp_path / "c").read_bytes())
    assert built[0] == built[1]


OBJECTS = np.array([1, "two", None], dtype=object)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sids": None}, "the array 'sids' is needed, got"),
        ({"titel": np.array(["x"] * 3)}, "unknown array 'titel'; did you mean 'titles'"),
        ({"price": np.zeros(3)}, "unknown array 'price'; known: keys, titles"),
        ({"keys": OBJECTS}, "array 'keys' holds Python objects, which are never loaded"),
        (
            {"sids": np.zeros((3, 2))},
            r"array 'sids' must be integers in 2 .*, got shape \(3, 2\) of float64",
        ),
        ({"sids": np.zeros(3, int)}, r"array 'sids' must be integers in 2 .*, got shape \(3,\)"),
        (
            {"sids": np.zeros((3, 3), int)},
            r"array 'sids' must be \[items, 2 levels\], got shape \(3, 3\)",
        ),
        ({"sids": np.zeros((0, 2), int)}, "the catalogue is empty"),
        ({"sids": np.array([[0, 1], [0, -1], [0, 0]])}, "row 2: code -1 of level 1 is outside"),
        ({"item_ids": np.array([5.0, 6, 7])}, "array 'item_ids' must be integers in 1"),
        ({"item_ids": np.array([5, 6])}, "array 'item_ids' has 2 entries, there are 3 items"),
        ({"item_ids": np.array([5, 6, 5])}, "row 3: item id 5 is already that of row 1"),
        ({"item_ids": np.array([5, 6, 2**63], np.uint64)}, "row 3: item_ids must be int64"),
        ({"keys": np.array([1, 2, 3])}, "array 'keys' must be str or bytes in 1"),
        ({"keys": np.array(["a", "b", "a"])}, "row 3: key 'a' is already that of row 1"),
        ({"keys": np.array(["a", "b"])}, "array 'keys' has 2 entries"),
        (
            {"titles": np.array([b"a", b"\xff", b"c"])},
            "row 2: array 'titles' holds bytes that are not UTF-8",
        ),
        ({"titles": np.array(["a", "\ud800", "c"])}, "row 2: the title is not valid text"),
        ({"weights": np.array(["1", "2", "3"])}, "array 'weights' must be numbers in 1"),
        ({"weights": np.array([0, np.nan, 0])}, "row 2: the weight must be finite, got nan"),
        ({"servable": np.array([1, 0, 1])}, "array 'servable' must be bool in 1"),
        ({"tag_indices": None}, "tags are the three arrays .*, got only tag_names, tag_offsets"),
        ({"tag_offsets": np.array([0, 2, 3])}, "array 'tag_offsets' must have 4 entries"),
        ({"tag_offsets": np.array([0, 2, 1, 3])}, "array 'tag_offsets' must rise from 0 to 3"),
        ({"tag_offsets": np.array([1, 2, 2, 3])}, "array 'tag_offsets' must rise from 0"),
        ({"tag_offsets": np.array([0, 2, 2, 4])}, "array 'tag_offsets' must rise from 0 to 3"),
        ({"tag_offsets": np.array([0, 2, 1, 3], np.uint8)}, "array 'tag_offsets' must rise"),
        (
            {"tag_indices": np.array([1, 0, 2])},
            r"row 3: array 'tag_indices' must be in \[0, 2\), got 2",
        ),
        ({"tag_indices": np.array([-1, 0, 1])}, "row 1: array 'tag_indices' must be in"),
        ({"tag_names": np.array(["t", "t"])}, "array 'tag_names' holds a name twice"),
        ({"tag_names": np.array(["t", ""])}, "tag '' needs a name"),
        ({"tag_names": np.array(["t", "a\nb"])}, "row 1: a tag must not contain control"),
    ],
)
def test_refusals_name_the_array(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    source = save(tmp_path / "items.npz", **change)
    with pytest.raises(CatalogError, match=rf"items\.npz[:,] {message}"):
        build(tmp_path, source)
    assert os.listdir(tmp_path) == ["items.npz"]


def member(name: str, content: bytes, path: Path) -> Path:
    """An archive of the good arrays but for one member's bytes."""
    save(path)
    with zipfile.ZipFile(path) as archive:
        contents = {n: archive.read(n) for n in archive.namelist()}
    contents[name] = content
    with zipfile.ZipFile(path, "w") as archive:
        for one, data in contents.items():
            archive.writestr(one, data)
    return path


def array_bytes(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_files_that_are_no_archive_of_arrays(tmp_path: Path) -> None:
    path = tmp_path / "items.npz"
    path.write_bytes(b"not a zip")
    with pytest.raises(
        CatalogError, match=r"items\.npz is no NPZ file: .*; write it with numpy\.savez"
    ):
        build(tmp_path, path)
    np.save(tmp_path / "plain.npy", GOOD["sids"])
    os.rename(tmp_path / "plain.npy", path)
    with pytest.raises(CatalogError, match="is no NPZ file"):
        build(tmp_path, path)
    with pytest.raises(CatalogError, match=r"unknown array 'readme\.txt'"):
        build(tmp_path, member("readme.txt", b"hello", path))
    with pytest.raises(
        CatalogError, match=r"array 'weights' cannot be read: it starts with b'hello"
    ):
        build(tmp_path, member("weights.npy", b"hello there", path))
    content = array_bytes(GOOD["weights"])
    with pytest.raises(CatalogError, match="array 'weights' is damaged or cut short"):
        build(tmp_path, member("weights.npy", content[:-3], path))
    with pytest.raises(CatalogError, match=r"array 'weights' is damaged .* more than the 12 bytes"):
        build(tmp_path, member("weights.npy", content + b"x", path))
    assert os.listdir(tmp_path) == ["items.npz"]


@pytest.mark.parametrize(
    "header",
    [
        "{",
        "[" * 5000,
        "-" * 9000,
        "{'descr': '<f4'}",
        "{[]: 1}",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3,)}",
        "{'descr': 'nonsense', 'fortran_order': False, 'shape': (3,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-3,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3L,)}",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (3,)}",
        "\0",
        "x" * 20000,
    ],
)
def test_headers_that_are_wrong(tmp_path: Path, header: str) -> None:
    content = b"\x93NUMPY\x02\0" + struct.pack("<I", len(header)) + header.encode() + bytes(12)
    with pytest.raises(CatalogError, match=r"items\.npz: array 'weights' cannot be read"):
        build(tmp_path, member("weights.npy", content, tmp_path / "items.npz"))
    assert os.listdir(tmp_path) == ["items.npz"]


def test_texts_that_are_all_empty(tmp_path: Path) -> None:
    out = io.BytesIO()
    shape: Any = {"descr": "<U0", "fortran_order": False, "shape": (3,)}
    np.lib.format.write_array_header_1_0(out, shape)
    with build(tmp_path, member("titles.npy", out.getvalue(), tmp_path / "i.npz")) as catalog:
        assert catalog.titles is None


def test_an_archive_that_unpacks_to_more_than_its_items_is_refused_unread(tmp_path: Path) -> None:
    """Only its header says so: no byte of it exists."""
    out = io.BytesIO()
    huge: Any = {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)}
    np.lib.format.write_array_header_1_0(out, huge)
    with pytest.raises(
        CatalogError, match="array 'weights' has 1099511627776 entries, there are 3"
    ):
        build(tmp_path, member("weights.npy", out.getvalue(), tmp_path / "items.npz"))


def announced(descr: str, num_entries: int) -> bytes:
    """A header and no content."""
    out = io.BytesIO()
    shape: Any = {"descr": descr, "fortran_order": False, "shape": (num_entries,)}
    np.lib.format.write_array_header_1_0(out, shape)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "descr", "num_entries"),
    [
        ("titles", "<U100000000", 3),
        ("titles", "|S400000000", 3),
        ("keys", "<U1500000", 3),
        ("tag_names", "<U40", 1 << 20),
        ("tag_names", "<U5000000", 1),
        ("tag_indices", "<i8", 1 << 22),
    ],
)
def test_wide_or_long_arrays_for_a_few_items_are_refused_unread(
    tmp_path: Path, name: str, descr: str, num_entries: int
) -> None:
    path = member(f"{name}.npy", announced(descr, num_entries), tmp_path / "items.npz")
    size = np.dtype(descr).itemsize * num_entries
    with pytest.raises(CatalogError, match=rf"array '{name}' takes {size} bytes, at most \d+ are"):
        build(tmp_path, path)


def test_a_small_file_does_not_take_much_memory(tmp_path: Path) -> None:
    """One item with a title of blanks that compresses a thousand times."""
    titles = np.array(["x" + " " * 50_000_000])
    np.savez_compressed(tmp_path / "items.npz", sids=np.array([[0, 0]]), titles=titles)
    assert (tmp_path / "items.npz").stat().st_size < 400_000
    del titles
    tracemalloc.start()
    try:
        with pytest.raises(CatalogError, match="array 'titles' takes 200000004 bytes"):
            build(tmp_path, tmp_path / "items.npz")
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_long_texts_of_a_few_items_are_read(tmp_path: Path) -> None:
    titles = np.array(["a" * 1_000_000, "", "b"])
    with build(tmp_path, save(tmp_path / "i.npz", titles=titles)) as catalog:
        assert catalog.titles_of([0]) == ["a" * 1_000_000]


BUILD_IN_A_CORNER = """
import resource, sys
import numpy
from xgr_runtime.cli import main
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[1:]))
"""


def test_a_sound_file_that_memory_does_not_suffice_for(tmp_path: Path) -> None:
    """It is not called damaged, and the command ends with a line."""
    num_items = 200_000
    np.savez_compressed(
        tmp_path / "items.npz",
        sids=np.zeros((num_items, 2), np.int64),
        titles=np.full(num_items, "a", "<U100"),
    )
    words = ["catalog", "build", str(tmp_path / "items.npz"), str(tmp_path / "c")]
    words += ["--codes", "4,4", "--token-offsets", "0,0"]
    done = subprocess.run(
        [sys.executable, "-c", BUILD_IN_A_CORNER, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == EXIT_SYSTEM, done.stderr
    assert done.stderr.startswith("xgr: this machine has no memory for it: Unable to allocate")
    assert done.stderr.count("\n") == 1


def test_an_encrypted_member(tmp_path: Path) -> None:
    path = save(tmp_path / "items.npz")
    content = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = content.find(signature)
        while at >= 0:
            content[at + flags] |= 1
            at = content.find(signature, at + 1)
    path.write_bytes(content)
    with pytest.raises(
        CatalogError, match=r"array 'sids' is encrypted; write it with numpy\.savez"
    ):
        build(tmp_path, path)


def test_a_member_that_is_there_twice(tmp_path: Path) -> None:
    path = save(tmp_path / "items.npz")
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("weights.npy", array_bytes(GOOD["weights"]))
    with pytest.raises(CatalogError, match="the array 'weights' is there twice"):
        build(tmp_path, path)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_no_changed_byte_passes_unseen(
    tmp_path_factory: pytest.TempPathFactory, place: int, flip: int
) -> None:
    """The archive's checksums cover the arrays; what a changed byte leaves whole gives the same catalogue."""
    folder = tmp_path_factory.mktemp("flip")
    source = save(folder / "items.npz")
    build(folder, source).close()
    right = (folder / "c").read_bytes()
    os.unlink(folder / "c")
    content = bytearray(source.read_bytes())
    content[place % len(content)] ^= flip
    source.write_bytes(content)
    refusal = ""
    try:
        build(folder, source).close()
    except CatalogError as error:
        refusal = str(error)
    if refusal:
        assert "items.npz" in refusal
        assert os.listdir(folder) == ["items.npz"]
    else:
        assert (folder / "c").read_bytes() == right
