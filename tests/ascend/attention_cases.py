"""What the tests of the NPU's attention providers share: sizes, histories in pages, calls, and attention in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from xgr_runtime.hal.ops.attention import prefill_attention
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import Impl
from xgr_runtime.hal.tolerances import TOLERANCES

load_providers("npu")
SCALE = 0.3
HALF = (torch.float16, torch.bfloat16)
FUSED_SIZES = [(4, 4, 16, 128), (8, 2, 32, 128), (6, 1, 48, 256)]
FUSED = [("torch_npu", dtype, *sizes) for dtype in HALF for sizes in FUSED_SIZES]
PRODUCTS = [("aten", torch.float32, *sizes) for sizes in [*FUSED_SIZES, (6, 2, 5, 3), (1, 1, 2, 1)]]
every_size = pytest.mark.parametrize(
    ("provider", "dtype", "heads", "kv_heads", "dim", "page"), [*FUSED, *PRODUCTS]
)
both_providers = pytest.mark.parametrize(
    ("provider", "dtype"), [("torch_npu", torch.bfloat16), ("aten", torch.float32)]
)


def softmax64(
    q_RQD: Any, k_KGD: Any, v_KGD: Any, scale: float, seen_R: Any = None
) -> tuple[Any, Any]:
    """(out [R, Q, D], lse [R, Q]) in float64; row i sees the first seen_R[i] keys, or all. None seen: 0 and -inf."""
    q, k, v = (
        np.asarray(t.double() if isinstance(t, torch.Tensor) else t) for t in (q_RQD, k_KGD, v_KGD)
    )
    num_rows, num_heads, _ = q.shape
    out, lse = np.zeros(q.shape), np.full((num_rows, num_heads), -np.inf)
    for row in range(num_rows):
        seen = len(k) if seen_R is None else int(seen_R[row])
        for head in range(num_heads if seen else 0):
            group = head // (num_heads // k.shape[1])
            scores = k[:seen, group] @ q[row, head] * scale
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v[:seen, group] / weights.sum()
            lse[row, head] = scores.max() + np.log(weights.sum())
    return out, lse


@dataclass
class Cache:
    """Pages in random order; what no history uses is NaN. keys, values: [K, G, D] of each history."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    table: torch.Tensor
    kv_len: torch.Tensor
    kv_lens: tuple[int, ...]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def arguments(self) -> dict[str, Any]:
        return {
            "k_pages": self.k_pages,
            "v_pages": self.v_pages,
            "page_table_HP": self.table,
            "kv_len_H": self.kv_len,
            "kv_lens": self.kv_lens,
            "max_kv": max(1, *self.kv_lens) + 5,
        }


def cache_of(lengths: list[int], page_size: int, heads: int, dim: int, dtype: torch.dtype) -> Cache:
    rng = np.random.default_rng(sum(lengths) + page_size)
    counts = [-(-n // page_size) for n in lengths]
    num_pages = 2 + sum(counts) + lengths.count(0)
    table = np.zeros((len(lengths), max(counts) + 1), np.int32)
    free = iter(rng.permutation(np.arange(1, num_pages)).tolist())
    pages = [torch.full((num_pages * page_size, heads, dim), torch.nan, dtype=dtype) for _ in "kv"]
    tokens: list[list[torch.Tensor]] = [[], []]
    for h, length in enumerate(lengths):
        table[h, : counts[h]] = [next(free) for _ in range(counts[h])]
        place = torch.arange(length)
        at = torch.from_numpy(table[h].astype(np.int64))[place // page_size] * page_size
        for pool, own in zip(pages, tokens, strict=True):
            own.append(torch.from_numpy(rng.standard_normal((length, heads, dim))).to(dtype))
            pool[at + place % page_size] = own[-1]
    k, v = (pool.view(num_pages, page_size, heads, dim) for pool in pages)
    kv_len = torch.tensor(lengths, dtype=torch.int32)
    return Cache(k, v, torch.from_numpy(table), kv_len, tuple(lengths), *tokens)


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def starts_of(counts: list[int]) -> tuple[int, ...]:
    return (0, *np.cumsum(counts).tolist())


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assert_near(got: torch.Tensor, expected: Any, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(
        got.double().numpy(), expected, atol=tolerance.atol, rtol=tolerance.rtol
    )


def registered(op: Any, provider: str) -> Impl[..., Any]:
    """The provider for the NPU."""
    (found,) = [i for i in op.impls if (i.provider, i.device_kind) == (provider, "npu")]
    assert isinstance(found, Impl)
    return found


def function(op: Any, provider: str) -> Any:
    """The provider's function."""
    return registered(op, provider).fn


def prefill(provider: str, q: torch.Tensor, cache: Cache, starts: tuple[int, ...]) -> torch.Tensor:
    out = function(prefill_attention, provider)(
        q_TQD=q,
        q_start_H1=int32(starts),
        q_starts=starts,
        scale=SCALE,
        max_q=max(1, int(np.diff(starts).max())) + 2,
        **cache.arguments(),
    )
    assert isinstance(out, torch.Tensor)
    return out


def shared_arguments(
    q: torch.Tensor, cache: Cache, starts: tuple[int, ...], max_rows: int
) -> dict[str, Any]:
    arguments = {"q_NQD": q, "row_start_H1": int32(starts), "scale": SCALE, "max_rows": max_rows}
    return arguments | cache.arguments()


def check_prefill(
    out: torch.Tensor, q: torch.Tensor, cache: Cache, starts: tuple[int, ...]
) -> None:
    expected = np.zeros(q.shape)
    for h, length in enumerate(cache.kv_lens):
        rows = slice(starts[h], starts[h + 1])
        if length:
            num_new = starts[h + 1] - starts[h]
            seen = length - num_new + 1 + np.arange(num_new)
            expected[rows], _ = softmax64(q[rows], cache.keys[h], cache.values[h], SCALE, seen)
    assert out.dtype == q.dtype
    assert_near(out, expected, q.dtype)


def check_shared(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, cache: Cache, starts: tuple[int, ...]
) -> None:
    expected_out, expected_lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for h in range(len(cache.kv_lens)):
        rows = slice(starts[h], starts[h + 1])
        expected_out[rows], expected_lse[rows] = softmax64(
            q[rows], cache.keys[h], cache.values[h], SCALE
        )
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert_near(out, expected_out, q.dtype)
    assert_near(lse, expected_lse, torch.float32)
