"""The NPU's providers of a beam's own tokens and of the merge, on CPU tensors, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ascend.attention_cases import (
    HALF,
    SCALE,
    assert_near,
    every_size,
    function,
    int32,
    normal,
    softmax64,
)
from tests.ascend.vendor_attention import define
from xgr_runtime.hal.ops.attention import (
    merge_attention_states,
    unshared_attention,
)

define()


@every_size
def test_unshared(
    provider: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, page: int
) -> None:
    slots = [3, 7, 0, 5]
    for num_tokens in (1, 2, 4):
        k, v = (normal(s, 9, 4, kv_heads, dim, dtype=dtype) for s in (19, 20))
        for rows in (k, v):
            rows[:, num_tokens:], rows[8] = torch.nan, torch.nan
        q = normal(21, 5, heads, dim, dtype=dtype)
        out, lse = function(unshared_attention, provider)(
            q, k, v, int32([*slots, 8]), num_tokens, SCALE
        )
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        for row, slot in enumerate(slots):
            own_k, own_v = k[slot, :num_tokens], v[slot, :num_tokens]
            expected_out, expected_lse = softmax64(q[row : row + 1], own_k, own_v, SCALE)
            assert_near(out[row : row + 1], expected_out, dtype)
            assert_near(lse[row : row + 1], expected_lse, torch.float32)


MERGES = [("torch_npu", dtype) for dtype in (*HALF, torch.float32)] + [("aten", torch.float32)]
every_merge = pytest.mark.parametrize(("provider", "dtype"), MERGES)


@every_merge
def test_merge_is_attention_over_both(provider: str, dtype: torch.dtype) -> None:
    q, k, v = (np.random.default_rng(s).standard_normal((9, 2, 16)) for s in range(3))
    parts = [softmax64(q, k[part], v[part], 3.0) for part in (slice(0, 6), slice(6, 9))]
    (out_a, lse_a), (out_b, lse_b) = [
        (torch.from_numpy(out).to(dtype), torch.from_numpy(lse).float()) for out, lse in parts
    ]
    out, lse = function(merge_attention_states, provider)(out_a, lse_a, out_b, lse_b)
    expected_out, expected_lse = softmax64(q, k, v, 3.0)
    assert out.dtype == dtype
    assert_near(out, expected_out, dtype)
    assert_near(lse, expected_lse, torch.float32)


@every_merge
def test_merge_with_an_empty_side_is_the_other_bit_for_bit(
    provider: str, dtype: torch.dtype
) -> None:
    merge = function(merge_attention_states, provider)
    full = normal(22, 2, 3, 8, dtype=dtype)
    lse = torch.tensor([[3.0, -80.0, 1e4], [-1e30, 0.0, 7.7]])
    nothing = torch.full_like(lse, -torch.inf)
    for empty in (torch.zeros_like(full), torch.full_like(full, torch.nan)):
        for got_out, got_lse in (
            merge(full, lse, empty, nothing),
            merge(empty, nothing, full, lse),
        ):
            assert torch.equal(got_out, full)
            assert torch.equal(got_lse, lse)
        got_out, got_lse = merge(empty, nothing, empty, nothing)
        assert got_out.count_nonzero() == 0
        assert torch.equal(got_lse, nothing)


@every_merge
def test_merge_of_very_different_weights(provider: str, dtype: torch.dtype) -> None:
    a, b = torch.ones(1, 1, 8, dtype=dtype), -torch.ones(1, 1, 8, dtype=dtype)
    merge = function(merge_attention_states, provider)
    out, lse = merge(a, torch.tensor([[1e30]]), b, torch.tensor([[-1e30]]))
    assert torch.equal(out, a)
    assert lse.item() == np.float32(1e30)
