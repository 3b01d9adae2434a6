"""Root-mean-square normalisation by the vendor's fused ops. Not run on hardware.

Whether the op rounds before it multiplies by the weight, as the reference does, is not documented; both are within the
tolerance of the dtype. Nor is it documented which sum npu_add_rms_norm normalises: it may be the unrounded one, where the
reference normalises the sum as it is rounded into the residual stream. N rows, M size of the last dim.
"""

import torch

from xgr_runtime.hal.ops.norm import add_rms_norm, rms_norm
from xgr_runtime.hal.registry import OpSpec, impl

from .limits import refuse_dtype


def _accepts_rms_norm(spec: OpSpec) -> str | None:
    return refuse_dtype(spec, "npu_rms_norm")


def _accepts_add_rms_norm(spec: OpSpec) -> str | None:
    return refuse_dtype(spec, "npu_add_rms_norm")


@impl(rms_norm, provider="torch_npu", device="npu", accepts=_accepts_rms_norm)
def rms_norm_npu(x_NM: torch.Tensor, weight_M: torch.Tensor, eps: float) -> torch.Tensor:
    """The first result of npu_rms_norm; the second is for a backward pass."""
    out_NM: torch.Tensor = torch.ops.npu.npu_rms_norm(x_NM, weight_M, eps)[0]
    return out_NM


@impl(add_rms_norm, provider="torch_npu", device="npu", accepts=_accepts_add_rms_norm)
def add_rms_norm_npu(
    x_NM: torch.Tensor, residual_NM: torch.Tensor, weight_M: torch.Tensor, eps: float
) -> torch.Tensor:
    """npu_add_rms_norm gives (normalised, for a backward pass, sum); the sum is copied over the residual stream."""
    out_NM: torch.Tensor
    out_NM, _, sum_NM = torch.ops.npu.npu_add_rms_norm(x_NM, residual_NM, weight_M, eps)
    residual_NM.copy_(sum_NM)
    return out_NM
