"""The attention stages, and the head's normaliser, against plain float64 loops; every implementation on the CPU."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from xgr_runtime.hal.ops.attention import (
    merge_attention_states,
    prefill_attention,
    shared_attention,
    unshared_attention,
)
from xgr_runtime.hal.ops.head import head_logsumexp
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec
from xgr_runtime.hal.tolerances import TOLERANCES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SCALE = 0.3


def implementations(op: Any) -> list[Any]:
    """The reference and every CPU provider."""
    assert not load_providers("cpu")
    own = [i for i in op.impls if i.device_kind == "cpu"]
    return [
        pytest.param(op.reference, id="reference"),
        *(pytest.param(i.fn, id=i.provider) for i in own),
    ]


def attend(q_QD: Any, k_KGD: Any, v_KGD: Any, scale: float) -> tuple[Any, Any]:
    """One query row in float64: (out [Q, D], lse [Q])."""
    num_heads, num_kv_heads = q_QD.shape[0], k_KGD.shape[1]
    out, lse = np.zeros(q_QD.shape), np.full(num_heads, -np.inf)
    for q in range(num_heads if len(k_KGD) else 0):
        group = q // (num_heads // num_kv_heads)
        scores = k_KGD[:, group] @ q_QD[q] * scale
        largest = scores.max()
        weights = np.exp(scores - largest)
        out[q] = weights @ v_KGD[:, group] / weights.sum()
        lse[q] = largest + np.log(weights.sum())
    return out, lse


@dataclass
class Paged:
    """Histories in pages; every page entry that no history uses holds NaN."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    kv_len: torch.Tensor
    keys: list[Any]
    values: list[Any]


