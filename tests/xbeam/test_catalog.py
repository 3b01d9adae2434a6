"""Look-ups of a compiled catalogue against dictionaries over the items it was built from."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xbeam.catalogs import (
    TAGS,
    Item,
    Source,
    build_items,
    build_source,
    leaves,
    position_order,
    sources,
)
from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import build_catalog


@given(sources())
def test_positions_and_sids(source: Source) -> None:
    catalog = build_source(source)
    ranked = position_order(source.items)
    servable = [item for item in ranked if item.servable]
    sids = sorted({item.sid for item in servable})
    assert leaves(catalog) == sids
    sizes = (catalog.num_items, catalog.num_servable, catalog.num_sids, catalog.num_levels)
    assert sizes == (len(ranked), len(servable), len(sids), len(source.num_codes))
    assert catalog.item_ids.tolist() == [item.item_id for item in ranked]
    every = np.arange(len(ranked))
    assert [tuple(sid) for sid in catalog.sids_of_positions(every).tolist()] == [
        item.sid for item in ranked
    ]
    expected = [sids.index(item.sid) if item.servable else -1 for item in ranked]
    assert catalog.sid_of_positions(every).tolist() == expected
    assert catalog.weights_of(every).tolist() == [item.weight for item in ranked]
    assert [tuple(sid) for sid in catalog.sids_of_leaves(np.arange(len(sids))).tolist()] == sids
    for index, sid in enumerate(sids):
        first, end = catalog.sid_item_offsets[index : index + 2]
        assert [item.sid for item in servable[first:end]] == [sid] * (end - first)
    assert catalog.sid_item_offsets[-1] == len(servable)


@given(sources(), st.data())
def test_look_ups(source: Source, data: st.DataObject) -> None:
    catalog = build_source(source)
    ranked = position_order(source.items)
    position = {item.item_id: index for index, item in enumerate(ranked)}
    known = st.sampled_from(sorted(position))
    ids = data.draw(st.lists(st.one_of(known, st.integers(-(2**63), 2**63 - 1)), max_size=20))
    assert catalog.positions_of_ids(ids).tolist() == [position.get(item_id, -1) for item_id in ids]
    sids = sorted({item.sid for item in ranked if item.servable})
    queries = data.draw(
        st.lists(st.tuples(*[st.integers(-1, 5)] * catalog.num_levels), min_size=1, max_size=20)
    )
    expected = [sids.index(sid) if sid in sids else -1 for sid in queries]
    assert catalog.positions_of_sids(queries).tolist() == expected
    assert catalog.tags == sorted({tag for item in ranked for tag in item.tags})
    for tag in TAGS:
        tagged = [index for index, item in enumerate(ranked) if tag in item.tags]
        found = catalog.tag_positions(tag)
        assert (None if found is None else found.tolist()) == (tagged or None)


@given(sources(), st.randoms(use_true_random=False))
def test_the_file_does_not_depend_on_the_order_of_rows(source: Source, random: object) -> None:
    shuffled = list(source.items)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = build_source(source), build_source(Source(shuffled, source.num_codes))
    assert one.digest == other.digest == one.version


def test_leaf_counts(tmp_path: Path) -> None:
    items = [Item(i, sid) for i, sid in enumerate([(0, 0), (0, 0), (0, 1), (2, 1)])]
    catalog = build_items(tmp_path / "c", items, (3, 2))
    assert [level.tolist() for level in catalog.leaf_counts] == [[2, 1], [1, 1, 1]]


def test_a_thousand_items_in_one_sid(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    ids, weights = rng.permutation(10_000)[:1000], rng.integers(0, 5, 1000)
    items = [Item(int(i), (1, 1, 1), float(w)) for i, w in zip(ids, weights, strict=True)]
    catalog = build_items(tmp_path / "c", [*items, Item(-1, (0, 0, 0))], (2, 2, 2))
    assert catalog.sid_item_offsets.tolist() == [0, 1, 1001]
    expected = sorted(items, key=lambda item: (-item.weight, item.item_id))
    assert catalog.item_ids[1:].tolist() == [item.item_id for item in expected]
    assert catalog.max_fanout == (2, 1, 1)


def test_one_item(tmp_path: Path) -> None:
    catalog = build_items(tmp_path / "c", [Item(5, (3,))], (4,))
    assert (catalog.max_fanout, catalog.num_sids, catalog.positions_of_ids([5, 4]).tolist()) == (
        (1,),
        1,
        [0, -1],
    )
    assert (catalog.codes[0].dtype.name, catalog.offsets[0].dtype.name) == ("uint16", "int32")


def test_hub_with_wide_codes(tmp_path: Path) -> None:
    """One first code over many children, codes past 65,536, and a level with a single code."""
    items = [Item(i, (0, code)) for i, code in enumerate(range(0, 70_001, 7))]
    catalog = build_items(tmp_path / "c", items, (1, 70_001))
    assert catalog.codes[1].dtype == np.uint32
    assert catalog.max_fanout == (1, 10_001)
    assert catalog.positions_of_sids([[0, 70_000], [0, 69_999], [1, 0]]).tolist() == [
        10_000,
        -1,
        -1,
    ]


def test_shapes_that_do_not_fit_one_word(tmp_path: Path) -> None:
    """Eight levels of 65,536 codes are 128 bits: the general sort."""
    rng = np.random.default_rng(5)
    sids = rng.integers(0, 65_536, (500, 8))
    sids[250:, :7] = sids[:250, :7]
    build_catalog(tmp_path / "c", sids=sids, num_codes=[65_536] * 8, token_offsets=[0] * 8)
    catalog = Catalog.open(tmp_path / "c")
    catalog.verify()
    rows = [tuple(row) for row in sids.tolist()]
    assert leaves(catalog) == sorted(rows)
    assert catalog.item_ids.tolist() == sorted(range(500), key=rows.__getitem__)


def test_keys_and_titles(tmp_path: Path) -> None:
    build_catalog(
        tmp_path / "c",
        sids=[[2], [0], [1]],
        keys=["B00ß", None, "a" * 300],
        titles=["", "Ключ", "x"],
        num_codes=[3],
        token_offsets=[0],
    )
    catalog = Catalog.open(tmp_path / "c")
    catalog.verify()
    assert catalog.keys_of([0, 1, 2]) == ["", "a" * 300, "B00ß"]
    assert catalog.titles_of([2, 0]) == ["", "Ключ"]
    assert catalog.item_ids.tolist() == [1, 2, 0]
    queries = ["B00ß", "B00", "", "a" * 300, "\ud800"]
    assert catalog.positions_of_keys(queries).tolist() == [2, -1, -1, 1, -1]
    assert catalog.positions_of_keys([]).shape == (0,)


def test_absent_columns(tmp_path: Path) -> None:
    build_catalog(tmp_path / "c", sids=[[1], [0]], num_codes=[2], token_offsets=[7])
    catalog = Catalog.open(tmp_path / "c")
    assert (catalog.keys_of([0]), catalog.titles_of([0]), catalog.tags) == (None, None, [])
    assert catalog.positions_of_keys(["a"]).tolist() == [-1]
    assert catalog.weights_of([0, 1]).tolist() == [0.0, 0.0]
    assert catalog.tag_positions("a") is None
    assert catalog.token_of[0].tolist() == [7, 8]
    assert catalog.positions_of_ids([]).shape == (0,)


def test_open_does_not_verify(tmp_path: Path) -> None:
    build_catalog(tmp_path / "c", sids=[[0]], num_codes=[1], token_offsets=[0], version="spring")
    with Catalog.open(tmp_path / "c") as catalog:
        before = catalog.is_verified
        catalog.verify()
        assert (before, catalog.is_verified) == (False, True)
        assert catalog.version == "spring" != catalog.digest


def test_prepare_changes_no_answer(tmp_path: Path) -> None:
    items = [
        Item(1, (0,)),
        Item(2, (0,)),
        Item(3, (1,), tags=("a",)),
        Item(4, (1,), servable=False),
    ]
    catalog = build_items(tmp_path / "c", items, (2,))
    before = catalog.sid_of_positions([0, 1, 2, 3]).tolist()
    catalog.prepare()
    assert catalog.sid_of_positions([0, 1, 2, 3]).tolist() == before == [0, 0, 1, -1]
    assert [level.tolist() for level in catalog.parents] == [[0, 0]]


def test_wrong_arguments(tmp_path: Path) -> None:
    catalog = build_items(tmp_path / "c", [Item(1, (0, 0)), Item(2, (0, 1))], (1, 2))
    for positions in ([-1], [2]):
        with pytest.raises(IndexError, match=r"every position must be in \[0, 2\)"):
            catalog.sids_of_positions(positions)
    with pytest.raises(IndexError, match=r"every SID index must be in \[0, 2\)"):
        catalog.sids_of_leaves([2])
    for sids in ([[0]], [0, 1], [[0.0, 1.0]]):
        with pytest.raises(CatalogError, match=r"SIDs must be whole numbers \[n, 2\]"):
            catalog.positions_of_sids(sids)


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_close_gives_the_memory_back(tmp_path: Path) -> None:
    path = tmp_path / "closing"
    catalog = build_items(path, [Item(1, (0,)), Item(2, (1,), servable=False)], (2,))
    held = catalog.item_ids
    assert is_mapped(path)
    catalog.close()
    catalog.close()
    assert held.tolist() == [1, 2], "arrays that are held stay valid"
    del held
    gc.collect()
    assert not is_mapped(path)
    assert (catalog.path, catalog.is_verified) == (str(path), False)
    for use in (
        catalog.verify,
        lambda: catalog.codes,
        lambda: catalog.positions_of_ids([1]),
        lambda: catalog.tags,
    ):
        with pytest.raises(CatalogError, match="is closed"):
            use()


def test_unknown_attributes_are_errors(tmp_path: Path) -> None:
    catalog = build_items(tmp_path / "c", [Item(1, (0,))], (1,))
    with pytest.raises(AttributeError, match="'Catalog' object has no attribute 'colour'"):
        catalog.colour  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("first", [0, 7, -5, -(2**63), 2**63 - 40])
@pytest.mark.parametrize("missing", [None, 0, 20, 39])
def test_consecutive_ids(tmp_path: Path, first: int, missing: int | None) -> None:
    """And those that are not quite: ids near them, far from them, repeated, in any order."""
    rng = np.random.default_rng(3)
    ids = [first + n for n in rng.permutation(40).tolist() if n != missing]
    file = tmp_path / "items.xgr"
    sids = rng.integers(0, 3, (len(ids), 2))
    build_catalog(file, sids=sids, item_ids=ids, num_codes=[3, 3], token_offsets=[0, 3])
    catalog = Catalog.open(file)
    position = {item_id: place for place, item_id in enumerate(catalog.item_ids.tolist())}
    assert set(position) == set(ids)
    extremes = [-(2**63), 2**63 - 1, 0, 1, -1]
    asked = [*ids, *(first + n for n in (-1, 40, 41, 20) if abs(first + n) < 2**63), *extremes]
    found = catalog.positions_of_ids(asked)
    assert found.tolist() == [position.get(item_id, -1) for item_id in asked]
    assert found.dtype == np.int64
    assert catalog.positions_of_ids([]).tolist() == []


@given(sources())
def test_sids_are_the_same_once_it_is_prepared(source: Source) -> None:
    """Parents are searched before, and looked up then."""
    catalog = build_source(source)
    every, all_leaves = np.arange(catalog.num_items), np.arange(catalog.num_sids)
    before = catalog.sids_of_positions(every), catalog.sids_of_leaves(all_leaves)
    catalog.prepare()
    assert np.array_equal(catalog.sids_of_positions(every), before[0])
    assert np.array_equal(catalog.sids_of_leaves(all_leaves), before[1])
