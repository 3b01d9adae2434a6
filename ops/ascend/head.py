"""The normaliser over the whole vocabulary from aten ops: the reference's tiles, written for an NPU. Not run on hardware.

Products are fp32: torch_npu keeps `torch.npu.matmul.allow_hf32` off by default, and it has to stay off. NaN and +inf
reach the result through the sum of exponentials alone, so that it does not matter whether a device's maximum passes NaN
on. N rows, V rows of the head, M hidden size, C rows of a tile.
"""

import torch

from xgr_runtime.hal.ops.head import head_logsumexp
from xgr_runtime.hal.registry import OpSpec, impl

from .limits import refuse_dtype

TILE_ROWS = 8192


def _accepts(spec: OpSpec) -> str | None:
    return refuse_dtype(spec, "head_logsumexp")


@impl(head_logsumexp, provider="aten", device="npu", accepts=_accepts)
def head_logsumexp_aten(
    hidden_NM: torch.Tensor, weight_VM: torch.Tensor, scale: float
) -> torch.Tensor:
    """Running maximum and sum over tiles of TILE_ROWS rows of the head."""
    hidden_fp32_NM = hidden_NM.float() * scale
    largest_N1 = hidden_fp32_NM.new_full((hidden_NM.shape[0], 1), -torch.inf)
    total_N1 = torch.zeros_like(largest_N1)
    for first in range(0, weight_VM.shape[0], TILE_ROWS):
        logits_NC = torch.mm(hidden_fp32_NM, weight_VM[first : first + TILE_ROWS].float().t())
        new_largest_N1 = torch.maximum(largest_N1, logits_NC.amax(-1, keepdim=True))
        # A sum over nothing but -inf is 0, and stays 0 through exp(-inf - finite).
        peak_N1 = finite_or_zero(new_largest_N1)
        total_N1.mul_((largest_N1 - peak_N1).exp_())
        total_N1.add_(logits_NC.sub_(peak_N1).exp_().sum(-1, keepdim=True))
        largest_N1 = new_largest_N1
    return (finite_or_zero(largest_N1) + total_N1.log_()).squeeze(-1)


def finite_or_zero(values: torch.Tensor) -> torch.Tensor:
    """What may be taken out of an exponent: infinities and NaN become 0, new memory."""
    return values.masked_fill(~torch.isfinite(values), 0.0)
