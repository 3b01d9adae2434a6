"""What the builder refuses, with the row it names, and that nothing is left behind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import build_catalog

if TYPE_CHECKING:
    from pathlib import Path

GOOD: dict[str, Any] = {
    "sids": [[0, 1], [1, 2], [2, 0]],
    "item_ids": [5, 6, 7],
    "keys": ["a", "b", None],
    "titles": ["x", "", "z"],
    "weights": [1.0, 0.0, 2],
    "servable": [True, False, True],
    "tags": [["t"], [], ["u"]],
    "num_codes": [3, 3],
    "token_offsets": [10, 13],
    "version": "v1",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sids": [[0, 1], [1, 2], [2, 3]]},
            r"items, row 3: code 3 of level 1 is outside \[0, 3\)",
        ),
        (
            {"sids": [[0, 1], [-1, 2], [2, 0]]},
            r"items, row 2: code -1 of level 0 is outside \[0, 3\)",
        ),
        ({"sids": [[0, 1], [2**40, 2], [2, 0]]}, "items, row 2: code 1099511627776 of level 0"),
        ({"sids": [[0, 1], [1], [2, 0]]}, r"items, row 2: a SID of 2 codes expected, got \[1\]"),
        (
            {"sids": [[0, 1, 2], [1, 2], [2, 0]]},
            r"items, row 1: a SID of 2 codes expected, got \[0, 1, 2\]",
        ),
        (
            {"sids": [[0, 1], [2**70, 1], [2, 0]]},
            r"items, row 2: codes must be .* got 1180591620717411303424",
        ),
        (
            {"sids": [[0, 1], [1, 1], [2, 0.5]]},
            r"items, row 3: codes must be whole numbers .* got 0.5",
        ),
        (
            {"sids": np.zeros((3, 2))},
            r"sids must be whole numbers \[items, 2 levels\], got shape \(3, 2\) of float64",
        ),
        ({"sids": np.zeros((3, 3), np.int32)}, r"got shape \(3, 3\) of int32"),
        ({"sids": np.zeros(3, np.int32)}, r"got shape \(3,\) of int32"),
        ({"sids": []}, "the catalogue is empty; at least one item is needed"),
        ({"sids": np.empty((0, 2), np.int32)}, "the catalogue is empty"),
        ({"servable": [False] * 3}, "the catalogue is empty: none of its items is servable"),
        ({"item_ids": [5, 6, 5]}, "items, row 3: item id 5 is already that of row 1"),
        ({"item_ids": [5, 6]}, r"item_ids must be 3 values of int64, got shape \(2,\)"),
        ({"item_ids": [5, 6, 7.5]}, "item_ids must be 3 values of int64, got .* of float64"),
        (
            {"item_ids": np.array([1, 2**63, 2], np.uint64)},
            "items, row 2: item_ids must be int64, got 9223372036854775808",
        ),
        ({"keys": ["a", "a", None]}, "items, row 2: key 'a' is already that of row 1"),
        ({"keys": ["a", "b"]}, "keys has 2 entries, there are 3 items"),
        ({"keys": ["a", "b", 3]}, "items, row 3: the key must be a string, got 3"),
        ({"titles": ["a", "\ud800", "c"]}, "items, row 2: the title is not valid text"),
        ({"titles": ["a", None, "c"]}, "items, row 2: the title must be a string, got None"),
        ({"weights": [0, float("nan"), 0]}, "items, row 2: the weight must be finite, got nan"),
        ({"weights": [0, 0, -float("inf")]}, "items, row 3: the weight must be finite, got -inf"),
        ({"weights": ["1", "2", "3"]}, "weights must be 3 values of float64"),
        ({"servable": [1, 0, 1]}, "servable must be 3 values of bool"),
        ({"tags": [["t"], []]}, "tags has 2 entries, there are 3 items"),
        ({"tags": {"t": [3]}}, r"tag 't' needs a name and row numbers in \[0, 3\)"),
        ({"tags": {"t": [-1]}}, "tag 't' needs a name and row numbers"),
        ({"tags": {"t": [True]}}, "tag 't' needs a name and row numbers"),
        ({"tags": {"": [0]}}, "tag '' needs a name"),
        ({"version": ""}, "a version is 1 to 128 printable characters, not all blank, got ''"),
        ({"version": "a\nb"}, "a version is 1 to 128 printable characters"),
        (
            {"token_offsets": None, "token_of": [[1, -1, 2], [3, 4, 5]]},
            "items, row 2: code 1 of level 0 has no token",
        ),
        ({"token_offsets": [10], "num_codes": [3]}, "items, row 1: a SID of 1 codes expected"),
    ],
)
def test_refusals_name_the_row_and_leave_nothing(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CatalogError, match=message):
        build_catalog(tmp_path / "c", **{**GOOD, **change})
    assert os.listdir(tmp_path) == []


def test_the_good_input_is_good(tmp_path: Path) -> None:
    build_catalog(tmp_path / "c", **GOOD)
    with Catalog.open(tmp_path / "c") as catalog:
        catalog.verify()
        assert catalog.item_ids.tolist() == [5, 7, 6]
        assert catalog.keys_of([0, 1, 2]) == ["a", "", "b"]


def test_the_first_repeated_row_is_named(tmp_path: Path) -> None:
    ids = np.arange(1000)
    ids[[900, 400, 700]] = [3, 10, 3]
    with pytest.raises(CatalogError, match="row 401: item id 10 is already that of row 11"):
        build_catalog(
            tmp_path / "c",
            sids=np.zeros((1000, 1), int),
            item_ids=ids,
            num_codes=[1],
            token_offsets=[0],
        )


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
)
def test_every_integer_type(tmp_path: Path, dtype: type) -> None:
    sids: Any = np.array([[3, 100], [3, 7], [0, 100]], dtype)
    build_catalog(tmp_path / "c", sids=sids[:, ::-1], num_codes=[101, 4], token_offsets=[0, 0])
    with Catalog.open(tmp_path / "c") as catalog:
        catalog.verify()
        assert catalog.sids_of_positions([0, 1, 2]).tolist() == [[7, 3], [100, 0], [100, 3]]


def test_codes_mapped_but_unused_and_overlapping_ranges(tmp_path: Path) -> None:
    build_catalog(tmp_path / "c", sids=[[0, 0]], num_codes=[4, 4], token_offsets=[5, 7])
    with Catalog.open(tmp_path / "c") as catalog:
        catalog.verify()
        assert [table.tolist() for table in catalog.token_of] == [[5, 6, 7, 8], [7, 8, 9, 10]]


def test_tags_by_name(tmp_path: Path) -> None:
    by_name: dict[str, Any] = {"b": np.array([2, 0, 2]), "a": [], "c": [1]}
    build_catalog(
        tmp_path / "c", sids=[[2], [1], [0]], tags=by_name, num_codes=[3], token_offsets=[0]
    )
    with Catalog.open(tmp_path / "c") as catalog:
        catalog.verify()
        assert catalog.tags == ["a", "b", "c"]
        found = [catalog.tag_positions(tag) for tag in "abc"]
        assert [positions.tolist() for positions in found if positions is not None] == [
            [],
            [0, 2],
            [1],
        ]


def test_weights_beyond_float32_keep_their_order(tmp_path: Path) -> None:
    weights = [1.7e9, 1.7e9 + 1, 1e300]
    build_catalog(tmp_path / "c", sids=[[0]] * 3, weights=weights, num_codes=[1], token_offsets=[0])
    with Catalog.open(tmp_path / "c") as catalog:
        catalog.verify()
        assert catalog.item_ids.tolist() == [2, 1, 0]
