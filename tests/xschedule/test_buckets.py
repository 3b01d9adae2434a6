"""Buckets hold their batch and stay within the capacities; where nothing is captured they are close."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgr_runtime.xschedule.batch import (
    Batch,
    PackedHistories,
    RuleRow,
    SearchGroup,
    pack_histories,
)
from xgr_runtime.xschedule.buckets import (
    CloseFit,
    RoundsBucket,
    SharedBucket,
    host_lengths_of,
    round_up,
)
from xgr_runtime.xschedule.capacities import Capacities
from xgr_runtime.xschedule.input_fill import RowPlan, RowPlans

if TYPE_CHECKING:
    from collections.abc import Sequence

CAPACITIES = Capacities(
    num_tokens=500,
    num_histories=6,
    num_searches=6,
    num_rows=300,
    num_levels=4,
    max_history_tokens=90,
    num_pages_per_history=12,
)
CLOSE = CloseFit(CAPACITIES)


def make_histories(lengths: Sequence[int], cached: Sequence[int] | None = None) -> PackedHistories:
    page_size = 8
    pages = [[1] * -(-n // page_size) for n in lengths]
    return pack_histories([np.zeros(n, np.int64) for n in lengths], pages, page_size, cached)


def make_group(history_of: Sequence[int], widths: Sequence[tuple[int, ...]]) -> SearchGroup:
    return SearchGroup(
        slot_index=0,
        catalog_version="",
        normalization="vocab",
        history_of_S=np.asarray(history_of, dtype=np.int32),
        widths_SL=np.asarray(widths, dtype=np.int32),
        rules=(RuleRow(0, None, ()),) * len(widths),
        rule_loads=(),
    )


def make_batch(histories: PackedHistories, *groups: SearchGroup) -> Batch:
    return Batch(1, "full", ("",) * histories.num_histories, histories, groups)


@given(size=st.integers(1, 5000), slack=st.integers(0, 5000))
def test_rounding(size: int, slack: int) -> None:
    capacity = size + slack
    bucket = round_up(size, capacity)
    assert size <= bucket <= capacity
    assert round_up(bucket, capacity) == bucket
    assert bucket - size <= 7


@given(lengths=st.lists(st.integers(1, 80), min_size=1, max_size=6), data=st.data())
def test_a_close_bucket_holds_its_batch(lengths: list[int], data: st.DataObject) -> None:
    """Histories with no search, with one, and with several."""
    num_levels = data.draw(st.integers(1, 4))
    owners = st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=6)
    history_of = sorted(data.draw(owners))
    widths = [tuple(data.draw(st.integers(1, 50)) for _ in range(num_levels)) for _ in history_of]
    found = CLOSE.of(make_batch(make_histories(lengths), make_group(history_of, widths)))
    prefill, (rounds,) = found.prefill, found.groups
    assert sum(lengths) <= prefill.num_tokens <= sum(lengths) + 7
    assert len(lengths) <= prefill.shared.num_histories <= 6
    assert max(lengths) <= prefill.max_q == prefill.max_kv == prefill.shared.max_kv <= 90
    assert max(-(-n // 8) for n in lengths) <= prefill.shared.num_pages <= 12
    assert len(history_of) <= rounds.num_searches <= CAPACITIES.num_searches
    assert len(rounds.rows) == len(rounds.max_rows) == num_levels
    for level, (rows, max_rows) in enumerate(zip(rounds.rows, rounds.max_rows, strict=True)):
        of_history = [0] * 6
        for history, width in zip(history_of, widths, strict=True):
            of_history[history] += width[level]
        assert sum(of_history) <= rows <= sum(of_history) + 7
        assert max(of_history) <= max_rows <= rows


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_the_host_knows_the_lengths_that_the_device_is_given(lengths: list[int]) -> None:
    histories = make_histories(lengths)
    shared = CLOSE.of(make_batch(histories, make_group([0], [(1,)]))).prefill.shared
    known = host_lengths_of(histories, shared)
    num_padding = shared.num_histories - len(lengths)
    assert known.kv_lens == (*lengths, *[0] * num_padding)
    assert known.q_starts[: len(lengths) + 1] == tuple(histories.q_start_H1.tolist())
    assert set(known.q_starts[len(lengths) :]) == {sum(lengths)}
    assert len(known.q_starts) == shared.num_histories + 1


def test_rounds_depend_on_their_own_rows_and_on_those_before() -> None:
    one = RoundsBucket(2, rows=(8, 16, 24), max_rows=(8, 8, 16))
    other_last = RoundsBucket(2, rows=(8, 16, 40), max_rows=(8, 8, 16))
    other_first = RoundsBucket(2, rows=(16, 16, 24), max_rows=(8, 8, 16))
    for level, is_equal in enumerate((True, True, False)):
        part = range(level, level + 1)
        assert (one.read_by(part) == other_last.read_by(part)) == is_equal
    for level, is_equal in enumerate((False, False, True)):
        part = range(level, level + 1)
        assert (one.read_by(part) == other_first.read_by(part)) == is_equal
    assert one.read_by(range(3)) != other_last.read_by(range(3))
    assert one.read_by(range(1)) != RoundsBucket(2, (8, 16), (8, 8)).read_by(range(1))


@pytest.mark.parametrize("number", range(1, 7))
def test_histories_are_padded_to_a_power_of_two(number: int) -> None:
    padded = CLOSE.padded_histories(number)
    assert padded in (1, 2, 4, 6)
    assert number <= padded < 2 * number


def test_a_row_plan_that_is_used_again_and_again_is_kept() -> None:
    plans, shared = RowPlans(64), SharedBucket(1, 8, 1)
    bucket = RoundsBucket(1, (64, 64), (64, 64))

    def of(width: int) -> RowPlan:
        return plans.of(make_group([0], [(width, width)]), bucket, shared, 1)

    used = of(1)
    for width in range(2, 60):
        of(width)
        assert of(1) is used
