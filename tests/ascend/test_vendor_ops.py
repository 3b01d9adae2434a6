"""The vendor's ops as we read them: their values against formulas in float64, and that broken rules raise."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.ascend import vendor_attention, vendor_ops
from tests.ascend.vendor_ops import FLOATS, SCHEMAS, VendorRuleError, define
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

define()
NPU = torch.ops.npu
PROVIDERS = Path(__file__).resolve().parents[2] / "ops" / "ascend"


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def float64(tensor: torch.Tensor) -> Any:
    return tensor.double().numpy()


def assert_near(got: torch.Tensor, expected: Any, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(float64(got), expected, rtol=tolerance.rtol, atol=tolerance.atol)


def rms(x: Any, epsilon: float) -> Any:
    return np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm(dtype: torch.dtype) -> None:
    x, gamma = normal(1, 5, 3, 48, dtype=dtype), normal(2, 48, dtype=dtype)
    out, rstd = NPU.npu_rms_norm(x, gamma, 1e-3)
    root = rms(float64(x), 1e-3)
    assert_near(out, float64(x) / root * float64(gamma), dtype)
    assert out.dtype == dtype
    assert_near(rstd, 1 / root, torch.float32)
    assert rstd.dtype == torch.float32


def test_rms_norm_over_two_dims_and_its_default_epsilon() -> None:
    x, gamma = normal(1, 4, 3, 5) * 1e-3, normal(2, 3, 5)
    out, _ = NPU.npu_rms_norm(x, gamma)
    wide = float64(x)
    root = np.sqrt((wide * wide).mean((1, 2), keepdims=True) + 1e-6)
    assert_near(out, wide / root * float64(gamma), torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_add_rms_norm_gives_the_sum_third_and_writes_nothing(dtype: torch.dtype) -> None:
    x1, x2, gamma = (normal(seed, 7, 32, dtype=dtype) for seed in (1, 2, 3))
    before = x2.clone()
    out, rstd, total = NPU.npu_add_rms_norm(x1, x2, gamma[0], 1e-5)
    assert torch.equal(x2, before)
    assert_near(total, float64(x1) + float64(x2), dtype)
    root = rms(float64(total), 1e-5)
    assert_near(out, float64(total) / root * float64(gamma[0]), dtype)
    assert_near(rstd, 1 / root, torch.float32)


def test_rotary_mul_turns_pairs_as_complex_numbers() -> None:
    x, angle = normal(1, 1, 6, 3, 8), normal(2, 1, 6, 1, 4)
    r1, r2 = (f(angle).repeat(1, 1, 1, 2) for f in (torch.cos, torch.sin))
    turned = (float64(x)[..., :4] + 1j * float64(x)[..., 4:]) * np.exp(1j * float64(angle))
    expected = np.concatenate((turned.real, turned.imag), -1)
    assert_near(NPU.npu_rotary_mul(x, r1, r2), expected, torch.float32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_swiglu_gates_with_the_first_half(dtype: torch.dtype) -> None:
    x = normal(1, 9, 14, dtype=dtype)
    gate, up = float64(x)[:, :7], float64(x)[:, 7:]
    assert_near(NPU.npu_swiglu(x, -1), gate / (1 + np.exp(-gate)) * up, dtype)
    assert_near(NPU.npu_swiglu(x[:8], 0), swish(float64(x)[:4]) * float64(x)[4:8], dtype)


def swish(x: Any) -> Any:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_scatter_nd_update_writes_rows_in_place(index_dtype: torch.dtype) -> None:
    target, updates = torch.zeros(4, 5, 3), normal(1, 2, 3)
    expected = [[[0.0] * 3 for _ in range(5)] for _ in range(4)]
    expected[3][0], expected[1][4] = updates.tolist()
    returned = NPU.npu_scatter_nd_update_(
        target, torch.tensor([[3, 0], [1, 4]], dtype=index_dtype), updates
    )
    assert target.tolist() == expected
    assert returned.data_ptr() == target.data_ptr()
    NPU.npu_scatter_nd_update_(target, torch.tensor([[2]], dtype=index_dtype), target[3:4].clone())
    assert target[2].tolist() == expected[3]


X, ROTARY, ANGLE = torch.ones(2, 8), torch.ones(1, 4, 2, 8), torch.ones(1, 4, 1, 8)
TARGET, INDEX, UPDATE = torch.zeros(4, 3), torch.tensor([[1]]), torch.zeros(1, 3)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: NPU.npu_rms_norm(X.double(), X[0].double()), "float16, bfloat16 or float32"),
        (lambda: NPU.npu_rms_norm(X, X[0].half()), "dtype of input"),
        (lambda: NPU.npu_rms_norm(X, X[0, :7]), "last dims"),
        (lambda: NPU.npu_rms_norm(torch.ones((1,) * 9), torch.ones(1)), "at most 8"),
        (lambda: NPU.npu_add_rms_norm(X, X.half(), X[0]), "one dtype"),
        (lambda: NPU.npu_add_rms_norm(X, X[:1], X[0]), "one shape"),
        (lambda: NPU.npu_rotary_mul(ROTARY.half(), ANGLE, ANGLE), "one dtype"),
        (lambda: NPU.npu_rotary_mul(ROTARY[0], ANGLE[0], ANGLE[0]), "4 dims"),
        (lambda: NPU.npu_rotary_mul(ROTARY[..., :7], ANGLE[..., :7], ANGLE[..., :7]), "even"),
        (lambda: NPU.npu_rotary_mul(ROTARY, ANGLE[:, :2], ANGLE[:, :2]), "no documented layout"),
        (lambda: NPU.npu_rotary_mul(ROTARY, ANGLE * 2, ANGLE), "are in"),
        (lambda: NPU.npu_rotary_mul(ROTARY, ANGLE, ANGLE, "interleave"), "half mode"),
        (lambda: NPU.npu_swiglu(X[:, :7]), "even"),
        (lambda: NPU.npu_swiglu(X.double()), "float16, bfloat16 or float32"),
        (lambda: NPU.npu_scatter_nd_update_(TARGET.int(), INDEX, UPDATE.int()), "no kernel"),
        (lambda: NPU.npu_scatter_nd_update_(TARGET, INDEX, UPDATE.half()), "updates are"),
        (lambda: NPU.npu_scatter_nd_update_(TARGET, INDEX.short(), UPDATE), "int32 or int64"),
        (lambda: NPU.npu_scatter_nd_update_(TARGET, INDEX[0], UPDATE), "at least 2 dims"),
        (lambda: NPU.npu_scatter_nd_update_(TARGET, INDEX, UPDATE[:, :2]), "updates are"),
        (lambda: NPU.npu_scatter_nd_update_(TARGET, INDEX + 3, UPDATE), "indices are in"),
        (lambda: NPU.npu_scatter_nd_update_(TARGET, INDEX - 2, UPDATE), "indices are in"),
        (lambda: NPU.npu_scatter_nd_update_(TARGET, INDEX.repeat(1, 3), UPDATE), "too large"),
    ],
)
def test_a_broken_rule_raises(call: Callable[[], object], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        call()


@pytest.mark.parametrize("heads", [999, 1000])
def test_rotary_mul_takes_less_than_1000_heads(heads: int) -> None:
    x, angle = torch.ones(1, 2, heads, 2), torch.ones(1, 2, 1, 2)
    if heads < 1000:
        assert NPU.npu_rotary_mul(x, angle, angle).shape == x.shape
    else:
        with pytest.raises(VendorRuleError, match="B, N < 1000"):
            NPU.npu_rotary_mul(x, angle, angle)


def test_rotary_mul_takes_more_tokens_than_heads_and_dims_below_896() -> None:
    x, angle = torch.ones(1, 1500, 1, 2), torch.ones(1, 1500, 1, 2)
    assert NPU.npu_rotary_mul(x, angle, angle).shape == x.shape
    with pytest.raises(VendorRuleError, match="896"):
        NPU.npu_rotary_mul(*(torch.ones(1, 1, 1, 896) for _ in range(3)))


def test_the_ops_are_declared_with_the_schema_that_is_listed() -> None:
    for name, schema in SCHEMAS.items():
        declared = getattr(NPU, name).default._schema
        assert declared == torch._C.parse_schema(f"npu::{name}{schema}")


def test_every_op_that_a_provider_calls_is_imitated() -> None:
    sources = {path.name: path.read_text(encoding="utf-8") for path in PROVIDERS.glob("*.py")}
    called = {
        name: file
        for file, text in sources.items()
        for name in re.findall(r"torch\.ops\.npu\.(\w+)", text)
    }
    assert len(called) >= len(SCHEMAS)
    known = {*SCHEMAS, *vendor_attention.SCHEMAS}
    unknown = {name: file for name, file in called.items() if name not in known}
    assert not unknown, f"neither vendor_ops nor vendor_attention imitates {unknown}"


def test_the_imitations_are_never_declared_beside_torch_npu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", sys)
    with pytest.raises(RuntimeError, match="torch_npu is imported"):
        vendor_ops.define.__wrapped__()