def paged(lengths: list[int], page_size: int, heads: int, dim: int, dtype: torch.dtype) -> Paged:
    rng = np.random.default_rng(sum(lengths) + page_size)
    need = [-(-n // page_size) for n in lengths]
    num_pages = 3 + sum(need)
    shape = (num_pages, page_size, heads, dim)
    k_pages, v_pages = (
        torch.full(shape, torch.nan).to(dtype),
        torch.full(shape, torch.nan).to(dtype),
    )
    free = [int(p) for p in rng.permutation(np.arange(1, num_pages))]
    table = np.full((len(lengths), max(need) + 2), free.pop(), np.int32)
    keys, values = [], []
    for h, length in enumerate(lengths):
        k = torch.from_numpy(rng.standard_normal((length, heads, dim))).to(dtype)
        v = torch.from_numpy(rng.standard_normal((length, heads, dim))).to(dtype)
        for i in range(need[h]):
            table[h, i] = free.pop()
            part = slice(i * page_size, min((i + 1) * page_size, length))
            k_pages[table[h, i], : part.stop - part.start] = k[part]
            v_pages[table[h, i], : part.stop - part.start] = v[part]
        keys.append(k.double().numpy())
        values.append(v.double().numpy())
    lens = torch.tensor(lengths, dtype=torch.int32)
    return Paged(k_pages, v_pages, torch.from_numpy(table), lens, keys, values)


def queries(num_rows: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    rows = np.random.default_rng(num_rows).standard_normal((num_rows, heads, dim))
    return torch.from_numpy(rows).to(dtype)


def assert_near(got: torch.Tensor, expected: Any, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(
        got.double().numpy(), expected, atol=tolerance.atol, rtol=tolerance.rtol
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 4, 8), (4, 2, 6), (8, 1, 16), (8, 2, 5)]
)
@pytest.mark.parametrize("fn", implementations(prefill_attention))
def test_prefill(fn: Any, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    lengths, new = [7, 1, 12, 0, 5, 200], [7, 1, 4, 0, 1, 150]
    cache = paged(lengths, 5, kv_heads, dim, dtype)
    starts = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
    num_rows = int(starts[-1])
    q = queries(num_rows + 3, heads, dim, dtype)
    q[num_rows:] = torch.nan
    out = fn(
        q,
        cache.k_pages,
        cache.v_pages,
        cache.page_table,
        torch.from_numpy(starts),
        cache.kv_len,
        SCALE,
        160,
        203,
        tuple(starts.tolist()),
        tuple(lengths),
    )
    assert out.dtype == dtype
    expected = np.zeros((num_rows + 3, heads, dim))
    for h, length in enumerate(lengths):
        for i in range(new[h]):
            seen = length - new[h] + i + 1
            row = int(starts[h]) + i
            q_row = q[row].double().numpy()
            expected[row], _ = attend(q_row, cache.keys[h][:seen], cache.values[h][:seen], SCALE)
    assert_near(out, expected, dtype)


@pytest.mark.parametrize("fn", implementations(prefill_attention))
def test_prefill_of_a_padding_history_with_rows_is_zero(fn: Any) -> None:
    """The last layer asks for one row per history, padding histories included."""
    cache = paged([3, 0], 2, 1, 4, torch.float32)
    q_start = torch.tensor([0, 1, 2], dtype=torch.int32)
    q = queries(2, 2, 4, torch.float32)
    pages = (cache.k_pages, cache.v_pages, cache.page_table)
    out = fn(q, *pages, q_start, cache.kv_len, SCALE, 1, 4, (0, 1, 2), (3, 0))
    expected, _ = attend(q[0].double().numpy(), cache.keys[0], cache.values[0], SCALE)
    assert_near(out[0], expected, torch.float32)
    assert out[1].count_nonzero() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 4, 8), (4, 2, 6), (8, 1, 16), (8, 2, 5)]
)
@pytest.mark.parametrize("fn", implementations(shared_attention))
def test_shared(fn: Any, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    lengths, rows = [7, 1, 12, 0, 5, 90], [3, 2, 0, 2, 1, 150]
    cache = paged(lengths, 5, kv_heads, dim, dtype)
    starts = np.concatenate(([0], np.cumsum(rows))).astype(np.int32)
    num_rows = int(starts[-1])
    q = queries(num_rows + 3, heads, dim, dtype)
    q[num_rows:] = torch.nan
    row_start = torch.from_numpy(starts)
    pages = (cache.k_pages, cache.v_pages, cache.page_table)
    out, lse = fn(q, *pages, row_start, cache.kv_len, SCALE, 160, 93, tuple(lengths))
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    expected_out = np.zeros((num_rows + 3, heads, dim))
    expected_lse = np.full((num_rows + 3, heads), -np.inf)
    for h in range(len(lengths)):
        for row in range(starts[h], starts[h + 1]):
            expected_out[row], expected_lse[row] = attend(
                q[row].double().numpy(), cache.keys[h], cache.values[h], SCALE
            )
    assert_near(out, expected_out, dtype)
    assert_near(lse, expected_lse, torch.float32)


@pytest.mark.parametrize("fn", implementations(shared_attention))
def test_shared_in_several_tiles_of_rows(fn: Any) -> None:
    cache = paged([1500], 16, 1, 4, torch.float32)
    q = queries(400, 2, 4, torch.float32)
    row_start = torch.tensor([0, 400], dtype=torch.int32)
    pages = (cache.k_pages, cache.v_pages, cache.page_table)
    out, lse = fn(q, *pages, row_start, cache.kv_len, SCALE, 400, 1500, (1500,))
    for row in (0, 127, 128, 349, 350, 399):
        expected_out, expected_lse = attend(
            q[row].double().numpy(), cache.keys[0], cache.values[0], SCALE
        )
        assert_near(out[row], expected_out, torch.float32)
        assert_near(lse[row], expected_lse, torch.float32)


@pytest.mark.parametrize("fn", implementations(shared_attention))
def test_a_nan_query_stays_in_its_row(fn: Any) -> None:
    cache = paged([6], 4, 2, 4, torch.float32)
    q = queries(3, 4, 4, torch.float32)
    q[1] = torch.nan
    row_start = torch.tensor([0, 3], dtype=torch.int32)
    pages = (cache.k_pages, cache.v_pages, cache.page_table)
    out, lse = fn(q, *pages, row_start, cache.kv_len, SCALE, 3, 6, (6,))
    assert out[[0, 2]].isfinite().all()
    assert lse[[0, 2]].isfinite().all()
    assert out[1].isnan().all()
    assert lse[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
@pytest.mark.parametrize("fn", implementations(unshared_attention))
def test_unshared(fn: Any, num_tokens: int, dtype: torch.dtype) -> None:
    heads, kv_heads, dim = 6, 2, 5
    rng = np.random.default_rng(0)
    k = torch.from_numpy(rng.standard_normal((9, 4, kv_heads, dim))).to(dtype)
    v = torch.from_numpy(rng.standard_normal((9, 4, kv_heads, dim))).to(dtype)
    k[:, num_tokens:], v[:, num_tokens:] = torch.nan, torch.nan
    k[8], v[8] = torch.nan, torch.nan
    slots = [3, 7, 0, 5]
    q = queries(5, heads, dim, dtype)
    out, lse = fn(q, k, v, torch.tensor([*slots, 8], dtype=torch.int32), num_tokens, SCALE)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    for row, slot in enumerate(slots):
        expected_out, expected_lse = attend(
            q[row].double().numpy(),
            k[slot, :num_tokens].double().numpy(),
            v[slot, :num_tokens].double().numpy(),
            SCALE,
        )
        assert_near(out[row], expected_out, dtype)
        assert_near(lse[row], expected_lse, torch.float32)


@pytest.mark.parametrize("fn", implementations(merge_attention_states))
def test_merge_equals_attention_over_both(fn: Any) -> None:
    rng = np.random.default_rng(4)
    q = rng.standard_normal((3, 4, 6))
    k, v = rng.standard_normal((9, 2, 6)), rng.standard_normal((9, 2, 6))
    sides = [slice(0, 7), slice(7, 9)]
    states = []
    for side in sides:
        parts = [attend(row, k[side], v[side], 4.0) for row in q]
        states.append(torch.from_numpy(np.stack([out for out, _ in parts])).float())
        states.append(torch.from_numpy(np.stack([lse for _, lse in parts])).float())
    out, lse = fn(*states)
    for row in range(3):
        expected_out, expected_lse = attend(q[row], k, v, 4.0)
        assert_near(out[row], expected_out, torch.float32)
        assert_near(lse[row], expected_lse, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fn", implementations(merge_attention_states))
def test_merge_with_empty_sides(fn: Any, dtype: torch.dtype) -> None:
    full = queries(2, 3, 4, dtype)
    lse = torch.tensor([[3.0, -80.0, 1e4], [-1e30, 0.0, 7.7]])
    empty, nothing = torch.zeros_like(full), torch.full_like(lse, -torch.inf)
    for got_out, got_lse in (fn(full, lse, empty, nothing), fn(empty, nothing, full, lse)):
        assert torch.equal(got_out, full)
        assert torch.equal(got_lse, lse)
    got_out, got_lse = fn(empty, nothing, empty, nothing)
    assert torch.equal(got_out, empty)
    assert torch.equal(got_lse, nothing)


@pytest.mark.parametrize("fn", implementations(merge_attention_states))
def test_merge_of_very_different_weights_does_not_overflow(fn: Any) -> None:
    a, b = torch.ones(1, 1, 2), -torch.ones(1, 1, 2)
    out, lse = fn(a, torch.tensor([[1e30]]), b, torch.tensor([[-1e30]]))
    assert torch.equal(out, a)
    assert lse.item() == np.float32(1e30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 1023, 1025, 17000])
@pytest.mark.parametrize("fn", implementations(head_logsumexp))
def test_head_logsumexp(fn: Any, vocab: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab)
    hidden = torch.from_numpy(rng.standard_normal((5, 8))).to(dtype)
    weight = torch.from_numpy(rng.standard_normal((vocab, 8))).to(dtype)
    got = fn(hidden, weight, 1.7)
    logits = hidden.double().numpy() @ weight.double().numpy().T * 1.7
    largest = logits.max(-1)
    expected = largest + np.log(np.exp(logits - largest[:, None]).sum(-1))
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("fn", implementations(head_logsumexp))
def test_head_logsumexp_of_extreme_rows(fn: Any) -> None:
    """1e30 is finite and stays so; NaN and +inf come through; a row of -inf is -inf. Over two tiles of rows."""
    weight = torch.zeros(9000, 1)
    weight[8999] = 1.0
    hidden = torch.tensor([[1e30], [-1e30], [torch.nan], [0.0]])
    got = fn(hidden, weight, 1.0).tolist()
    assert got[0] == np.float32(1e30)
    assert got[1] == pytest.approx(np.log(8999), abs=1e-5)
    assert np.isnan(got[2])
    assert got[3] == pytest.approx(np.log(9000), abs=1e-5)
    assert fn(torch.tensor([[torch.inf]]), torch.ones(2, 1), 1.0).item() == torch.inf
    assert fn(torch.tensor([[-torch.inf]]), torch.ones(2, 1), 1.0).item() == -torch.inf


@pytest.mark.parametrize("op", [prefill_attention, shared_attention, head_logsumexp])
def test_a_dtype_wider_than_the_sums_is_refused_with_a_reason(op: Any) -> None:
    (own,) = [i for i in op.impls if i.device_kind == "cpu"]
    assert own.accepts(OpSpec("cpu", torch.bfloat16)) is None
    assert own.accepts(OpSpec("cpu", torch.float64)).endswith("got torch.float64")
