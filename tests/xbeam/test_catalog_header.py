"""Headers whose checksum fits and whose values do not: refused at open, by name, never with another exception."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.xbeam.catalogs import raw_header, with_header
from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import build_catalog

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    build_catalog(
        tmp_path / "c",
        sids=[[0, 1], [1, 1]],
        tags=[["a"], []],
        num_codes=[2, 2],
        token_offsets=[0, 2],
        version="v",
    )
    return tmp_path / "c"


def refused(path: Path, header: str) -> str:
    path.write_bytes(with_header(path.read_bytes(), header.encode()))
    with pytest.raises(CatalogError) as caught:
        Catalog.open(path)
    with pytest.raises(CatalogError):
        Catalog.open(path, is_private=True)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def test_the_helper_itself_leaves_a_good_file(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(with_header(content, json.dumps(raw_header(content)).encode()))
    with Catalog.open(path) as catalog:
        catalog.verify()
        assert catalog.version == "v"


ODD: list[Any] = [
    None,
    True,
    1.0,
    "x",
    "",
    [],
    ["x"],
    {},
    -1,
    0,
    2**63,
    10**400,
    [[1]],
    [True],
    [0],
]


@pytest.mark.parametrize(
    "name", ["version", "digest", "num_items", "num_servable", "num_codes", "max_fanout"]
)
def test_every_meta_value_is_checked(path: Path, name: str) -> None:
    header = raw_header(path.read_bytes())
    for odd in ODD:
        if name == "version" and odd == "x":
            continue
        wrong = copy.deepcopy(header)
        wrong["meta"][name] = odd
        message = refused(path, json.dumps(wrong))
        assert "the header is not that of a catalogue" in message, (name, odd)
    wrong = copy.deepcopy(header)
    del wrong["meta"][name]
    assert f"it lacks '{name}'" in refused(path, json.dumps(wrong))


@pytest.mark.parametrize(
    "version",
    ["a\nb", "a\0b", "\x1b[31mred", "\u202egnp", " ", "\ud800", "v" * 129, 5, None, ["x"]],
)
def test_versions(path: Path, version: object) -> None:
    header = raw_header(path.read_bytes())
    header["meta"]["version"] = version
    message = refused(path, json.dumps(header))
    assert "'version' must be 1 to 128 printable characters" in message
    assert message.isprintable()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_items", 2**31),
        ("num_servable", 3),
        ("num_codes", [2]),
        ("num_codes", [2] * 9),
        ("num_codes", [2, 2**24 + 1]),
        ("max_fanout", [1, 1, 1]),
        ("digest", "0123456789ABCDEF"),
        ("digest", "0" * 15),
    ],
)
def test_ranges(path: Path, name: str, value: object) -> None:
    header = raw_header(path.read_bytes())
    header["meta"][name] = value
    refused(path, json.dumps(header))


@pytest.mark.parametrize("name", ["name", "dtype", "shape", "crc32"])
def test_every_value_of_the_section_table_is_checked(path: Path, name: str) -> None:
    header = raw_header(path.read_bytes())
    for odd in [*ODD, [1, 1, 1], [-1], [1.0], [None], 2**32, "<i4 ", "|O", "<f4"]:
        if (name == "name" and isinstance(odd, str) and odd) or (name == "crc32" and odd == 0):
            continue
        if name == "shape" and odd == [0]:
            continue
        wrong = copy.deepcopy(header)
        wrong["sections"][0][name] = odd
        refused(path, json.dumps(wrong))
    del header["sections"][0][name]
    assert f"it lacks '{name}'" in refused(path, json.dumps(header))


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "5",
        '"x"',
        "[" * 100_000,
        '{"meta":' * 5000,
        '{"meta": ' + "[" * 900 + "]" * 900 + ', "sections": []}',
        '{"meta": {"version": ' + "9" * 5000 + '}, "sections": []}',
        '{"meta": {}, "meta": {}, "sections": []}',
        '{"meta": {}, "sections": {}}',
        '{"meta": {}, "sections": [5]}',
        '{"meta": [], "sections": []}',
        '{"meta": {}}',
    ],
    ids=range(12),
)
def test_other_json(path: Path, text: str) -> None:
    assert "the header is not that of a catalogue" in refused(path, text)


def test_a_wrong_digest_is_refused_by_verify(path: Path) -> None:
    """Rule sets are kept by digest: another content under it would be served with them."""
    content = path.read_bytes()
    header = raw_header(content)
    header["meta"]["digest"] = "0" * 16
    path.write_bytes(with_header(content, json.dumps(header).encode()))
    with (
        Catalog.open(path) as catalog,
        pytest.raises(CatalogError, match="it says 0000000000000000"),
    ):
        catalog.verify()
