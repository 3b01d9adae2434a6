"""Buckets hold their batch, stay within the capacities, and are few where graphs are captured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgr_runtime.xschedule.batch import PackedHistories, RuleRow, SearchGroup, pack_histories
from xgr_runtime.xschedule.buckets import (
    RoundsBucket,
    host_lengths_of,
    prefill_bucket_of,
    round_up,
    rounds_bucket_of,
)
from xgr_runtime.xschedule.capacities import Capacities

CAPACITIES = Capacities(
    num_tokens=500,
    num_histories=6,
    num_searches=6,
    num_rows=300,
    num_levels=4,
    max_history_tokens=90,
    num_pages_per_history=12,
)


def make_histories(lengths: list[int]) -> PackedHistories:
    page_size = 8
    pages = [[1] * -(-n // page_size) for n in lengths]
    return pack_histories([np.zeros(n, np.int64) for n in lengths], pages, page_size)


def make_group(history_of: list[int], widths: list[tuple[int, ...]]) -> SearchGroup:
    return SearchGroup(
        slot_index=0,
        catalog_version="",
        normalization="vocab",
        history_of_S=np.asarray(history_of, dtype=np.int32),
        widths_SL=np.asarray(widths, dtype=np.int32),
        rules=(RuleRow(0, None, ()),) * len(widths),
        rule_loads=(),
    )


@given(size=st.integers(1, 5000), slack=st.integers(0, 5000), is_coarse=st.booleans())
def test_rounding(size: int, slack: int, is_coarse: bool) -> None:
    capacity = size + slack
    bucket = round_up(size, capacity, is_coarse=is_coarse)
    assert size <= bucket <= capacity
    assert round_up(bucket, capacity, is_coarse=is_coarse) == bucket
    waste = bucket - size
    assert waste <= (max(7, size / 4) if is_coarse else 7)
    if size > 1:
        assert round_up(size - 1, capacity, is_coarse=is_coarse) <= bucket


def test_coarse_buckets_are_few() -> None:
    buckets = {round_up(size, 8192, is_coarse=True) for size in range(1, 8193)}
    assert len(buckets) <= 40
    assert max(buckets) == 8192


@pytest.mark.parametrize("is_coarse", [False, True])
@given(lengths=st.lists(st.integers(1, 80), min_size=1, max_size=6))
def test_a_prefill_bucket_holds_its_histories(is_coarse: bool, lengths: list[int]) -> None:
    bucket = prefill_bucket_of(
        make_histories(lengths), CAPACITIES, is_coarse=is_coarse, is_prefill_coarse=is_coarse
    )
    assert sum(lengths) <= bucket.num_tokens <= CAPACITIES.num_tokens
    assert len(lengths) <= bucket.shared.num_histories <= 6
    assert max(lengths) <= bucket.max_q == bucket.shared.max_kv <= CAPACITIES.max_history_tokens
    assert max(-(-n // 8) for n in lengths) <= bucket.shared.num_pages <= 12


@pytest.mark.parametrize("is_coarse", [False, True])
@given(data=st.data())
def test_a_rounds_bucket_holds_its_group(is_coarse: bool, data: st.DataObject) -> None:
    """Histories with no search, with one, and with several."""
    num_levels = data.draw(st.integers(1, 4))
    history_of = sorted(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6)))
    widths = [tuple(data.draw(st.integers(1, 50)) for _ in range(num_levels)) for _ in history_of]
    bucket = rounds_bucket_of(make_group(history_of, widths), CAPACITIES, is_coarse=is_coarse)
    assert len(history_of) <= bucket.num_searches <= CAPACITIES.num_searches
    assert len(bucket.rows) == len(bucket.max_rows) == num_levels
    for level, (rows, max_rows) in enumerate(zip(bucket.rows, bucket.max_rows, strict=True)):
        of_history = [0] * 6
        for history, width in zip(history_of, widths, strict=True):
            of_history[history] += width[level]
        assert sum(of_history) <= rows <= CAPACITIES.num_rows
        assert max(of_history) <= max_rows <= CAPACITIES.num_rows
        assert max_rows <= rows


def test_equal_shapes_share_a_bucket_and_one_large_search_pads_no_other() -> None:
    one = prefill_bucket_of(
        make_histories([10, 7]), CAPACITIES, is_coarse=True, is_prefill_coarse=True
    )
    two = prefill_bucket_of(
        make_histories([9, 8]), CAPACITIES, is_coarse=True, is_prefill_coarse=True
    )
    assert one == two
    pairs: list[list[tuple[int, ...]]] = [[(5, 5), (7, 8)], [(6, 4), (8, 6)]]
    first, second = (
        rounds_bucket_of(make_group([0, 1], w), CAPACITIES, is_coarse=True) for w in pairs
    )
    assert first == second
    many: list[tuple[int, ...]] = [*[(10, 10)] * 5, (200, 200)]
    bucket = rounds_bucket_of(make_group([*range(6)], many), CAPACITIES, is_coarse=True)
    assert bucket.rows == (256, 256)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_the_host_knows_the_lengths_that_the_device_is_given(lengths: list[int]) -> None:
    histories = make_histories(lengths)
    bucket = prefill_bucket_of(histories, CAPACITIES, is_coarse=True, is_prefill_coarse=True)
    known = host_lengths_of(histories, bucket.shared)
    num_padding = bucket.shared.num_histories - len(lengths)
    assert known.kv_lens == (*lengths, *[0] * num_padding)
    assert known.q_starts[: len(lengths) + 1] == tuple(histories.q_start_H1.tolist())
    assert set(known.q_starts[len(lengths) :]) == {sum(lengths)}
    assert len(known.q_starts) == bucket.shared.num_histories + 1


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


def test_an_eager_prefill_pads_only_a_little() -> None:
    histories = make_histories([70, 75])
    eager = prefill_bucket_of(histories, CAPACITIES, is_coarse=True, is_prefill_coarse=False)
    captured = prefill_bucket_of(histories, CAPACITIES, is_coarse=True, is_prefill_coarse=True)
    assert eager.num_tokens == 152
    assert captured.num_tokens == 160


def test_lengths_have_few_classes_where_every_round_is_a_graph() -> None:
    found = set()
    for length in range(1, 91):
        histories = make_histories([length])
        bucket = prefill_bucket_of(histories, CAPACITIES, is_coarse=True, is_prefill_coarse=False)
        assert bucket.shared.max_kv >= length
        found.add(bucket.shared)
    assert len({shared.max_kv for shared in found}) == len({1, 2, 4, 8, 16, 32, 64, 90})
    assert len(found) <= 9
