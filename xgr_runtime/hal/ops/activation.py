"""The gated activation of the feed-forward layers. N rows, F feed-forward size."""

import torch

from xgr_runtime.hal.registry import op


@op
def silu_mul(gate_up_N2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for a fused product whose first half is the gate.

    Args:
        gate_up_N2F: float [N, 2F].

    Returns:
        [N, F], dtype of the input, new memory. Nothing is mutated.
    """
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_NF) * up_NF
