"""The trie against sets of tuples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.trie import (
    Trie,
    build_trie,
    check_trie,
    code_dtype,
    find_children,
    find_leaves,
    index_dtype,
    leaf_sids,
    max_fanout,
    parents,
    range_numbers,
    sum_leaves,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

SidList = list[tuple[int, ...]]


@st.composite
def sid_lists(draw: st.DrawFn) -> SidList:
    levels = draw(st.integers(1, 5))
    size = draw(st.sampled_from([1, 2, 3, 8]))
    sid = st.tuples(*[st.integers(0, size - 1)] * levels)
    return draw(st.lists(sid, min_size=1, max_size=40))


def make(sids: SidList) -> tuple[Trie, list[int]]:
    rows = np.array(sorted(sids), np.uint16)
    trie, starts = build_trie(list(rows.T))
    return trie, starts.tolist()


@given(sid_lists())
def test_build_holds_exactly_the_set(sids: SidList) -> None:
    trie, starts = make(sids)
    prefixes: SidList = [()]
    for level, (offsets, codes) in enumerate(zip(trie.offsets, trie.codes, strict=True)):
        prefixes = [
            (*prefix, int(code))
            for node, prefix in enumerate(prefixes)
            for code in codes[offsets[node] : offsets[node + 1]]
        ]
        assert prefixes == sorted({sid[: level + 1] for sid in sids})
        children = [
            len({sid[level] for sid in sids if sid[:level] == p}) for p in {s[:level] for s in sids}
        ]
        assert max_fanout(trie)[level] == max(children)
    assert [sorted(sids)[start] for start in starts] == sorted(set(sids))
    check_trie(trie, [8] * trie.num_levels, "trie")


@given(sid_lists(), st.data())
def test_find_leaves_and_back(sids: SidList, data: st.DataObject) -> None:
    trie, _ = make(sids)
    rank = {sid: index for index, sid in enumerate(sorted(set(sids)))}
    codes = st.one_of(st.integers(0, 8), st.sampled_from([-1, 65_535, 65_536, 2**40]))
    others = data.draw(st.lists(st.tuples(*[codes] * trie.num_levels), max_size=20))
    queries = sids + others
    assert find_leaves(trie, np.array(queries, np.int64)).tolist() == [
        rank.get(sid, -1) for sid in queries
    ]
    found = leaf_sids(trie, np.arange(len(rank)))
    assert found.dtype == np.uint32
    assert [tuple(row) for row in found.tolist()] == sorted(rank)


@given(sid_lists(), st.data())
def test_sums_and_parents(sids: SidList, data: st.DataObject) -> None:
    trie, _ = make(sids)
    unique = sorted(set(sids))
    values = data.draw(st.lists(st.integers(0, 9), min_size=len(unique), max_size=len(unique)))
    sums = sum_leaves(trie, np.array(values, np.int32))
    for level, below in enumerate(sums):
        edges = sorted({sid[: level + 1] for sid in unique})
        nodes = sorted({sid[:level] for sid in unique})
        expected = [
            sum(
                value for sid, value in zip(unique, values, strict=True) if sid[: level + 1] == edge
            )
            for edge in edges
        ]
        assert below.tolist() == expected
        assert below.dtype == np.int32
        above = parents(trie, level, np.arange(len(edges)))
        assert [nodes[node] for node in above] == [edge[:-1] for edge in edges]


def test_hub_and_chain() -> None:
    hub, _ = make([(0, code, 0) for code in range(500)])
    assert max_fanout(hub) == (1, 500, 1)
    chain, _ = make([(1, 2, 3, 4, 5)])
    assert max_fanout(chain) == (1, 1, 1, 1, 1)
    assert find_leaves(chain, np.array([[1, 2, 3, 4, 5], [1, 2, 3, 4, 4]])).tolist() == [0, -1]
    children = find_children(hub, 1, np.zeros(3, np.int64), np.array([0, 499, 500]))
    assert children.tolist() == [0, 499, -1]


def test_no_queries() -> None:
    trie, _ = make([(1, 2), (3, 4)])
    assert find_leaves(trie, np.empty((0, 2), np.int64)).shape == (0,)
    assert leaf_sids(trie, np.empty(0, np.int64)).shape == (0, 2)


def test_stored_types() -> None:
    assert (code_dtype(65_536), code_dtype(65_537)) == (np.uint16, np.uint32)
    assert (index_dtype(2**31 - 1), index_dtype(2**31)) == (np.int32, np.int64)


@pytest.mark.parametrize(
    ("level", "offsets", "codes", "message"),
    [
        (0, [0, 3], [0, 1], "level 0: 2 offsets from 0 to 2 expected"),
        (0, [1, 2], [0, 1], "level 0: 2 offsets from 0 to 2 expected"),
        (0, [0, 1, 2], [0, 1], "level 0: 2 offsets"),
        (0, [0, 2], [1, 1], "level 0: the codes at edge 0 are not sorted"),
        (0, [0, 2], [1, 0], "level 0: the codes at edge 0 are not sorted"),
        (0, [0, 2], [0, 9], r"level 0: code 9 is outside \[0, 4\)"),
        (1, [0, 3, 3], [0, 1, 2], "level 1: node 1 has no child"),
        (1, [0, 4, 3], [0, 1, 2], "level 1: node 1 has no child or a decreasing offset"),
        (1, [0, 1, 3], [3, 2, 1], "level 1: the codes at edge 1 are not sorted"),
    ],
)
def test_check_refuses(level: int, offsets: list[int], codes: list[int], message: str) -> None:
    good = ((np.array([0, 2]), np.array([0, 1])), (np.array([0, 1, 3]), np.array([3, 1, 2])))
    levels = list(good)
    check_trie(Trie(*zip(*levels, strict=True)), (4, 4), "file")
    levels[level] = (np.array(offsets), np.array(codes))
    with pytest.raises(CatalogError, match=message):
        check_trie(Trie(*zip(*levels, strict=True)), (4, 4), "file")


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@given(st.lists(st.integers(1, 5), min_size=1, max_size=20))
def test_range_numbers_are_repetitions(dtype: type, lengths: list[int]) -> None:
    offsets: NDArray[Any] = np.cumsum([0, *lengths]).astype(dtype)
    numbers = range_numbers(offsets)
    assert numbers.tolist() == [i for i, length in enumerate(lengths) for _ in range(length)]
    assert numbers.dtype == dtype
