"""From ranked SIDs to items, against the oracle's expansion."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.oracle import Catalog, Item, expand_items
from xgr_runtime.xbeam.ranking import rank_items

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn


@st.composite
def cases(draw: DrawFn) -> tuple[Catalog, list[int], set[int], set[int], int, int | None]:
    """Items by position, leaves in some rank order, dead positions, excluded positions, and the two cuts."""
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    items: list[Item] = []
    for sid, count in enumerate(counts):
        weights = sorted((draw(st.integers(0, 2)) for _ in range(count)), reverse=True)
        items += [Item(len(items) + i, (sid,), float(w)) for i, w in enumerate(weights)]
    catalog = Catalog(tuple(items), ((0,) * len(counts),))
    leaves = draw(st.permutations(range(len(counts))).map(lambda p: p[: draw(st.integers(0, 8))]))
    positions = st.sets(st.integers(0, len(items) - 1))
    return (
        catalog,
        list(leaves),
        draw(positions),
        draw(positions),
        draw(st.integers(1, 30)),
        draw(st.none() | st.integers(1, 4)),
    )


@given(case=cases(), has_tags=st.booleans())
def test_against_the_expansion(
    case: tuple[Catalog, list[int], set[int], set[int], int, int | None], has_tags: bool
) -> None:
    catalog, leaves, dead, excluded, num_results, cap = case
    if not has_tags:
        dead = set()
    counts = [sum(item.sid == (sid,) for item in catalog.items) for sid in range(len(catalog.sids))]
    alive = np.asarray([i not in dead for i in range(len(catalog.items))])
    got = rank_items(
        np.asarray(leaves, np.int32),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        alive if has_tags else None,
        np.asarray(sorted(excluded), np.int64),
        num_results,
        cap,
    )
    kept = catalog.keep(lambda item: item.item_id not in dead | excluded)
    rows = [((leaf,), -float(rank)) for rank, leaf in enumerate(leaves)]
    expected = expand_items(rows, kept, num_results, cap)
    assert got.positions.tolist() == [row.item_id for row in expected]
    assert got.ranks.tolist() == [int(-row.score) for row in expected]


@pytest.mark.parametrize("num_results", [1, 255, 256, 257, 1000, 5000])
def test_many_leaves_are_cut_in_rank_order(num_results: int) -> None:
    """More leaves than are expanded at once; every SID but every third is excluded."""
    rng = np.random.default_rng(1)
    leaves = rng.permutation(3000)[:1024]
    excluded = np.flatnonzero(np.arange(3000) % 3 != 0)
    offsets = np.arange(3001, dtype=np.int64)
    got = rank_items(leaves, offsets, None, excluded, num_results, None)
    expected = [int(leaf) for leaf in leaves if leaf % 3 == 0][:num_results]
    assert got.positions.tolist() == expected
    assert leaves[got.ranks].tolist() == expected


def test_nothing_in_nothing_out() -> None:
    nothing = np.zeros(0, np.int64)
    got = rank_items(nothing, np.asarray([0, 3]), None, nothing, 5, None)
    assert len(got.positions) == len(got.ranks) == 0
    gone = rank_items(np.asarray([0]), np.asarray([0, 3]), np.zeros(3, bool), nothing, 5, None)
    assert len(gone.positions) == 0
