"""The vendor's attention ops as we read them: their values against float64, and that broken constraints raise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.ascend.attention_cases import assert_near, cache_of, int32, normal, softmax64
from tests.ascend.vendor_attention import VendorConstraint, define

define()
HALF = [torch.float16, torch.bfloat16]
SCALE = 0.3
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def infer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
    return torch.ops.npu.npu_fused_infer_attention_score(query, key, value, **options)


def dense_call(**changes: Any) -> dict[str, Any]:
    """A legal call in BSND: batch 2, 5 rows of 9 keys, 4 heads on 2."""
    call: dict[str, Any] = {
        "query": normal(1, 2, 5, 4, 16, dtype=torch.float16),
        "key": normal(2, 2, 9, 2, 16, dtype=torch.float16),
        "value": normal(3, 2, 9, 2, 16, dtype=torch.float16),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": SCALE,
        "input_layout": "BSND",
        "softmax_lse_flag": True,
    }
    return call | changes


def paged_call(lengths: list[int], num_rows: int = 5, page: int = 128, **changes: Any) -> Any:
    """(a legal call over pages, 4 heads on 2 of 16; its cache)."""
    cache = cache_of(lengths, page, 2, 16, torch.float16)
    call = dense_call(
        query=normal(4, len(lengths), num_rows, 4, 16, dtype=torch.float16),
        key=cache.k_pages.flatten(2),
        value=cache.v_pages.flatten(2),
        block_table=cache.table,
        block_size=page,
        actual_seq_lengths_kv=lengths,
    )
    return call | changes, cache


def run(call: dict[str, Any]) -> Any:
    tensors = [call[name] for name in ("query", "key", "value")]
    options = {name: v for name, v in call.items() if name not in ("query", "key", "value")}
    return infer(*tensors, **options)


def laid(layout: str, bsnd: torch.Tensor) -> torch.Tensor:
    if layout == "BSH":
        return bsnd.flatten(2)
    return bsnd.transpose(1, 2).contiguous() if layout == "BNSD" else bsnd


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_dense(dtype: torch.dtype, layout: str, num_rows: int) -> None:
    q = normal(1, 2, num_rows, 4, 16, dtype=dtype)
    k, v = normal(2, 2, 9, 2, 16, dtype=dtype), normal(3, 2, 9, 2, 16, dtype=dtype)
    call = dense_call(
        query=laid(layout, q), key=laid(layout, k), value=laid(layout, v), input_layout=layout
    )
    out, lse = run(call)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    for b in range(2):
        expected_out, expected_lse = softmax64(q[b], k[b], v[b], SCALE)
        assert_near(out[b], laid(layout, torch.from_numpy(expected_out)[None])[0].numpy(), dtype)
        assert_near(lse[b, :, :, 0].T, expected_lse, torch.float32)


def test_without_the_flag_there_is_no_lse() -> None:
    _, lse = run(dense_call(softmax_lse_flag=False))
    assert lse.tolist() == [0.0]


@pytest.mark.parametrize("num_rows", [1, 5])
def test_pages_and_lengths(num_rows: int) -> None:
    call, cache = paged_call([130, 128, 3], num_rows)
    out, lse = run(call)
    for b in range(3):
        expected_out, expected_lse = softmax64(
            call["query"][b], cache.keys[b], cache.values[b], SCALE
        )
        assert_near(out[b], expected_out, torch.float16)
        assert_near(lse[b, :, :, 0].T, expected_lse, torch.float32)


def test_one_length_is_for_all_and_lengths_beyond_the_batch_are_not_read() -> None:
    expected, _ = run(paged_call([7, 7])[0])
    for given in ([7], [7, 7, 10**9]):
        call, _ = paged_call([7, 7], actual_seq_lengths_kv=given)
        assert torch.equal(run(call)[0], expected)


def test_dense_lengths() -> None:
    call = dense_call(actual_seq_lengths_kv=[4, 9])
    out, _ = run(call)
    expected, _ = softmax64(call["query"][0], call["key"][0, :4], call["value"][0, :4], SCALE)
    assert_near(out[0], expected, torch.float16)


@pytest.mark.parametrize("kind", [torch.bool, torch.int8, torch.uint8])
def test_causal_rows_are_the_last(kind: torch.dtype) -> None:
    mask = TRIANGLE.to(kind)[None, None]
    call, cache = paged_call([130, 5], sparse_mode=3, atten_mask=mask)
    out, lse = run(call)
    for b, length in enumerate((130, 5)):
        seen = length - 5 + 1 + np.arange(5)
        query = call["query"][b]
        expected_out, expected_lse = softmax64(query, cache.keys[b], cache.values[b], SCALE, seen)
        assert_near(out[b], expected_out, torch.float16)
        assert_near(lse[b, :, :, 0].T, expected_lse, torch.float32)


def test_rows_that_see_no_key_are_unspecified() -> None:
    out, lse = run(paged_call([6, 0])[0])
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert (lse[1] == torch.inf).all()
    out, lse = run(paged_call([3], sparse_mode=3, atten_mask=TRIANGLE)[0])
    assert out[0, :2].isnan().all()
    assert (lse[0, :, :2] == torch.inf).all()
    assert out[0, 2:].isfinite().all()
    out, _ = run(dense_call(actual_seq_lengths=[5, 2]))
    assert out[0].isfinite().all()
    assert out[1, 2:].isnan().all()


def test_one_row_ignores_sparse_mode_and_lengths_of_the_query() -> None:
    call, _ = paged_call([130], num_rows=1)
    expected, _ = run(call)
    assert torch.equal(run(call | {"sparse_mode": 3, "actual_seq_lengths": [0]})[0], expected)


def test_one_row_takes_pages_of_other_sizes() -> None:
    call, cache = paged_call([50], num_rows=1, page=16)
    expected, _ = softmax64(call["query"][0], cache.keys[0], cache.values[0], SCALE)
    assert_near(run(call)[0][0], expected, torch.float16)


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def dense_of(num_rows: int, heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    sizes = {"num_heads": heads, "num_key_value_heads": kv_heads}
    key = halves(1, 2, kv_heads, dim)
    return dense_call(query=halves(1, num_rows, heads, dim), key=key, value=key, **sizes)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float32": (dense_call(query=dense_call()["query"].float()), "query is torch.float32"),
    "mixed": (dense_call(key=dense_call()["key"].bfloat16()), "dtype of query"),
    "key and value": (dense_call(key=halves(2, 8, 2, 16)), "one shape"),
    "strided": (dense_call(query=halves(2, 4, 5, 16).transpose(1, 2)), "not contiguous"),
    "layout": (dense_call(input_layout="TND"), "layout TND"),
    "dims": (dense_call(query=halves(10, 64)), "2 dims"),
    "heads": (dense_call(num_heads=2), "does not have 2 heads"),
    "batch": (dense_call(query=halves(3, 5, 4, 16)), "batch of query"),
    "division": (dense_of(2, 4, 3, 16), "do not divide"),
    "group": (dense_of(2, 65, 1, 16), "65 heads on 1"),
    "many heads": (dense_of(1, 257, 257, 16), "257 heads"),
    "head dim": (dense_of(2, 4, 2, 24), "head dim 24"),
    "wide head": (dense_of(2, 1, 1, 528), "head dim 528"),
    "row": (dense_of(2, 128, 128, 512), "128 heads of 512"),
    "lengths": (dense_call(actual_seq_lengths_kv=[9] * 0), "0 lengths of kv"),
    "too long": (dense_call(actual_seq_lengths_kv=[9, 10]), "at most 9"),
    "negative": (dense_call(actual_seq_lengths_kv=[-1, 9]), "lengths of kv"),
    "query lengths": (dense_call(actual_seq_lengths=[5, 6]), "at most 5"),
    "block size": (paged_call([9], page=64)[0], "block_size 64"),
    "large block": (paged_call([9], page=640)[0], "block_size 640"),
    "block size of one row": (paged_call([9], num_rows=1, page=24)[0], "block_size 24"),
    "other block size": (paged_call([9], block_size=256)[0], r"expected \(3, 256, 32\)"),
    "no lengths": (paged_call([9], actual_seq_lengths_kv=None)[0], "without actual_seq_lengths_kv"),
    "pages of four dims": (
        paged_call([9], key=halves(3, 128, 2, 16), value=halves(3, 128, 2, 16))[0],
        "expected",
    ),
    "table dtype": (paged_call([9], block_table=torch.zeros(1, 2).long())[0], "torch.int64"),
    "table rows": (paged_call([9], block_table=int32([[0], [0]]))[0], "block_table"),
    "table width": (paged_call([9], actual_seq_lengths_kv=[300])[0], "at most 256"),
    "blocks": (
        paged_call([200, 9], key=halves(2, 128, 32), value=halves(2, 128, 32))[0],
        "3 blocks in use, 2 there",
    ),
    "no mask": (dense_call(sparse_mode=3), "without atten_mask"),
    "mask size": (dense_call(sparse_mode=3, atten_mask=TRIANGLE[:9, :9].clone()), "atten_mask"),
    "mask dtype": (dense_call(sparse_mode=3, atten_mask=TRIANGLE.half()), "float16"),
    "mask sense": (dense_call(sparse_mode=3, atten_mask=~TRIANGLE), "not the triangle"),
    "sparse mode": (dense_call(sparse_mode=4, atten_mask=TRIANGLE), "sparse_mode 4"),
    "own mask": (dense_call(atten_mask=TRIANGLE), "sparse_mode 0"),
    "mask of one row": (
        paged_call([9], num_rows=1, sparse_mode=3, atten_mask=TRIANGLE)[0],
        "one query row",
    ),
    "other arguments": (dense_call(pse_shift=halves(1)), "pse_shift"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_constraint_raises(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(VendorConstraint, match=text):
        run(call)


def test_a_page_that_does_not_exist() -> None:
    call, _ = paged_call([9], block_table=int32([[99]]))
    with pytest.raises(IndexError):
        run(call)


def update(*args: Any) -> Any:
    return torch.ops.npu.npu_attention_update(*args)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_update_is_attention_over_all_parts(num_parts: int, dtype: torch.dtype) -> None:
    q, k, v = (np.random.default_rng(s).standard_normal((9, 1, 8)) for s in range(3))
    parts = [softmax64(q, k[p::num_parts], v[p::num_parts], 2.0) for p in range(num_parts)]
    outs = [torch.from_numpy(out[:, 0]).to(dtype) for out, _ in parts]
    lses = [torch.from_numpy(lse[:, 0]).float() for _, lse in parts]
    expected_out, expected_lse = softmax64(q, k, v, 2.0)
    out, lse = update(lses, outs, 1)
    assert out.dtype == dtype
    assert_near(out, expected_out[:, 0], dtype)
    assert_near(lse, expected_lse[:, 0], torch.float32)
    out, lse = update(lses, outs, 0)
    assert_near(out, expected_out[:, 0], dtype)
    assert lse.isnan().all()


def test_update_of_infinite_lse_is_unspecified() -> None:
    lse, out = torch.tensor([0.0, -torch.inf, torch.inf]), torch.ones(3, 8)
    got_out, got_lse = update([torch.zeros(3), lse], [out, out], 1)
    assert got_lse.isnan().tolist() == [False, True, True]
    assert got_out[1:].isnan().all()


LSE, OUT = torch.zeros(3), torch.zeros(3, 8)
REFUSED_UPDATES: dict[str, tuple[Any, str]] = {
    "one side": (([LSE, LSE], [OUT], 1), "2 lse, 1 local_out"),
    "many": (([LSE] * 17, [OUT] * 17, 1), "17 lse"),
    "type": (([LSE], [OUT], 2), "update_type 2"),
    "head dim": (([LSE], [torch.zeros(3, 12)], 1), "local_out"),
    "dims": (([LSE], [torch.zeros(3, 1, 8)], 1), "local_out"),
    "dtype": (([LSE], [OUT.double()], 1), "float64"),
    "lse dtype": (([LSE.half()], [OUT], 1), "lse is torch.float16"),
    "lse shape": (([LSE[:2]], [OUT], 1), "lse"),
    "mixed": (([LSE, LSE], [OUT, OUT.half()], 1), "differ"),
    "strided": (([torch.zeros(6)[::2]], [OUT], 1), "not contiguous"),
}


@pytest.mark.parametrize("name", REFUSED_UPDATES)
def test_a_broken_constraint_of_the_update_raises(name: str) -> None:
    args, text = REFUSED_UPDATES[name]
    with pytest.raises(VendorConstraint, match=text):
        update(*args)
