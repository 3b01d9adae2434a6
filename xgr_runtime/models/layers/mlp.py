"""The gated feed-forward layer with one fused gate and up product."""

from dataclasses import dataclass

import torch

from xgr_runtime.hal.bound import BoundOps
from xgr_runtime.models.layers.linear import (
    Linear,
    StreamLinear,
    load_split_by_input,
    load_split_by_output,
)
from xgr_runtime.models.layers.parallel import ParallelContext
from xgr_runtime.models.weights import WeightReader


@dataclass(frozen=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x)), added to the residual stream."""

    gate_up: Linear
    down: StreamLinear

    def __call__(
        self,
        ops: BoundOps,
        x_NM: torch.Tensor,
        residual_NM: torch.Tensor,
        norm_weight_M: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """rms_norm of the new residual stream, [N, M]; residual_NM is MUTATED."""
        if self.gate_up.bias_O is None:
            x_NF = ops.linear_silu_mul(x_NM, self.gate_up.weight_OI)
        else:
            x_NF = ops.silu_mul(self.gate_up(ops, x_NM))
        return self.down(ops, x_NF, residual_NM, norm_weight_M, eps)


def load_mlp(
    reader: WeightReader,
    prefix: str,
    hidden_size: int,
    intermediate_size: int,
    has_bias: bool,
    parallel: ParallelContext,
) -> GatedMlp:
    """Read gate_proj, up_proj and down_proj below `prefix`."""
    names = [(f"{prefix}.gate_proj", intermediate_size), (f"{prefix}.up_proj", intermediate_size)]
    return GatedMlp(
        load_split_by_output(reader, names, hidden_size, has_bias, parallel),
        StreamLinear(
            load_split_by_input(
                reader, f"{prefix}.down_proj", hidden_size, intermediate_size, has_bias, parallel
            ),
            parallel,
        ),
    )
