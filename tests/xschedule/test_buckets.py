"""Buckets hold their batch, stay within the capacities, and are few where graphs are captured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgr_runtime.xschedule.batch import Batch, pack_histories
from xgr_runtime.xschedule.buckets import bucket_of, round_up
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


def make_batch(lengths: list[int], widths: list[tuple[int, ...]]) -> Batch:
    page_size = 8
    pages = [[1] * -(-n // page_size) for n in lengths]
    packed = pack_histories([np.zeros(n, np.int64) for n in lengths], pages, page_size)
    return Batch(
        batch_id=1,
        kind="full",
        request_ids=(),
        slot_index=0,
        catalog_version="",
        normalization="vocab",
        token_ids_T=packed.token_ids_T,
        positions_T=packed.positions_T,
        kv_slots_T=packed.kv_slots_T,
        q_start_H1=packed.q_start_H1,
        kv_lens_H=packed.kv_lens_H,
        page_table_HP=packed.page_table_HP,
        history_of_S=np.arange(len(lengths), dtype=np.int32),
        widths_SL=np.asarray(widths, dtype=np.int32),
        rules=(),
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
@given(data=st.data())
def test_a_bucket_holds_its_batch(is_coarse: bool, data: st.DataObject) -> None:
    num_searches = data.draw(st.integers(1, 6))
    num_levels = data.draw(st.integers(1, 4))
    lengths = [data.draw(st.integers(1, 80)) for _ in range(num_searches)]
    widths = [
        tuple(data.draw(st.integers(1, 50)) for _ in range(num_levels)) for _ in range(num_searches)
    ]
    bucket = bucket_of(make_batch(lengths, widths), CAPACITIES, is_coarse=is_coarse)
    assert sum(lengths) <= bucket.num_tokens <= CAPACITIES.num_tokens
    assert num_searches <= bucket.num_histories == bucket.num_searches <= 6
    assert len(bucket.rows) == len(bucket.max_rows) == num_levels
    for level, (rows, max_rows) in enumerate(zip(bucket.rows, bucket.max_rows, strict=True)):
        per_search = [width[level] for width in widths]
        assert sum(per_search) <= rows <= CAPACITIES.num_rows
        assert max(per_search) <= max_rows <= CAPACITIES.num_rows
    assert max(lengths) <= bucket.max_q == bucket.max_kv <= CAPACITIES.max_history_tokens
    assert max(-(-n // 8) for n in lengths) <= bucket.num_pages <= 12


def test_equal_shapes_share_a_bucket_and_one_large_search_pads_no_other() -> None:
    one = bucket_of(make_batch([10, 7], [(5, 5), (7, 8)]), CAPACITIES, is_coarse=True)
    two = bucket_of(make_batch([9, 8], [(6, 4), (8, 6)]), CAPACITIES, is_coarse=True)
    assert one == two
    many: list[tuple[int, ...]] = [*[(10, 10)] * 5, (200, 200)]
    bucket = bucket_of(make_batch([3] * 6, many), CAPACITIES, is_coarse=True)
    assert bucket.rows == (256, 256)
