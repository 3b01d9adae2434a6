"""Files whose checksums fit and whose content contradicts itself: refused by verify, or at open where a part is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.xbeam.catalogs import build_full
from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_file import FORMAT_VERSION, map_file, section_table, write_file
from xgr_runtime.xbeam.catalog_header import content_digest

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from xgr_runtime.xbeam.catalog_header import CatalogMeta


@pytest.fixture
def full(tmp_path: Path) -> Path:
    build_full(tmp_path / "full")
    return tmp_path / "full"


def rewrite(path: Path, changed: dict[str, NDArray[Any] | None], meta: dict[str, Any]) -> None:
    """Writes the file again with some sections or numbers replaced, and checksums and a digest that fit."""
    file = map_file(path)
    sections = {name: section.array for name, section in file.sections.items()}
    for name, array in changed.items():
        if array is None:
            del sections[name]
        else:
            sections[name] = array
    write_again(path, replace(file.meta, **meta), sections)


def write_again(path: Path, meta: CatalogMeta, sections: dict[str, NDArray[Any]]) -> None:
    table = section_table(sections)
    sizes = (meta.num_items, meta.num_servable, meta.num_codes, meta.max_fanout)
    digest = content_digest(FORMAT_VERSION, *sizes, table)
    write_file(path, replace(meta, digest=digest), sections, table)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("token_of_0", [10, 11], "every code has an entry in its token table"),
        ("token_of_0", [10, 10, 12], "the tokens of level 0 are distinct"),
        ("token_of_0", [10, -1, 12], "the codes of level 0 have tokens"),
        ("token_of_0", [10, -2, 12], "the tokens of level 0 are distinct"),
        ("offsets_1", [0, 2, 2, 3], "level 1: node 1 has no child"),
        ("offsets_0", [0, 2], "level 0: 2 offsets from 0 to 3"),
        ("codes_0", [0, 2, 1], "level 0: the codes at edge 1 are not sorted"),
        ("codes_1", [1, 2, 3], r"level 1: code 3 is outside \[0, 3\)"),
        ("sid_item_offsets", [0, 2, 2, 4], "every SID has an item"),
        ("sid_item_offsets", [0, 2, 3, 5], "every SID has an item"),
        ("sid_item_offsets", [0, 1, 3, 4], None),
        ("other_sids", [[1, 3]], "not servable have tokens in level 1"),
        ("other_sids", [[1, 1, 1]], "items that are not servable have a SID"),
        ("item_ids", [7, -3, 4, 5], "ids and weights exist once an item"),
        ("item_ids", [-3, -3, 2**60, 4, 5], "item ids are distinct"),
        ("id_order", [0, 3, 4, 1, 5], "the id order holds positions"),
        ("id_order", [0, 3, 4, 1, -1], "the id order holds positions"),
        ("id_order", [0, 4, 3, 1, 2], "item ids are distinct and their order is sorted"),
        ("weights", [0.5, 1.5, 0, 0, 0], "the items of a SID are sorted by weight and id"),
        ("key_order", [0, 0, 0, 0], "the key index does not fit the keys"),
        ("key_order", [0, 1, 2, 9], "the key index does not fit the keys"),
        ("key_hashes", [4, 3, 2, 1], "the key index does not fit the keys"),
        ("key_offsets", [0, 3, 5, 5, 13], "the key index does not fit the keys|string offsets"),
        ("title_offsets", [0, 0, 5, 9, 20, 24], "a string starts inside a character"),
        (
            "title_offsets",
            [0, 0, 5, 9, 20, 25],
            "string offsets must rise from 0 to 24",
        ),
        ("tag_name_bytes", [ord("b"), ord("a"), ord("c")], "the tag names must be sorted"),
        ("tag_name_bytes", [ord("a"), ord("b"), 255], "the text is not UTF-8"),
        ("tag_offsets", [0, 2, 4, 4], "the positions of a tag must rise and be in range"),
        ("tag_positions", [1, 0, 0, 4, 3], "the positions of a tag must rise and be in range"),
        ("tag_positions", [0, 1, 0, 4, 5], "the positions of a tag must rise and be in range"),
        ("tag_positions", [0, 1, 0, 4, -1], "the positions of a tag must rise and be in range"),
    ],
)
def test_wrong_structure_is_refused_by_verify(
    full: Path, name: str, values: list[Any], message: str | None
) -> None:
    rewrite(full, {name: np.array(values, map_file(full).sections[name].array.dtype)}, {})
    with Catalog.open(full) as catalog:
        if message is None:
            catalog.verify()
            return
        with pytest.raises(CatalogError, match=message):
            catalog.verify()
        assert not catalog.is_verified


@pytest.mark.parametrize(
    "meta",
    [
        {"num_items": 4},
        {"num_servable": 5},
        {"max_fanout": (3, 2)},
        {"num_codes": (3, 4)},
    ],
)
def test_wrong_numbers_are_refused_by_verify(full: Path, meta: dict[str, Any]) -> None:
    rewrite(full, {}, meta)
    with (
        Catalog.open(full) as catalog,
        pytest.raises(CatalogError, match=r"contradicts itself|key index"),
    ):
        catalog.verify()


@pytest.mark.parametrize(
    "name",
    ["item_ids", "id_order", "codes_1", "offsets_0", "token_of_1", "key_order", "tag_offsets"],
)
def test_missing_sections_are_refused_at_open(full: Path, name: str) -> None:
    rewrite(full, {name: None}, {})
    with pytest.raises(CatalogError, match=f"the header lacks '{name}'"):
        Catalog.open(full)


@pytest.mark.parametrize(
    "name", ["item_ids", "id_order", "codes_1", "offsets_0", "token_of_1", "sid_item_offsets"]
)
def test_wrong_types_are_refused_by_verify(full: Path, name: str) -> None:
    rewrite(full, {name: map_file(full).sections[name].array.astype(np.float64)}, {})
    with (
        Catalog.open(full) as catalog,
        pytest.raises(CatalogError, match="every array has its type"),
    ):
        catalog.verify()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("title_offsets", np.zeros(0, np.int32)),
        ("title_offsets", np.zeros((6, 1), np.int32)),
        ("title_offsets", np.zeros(6, np.float64)),
        ("title_bytes", np.zeros((24, 1), np.uint8)),
        ("title_bytes", np.zeros(24, np.uint32)),
        ("key_offsets", np.zeros(0, np.int64)),
        ("key_order", np.zeros(4, np.float64)),
        ("key_order", np.zeros((4, 1), np.int32)),
        ("key_hashes", np.zeros((4, 1), np.uint64)),
        ("key_hashes", np.zeros(4, np.float64)),
        ("tag_name_offsets", np.zeros(0, np.int32)),
        ("tag_name_offsets", np.zeros((2, 2), np.int32)),
        ("tag_offsets", np.zeros(0, np.int64)),
        ("tag_offsets", np.zeros((4, 1), np.int64)),
        ("tag_positions", np.zeros(5, np.float64)),
        ("tag_positions", np.zeros((5, 1), np.int32)),
        ("weights", np.zeros(5, np.int64)),
        ("weights", np.full(5, np.nan)),
        ("other_sids", np.zeros((1, 2), np.float64)),
    ],
)
def test_wrong_types_and_shapes_of_text_and_tags_are_refused_by_verify(
    full: Path, name: str, values: NDArray[Any]
) -> None:
    rewrite(full, {name: values}, {})
    with Catalog.open(full) as catalog, pytest.raises(CatalogError, match="contradicts itself"):
        catalog.verify()
