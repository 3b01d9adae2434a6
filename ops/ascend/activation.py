"""The gated activation by the vendor's fused op. Not run on hardware. N rows, F feed-forward size."""

import torch

from xgr_runtime.hal.ops.activation import silu_mul
from xgr_runtime.hal.registry import OpSpec, impl

from .limits import refuse_dtype, refuse_soc


def _accepts(spec: OpSpec) -> str | None:
    return refuse_dtype(spec, "npu_swiglu") or refuse_soc(
        spec, "npu_swiglu is documented for Atlas A2 and A3"
    )


@impl(silu_mul, provider="torch_npu", device="npu", accepts=_accepts)
def silu_mul_npu(gate_up_N2F: torch.Tensor) -> torch.Tensor:
    """npu_swiglu halves the last dim: the first half is the gate."""
    out_NF: torch.Tensor = torch.ops.npu.npu_swiglu(gate_up_N2F, -1)
    return out_NF
