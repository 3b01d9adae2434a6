"""The NPU's providers of attention over a history, on CPU tensors, over the vendor's ops as we read them, against float64.

The fused ones in half precision and their sizes; those from matrix products in float32 and any size.
"""

from __future__ import annotations

import pytest
import torch
import xgr_ops.ascend.attention
import xgr_ops.ascend.attention_fp32

from tests.ascend.attention_cases import (
    Cache,
    both_providers,
    cache_of,
    check_prefill,
    check_shared,
    every_size,
    function,
    int32,
    normal,
    prefill,
    shared_arguments,
    starts_of,
)
from tests.ascend.vendor_attention import define
from xgr_runtime.errors import DeviceError
from xgr_runtime.hal.ops.attention import (
    shared_attention,
)

define()


@every_size
def test_prefill(
    provider: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page: int
) -> None:
    """Whole histories, cached prefixes, runs of one new token, none, a padding history, rows of nobody."""
    new, lengths = [7, 1, 1, 0, 20, 1, 1], [7, 1, 200, 40, 141, 0, 129]
    cache = cache_of(lengths, page, kv_heads, dim, dtype)
    starts = starts_of(new)
    q = normal(1, starts[-1] + 3, heads, dim, dtype=dtype)
    q[starts[-1] :] = torch.nan
    check_prefill(prefill(provider, q, cache, starts), q, cache, starts)


@both_providers
def test_prefill_of_the_last_rows_alone(provider: str, dtype: torch.dtype) -> None:
    """The last layer asks for one row a history, padding histories included."""
    cache = cache_of([130, 5, 0, 257, 0], 128, 2, 16, dtype)
    q = normal(2, 5, 4, 16, dtype=dtype)
    check_prefill(prefill(provider, q, cache, (0, 1, 2, 3, 4, 5)), q, cache, (0, 1, 2, 3, 4, 5))


@both_providers
def test_prefill_past_a_tile(
    provider: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xgr_ops.ascend.attention_fp32, "_SCORES_PER_TILE", 4 * 140 * 6)
    cache = cache_of([140, 140], 128, 2, 16, dtype)
    q = normal(3, 40, 4, 16, dtype=dtype)
    check_prefill(prefill(provider, q, cache, (0, 15, 40)), q, cache, (0, 15, 40))


@both_providers
def test_no_rows_at_all(provider: str, dtype: torch.dtype) -> None:
    cache = cache_of([0, 9], 128, 2, 16, dtype)
    q = normal(3, 4, 4, 16, dtype=dtype)
    assert prefill(provider, q, cache, (0, 0, 0)).count_nonzero() == 0


@every_size
def test_shared(
    provider: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page: int
) -> None:
    """Uneven rows, none, histories without tokens, rows of nobody, a bound that nobody reaches."""
    rows, lengths = [3, 0, 1, 2, 20], [130, 9, 0, 257, 1]
    cache = cache_of(lengths, page, kv_heads, dim, dtype)
    starts = starts_of(rows)
    q = normal(4, starts[-1] + 3, heads, dim, dtype=dtype)
    q[starts[-1] :] = torch.nan
    for max_rows in (20, 24):
        arguments = shared_arguments(q, cache, starts, max_rows)
        out, lse = function(shared_attention, provider)(**arguments)
        check_shared(out, lse, q, cache, starts)


@both_providers
@pytest.mark.parametrize("rows", [[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 1]])
def test_shared_with_one_row_a_history(provider: str, dtype: torch.dtype, rows: list[int]) -> None:
    cache = cache_of([130, 5, 0, 257], 128, 2, 16, dtype)
    q = normal(5, 4, 4, 16, dtype=dtype)
    arguments = shared_arguments(q, cache, starts_of(rows), 1)
    out, lse = function(shared_attention, provider)(**arguments)
    check_shared(out, lse, q, cache, starts_of(rows))


@both_providers
def test_shared_past_a_tile(
    provider: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xgr_ops.ascend.attention_fp32, "_SCORES_PER_TILE", 4 * 2 * 256 * 3)
    cache = cache_of([140, 9], 128, 2, 16, dtype)
    q = normal(6, 11, 4, 16, dtype=dtype)
    arguments = shared_arguments(q, cache, (0, 4, 11), 7)
    out, lse = function(shared_attention, provider)(**arguments)
    check_shared(out, lse, q, cache, (0, 4, 11))


@both_providers
def test_a_nan_query_stays_in_its_row(provider: str, dtype: torch.dtype) -> None:
    cache = cache_of([6, 140], 128, 2, 16, dtype)
    q = normal(7, 5, 4, 16, dtype=dtype)
    q[1] = torch.nan
    arguments = shared_arguments(q, cache, (0, 3, 5), 3)
    out, lse = function(shared_attention, provider)(**arguments)
    assert out.isnan().all(-1).all(-1).tolist() == [False, True, False, False, False]
    assert lse.isnan().all(-1).tolist() == [False, True, False, False, False]
    assert out[[0, 2, 3, 4]].isfinite().all()


def test_page_ids_that_hold_no_tokens_are_not_looked_at() -> None:
    for provider, dtype in (("torch_npu", torch.bfloat16), ("aten", torch.float32)):
        cache = cache_of([130, 5], 128, 2, 16, dtype)
        cache.table[0, 2:], cache.table[1, 1:] = 10**6, -1
        q = normal(8, 4, 4, 16, dtype=dtype)
        out, lse = function(shared_attention, provider)(**shared_arguments(q, cache, (0, 3, 4), 3))
        check_shared(out, lse, q, cache, (0, 3, 4))


def common_prefix(num_histories: int) -> Cache:
    """Histories of 300 tokens that share all three pages, in a cache of five."""
    one = cache_of([300], 128, 2, 16, torch.float16)
    return Cache(
        one.k_pages,
        one.v_pages,
        one.table.repeat(num_histories, 1),
        int32([300] * num_histories),
        (300,) * num_histories,
        one.keys * num_histories,
        one.values * num_histories,
    )


def test_a_prefill_never_asks_for_more_pages_than_there_are() -> None:
    """The vendor counts a page once for each history that has it."""
    cache = common_prefix(5)
    assert cache.k_pages.shape[0] == 5
    q = normal(9, 5, 4, 16, dtype=torch.float16)
    starts = (0, 1, 2, 3, 4, 5)
    check_prefill(prefill("torch_npu", q, cache, starts), q, cache, starts)


def test_too_few_pages_for_the_shared_stage_say_how_many_are_needed() -> None:
    q = normal(9, 5, 4, 16, dtype=torch.float16)
    arguments = shared_arguments(q, common_prefix(2), (0, 2, 5), 3)
    with pytest.raises(DeviceError, match=r"6 pages.*in all: 5; raise cache\.num_pages to 6"):
        function(shared_attention, "torch_npu")(**arguments)
