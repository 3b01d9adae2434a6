"""Rotary position embedding by the vendor's fused op. Not run on hardware.

The op works in the dtype of its arguments, the contract in fp32 with one rounding: arguments are cast before, results
after. The layout is the documented BSND with one batch, r1 and r2 of 1S1D. T packed tokens, Q query heads, G KV heads,
D head dim.
"""

import torch

from xgr_runtime.hal.ops.rope import rotary_embedding
from xgr_runtime.hal.registry import OpSpec, impl

from .limits import refuse_dtype, refuse_size, refuse_soc

_MAX_HEADS = 1000
_MAX_DIM = 896


def _accepts(spec: OpSpec) -> str | None:
    dim = spec.dims.get("D", 0)
    return (
        refuse_dtype(spec, "npu_rotary_mul")
        or refuse_soc(
            spec, "npu_rotary_mul with angles per token is documented for Atlas A2 and A3"
        )
        or refuse_size(spec, "D", _MAX_DIM, "limit of npu_rotary_mul")
        or refuse_size(spec, "Q", _MAX_HEADS, "limit of npu_rotary_mul")
        or refuse_size(spec, "G", _MAX_HEADS, "limit of npu_rotary_mul")
        or (f"limit of npu_rotary_mul: D must be even, got {dim}" if dim % 2 else None)
    )


@impl(rotary_embedding, provider="torch_npu", device="npu", accepts=_accepts)
def rotary_embedding_npu(
    q_TQD: torch.Tensor, k_TGD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """npu_rotary_mul on queries and on keys."""
    cos_1T1D, sin_1T1D = cos_TD[None, :, None, :], sin_TD[None, :, None, :]
    return _rotate(q_TQD, cos_1T1D, sin_1T1D), _rotate(k_TGD, cos_1T1D, sin_1T1D)


def _rotate(x_TND: torch.Tensor, cos_1T1D: torch.Tensor, sin_1T1D: torch.Tensor) -> torch.Tensor:
    # The documentation promises nothing for strided input, and fp32 views pass through float() as they are.
    x_1TND = x_TND.float().contiguous().unsqueeze(0)
    out_1TND: torch.Tensor = torch.ops.npu.npu_rotary_mul(x_1TND, cos_1T1D, sin_1T1D)
    return out_1TND.squeeze(0).to(x_TND.dtype)
