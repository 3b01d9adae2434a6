"""The gated feed-forward layer with one fused gate and up product."""

from dataclasses import dataclass

import torch

from xgr_runtime.hal.bound import BoundOps
from xgr_runtime.models.layers.linear import (
    Linear,
    StreamLinear,
    StreamRows,
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

    def gated(self, ops: BoundOps, rows: StreamRows) -> torch.Tensor:
        """silu(gate(x)) * up(x) of the rows, [N, F], for `down`."""
        if self.gate_up.bias_O is not None:
            x_NF: torch.Tensor = ops.silu_mul(self.gate_up(ops, rows.normed(ops)))
        elif rows.product is not None:
            x_NF = ops.stream_linear_silu_mul(*rows.product, self.gate_up.weight_OI)
        else:
            x_NF = ops.linear_silu_mul(rows.normed(ops), self.gate_up.weight_OI)
        return x_NF


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
