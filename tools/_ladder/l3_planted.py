"""Defects for rung L3 to find: each takes the place of a provider's function, or of a line of the device, in one engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from tools._ladder.l3_world import PLANS, Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Tensor = torch.Tensor

PLANTED_SETTING = Setting("bfloat16", 128)
# Two levels: a prefill, and a round with a step.
PLANTED_PLANS = tuple(plan for plan in PLANS if plan.name.startswith("two catalogues"))


@dataclass(frozen=True)
class Planted:
    """functions: op -> what takes its place. expected: part of the failure. around: entered while the engine runs."""

    name: str
    expected: str
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def _npu() -> Any:
    return torch.ops.npu


def _wrong_keyword(x_NM: Tensor, weight_M: Tensor, eps: float) -> Any:
    return _npu().npu_rms_norm(x_NM, weight_M, eps=eps)[0]


def _wrong_type(x_NM: Tensor, weight_M: Tensor, eps: float) -> Any:
    return _npu().npu_rms_norm(x_NM, [weight_M], eps)[0]


def _wrong_for_the_shape_rule(gate_up_N2F: Tensor) -> Any:
    return _npu().npu_swiglu(gate_up_N2F, dim=5)


def _other_shape(x_NM: Tensor, weight_M: Tensor, eps: float) -> Any:
    return _npu().npu_rms_norm(x_NM, weight_M, eps)[0].unsqueeze(0)[0:1].flatten(0, 1)[:1]


def _other_dtype(gate_up_N2F: Tensor) -> Any:
    return _npu().npu_swiglu(gate_up_N2F).float()


def _strided(gate_up_N2F: Tensor) -> Any:
    result_NF = _npu().npu_swiglu(gate_up_N2F)
    return result_NF.repeat(1, 2)[:, ::2]


def _host_read(gate_up_N2F: Tensor) -> Any:
    return _npu().npu_swiglu(gate_up_N2F) * gate_up_N2F.sum().item()


def _no_kernel(gate_up_N2F: Tensor) -> Any:
    result_NF = _npu().npu_swiglu(gate_up_N2F)
    row_N = torch.zeros(result_NF.shape[0], dtype=torch.int64, device=result_NF.device)
    row_N.scatter_reduce_(0, row_N, row_N, "amin")
    return result_NF


def _host_copy(gate_up_N2F: Tensor) -> Any:
    result_NF = _npu().npu_swiglu(gate_up_N2F)
    return result_NF + torch.ones(result_NF.shape[1]).to(result_NF.device, result_NF.dtype) * 0


def _wait(gate_up_N2F: Tensor) -> Any:
    torch.npu.current_stream().synchronize()  # type: ignore[attr-defined]
    return _npu().npu_swiglu(gate_up_N2F)


def _of_norm(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {"rms_norm": function}


def _of_activation(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {"silu_mul": function}


def _one_length() -> AbstractContextManager[Any]:
    return patch("xgr_runtime.hal.ascend.lengths_from_host", lambda kv_lens: [1])


PLANTED = (
    Planted("an unknown keyword", "eps", _of_norm(_wrong_keyword)),
    Planted("a list for a tensor", "npu_rms_norm", _of_norm(_wrong_type)),
    Planted("a dim that does not exist", "npu_swiglu", _of_activation(_wrong_for_the_shape_rule)),
    Planted("a result of another shape", "the reference", _of_norm(_other_shape)),
    Planted("a result of another dtype", "the reference", _of_activation(_other_dtype)),
    Planted("a strided result", "not contiguous", _of_activation(_strided)),
    Planted("a read by the host", "_local_scalar_dense", _of_activation(_host_read)),
    Planted("an op without a kernel", "runs on the CPU", _of_activation(_no_kernel)),
    Planted("a copy in a captured segment", "inside a captured", _of_activation(_host_copy)),
    Planted("a wait in a captured segment", "waits for the device", _of_activation(_wait)),
    Planted("too few lengths at replay", "1 lengths for", around=_one_length),
)
