"""The gated activation of the feed-forward layers. N rows, M hidden size, F feed-forward size."""

from types import SimpleNamespace
from typing import Any

import torch

from xgr_runtime.hal.ops.linear import linear
from xgr_runtime.hal.registry import by_parts, op


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


@op
def linear_silu_mul(x_NM: torch.Tensor, weight_2FM: torch.Tensor) -> torch.Tensor:
    """`silu_mul` of the fused product x weight^T: silu(x gate^T) * (x up^T).

    Args:
        x_NM: float [N, M], contiguous.
        weight_2FM: [2F, M], dtype of x, contiguous; the first half is the gate.

    Returns:
        [N, F], dtype of x, new memory. A fused provider may leave out the rounding of the product. Nothing is mutated.
    """
    parts = SimpleNamespace(linear=linear.reference, silu_mul=silu_mul.reference)
    return _linear_silu_by_parts(parts, x_NM, weight_2FM)


@by_parts(linear_silu_mul, linear, silu_mul)
def _linear_silu_by_parts(parts: Any, x_NM: torch.Tensor, weight_2FM: torch.Tensor) -> torch.Tensor:
    out_NF: torch.Tensor = parts.silu_mul(parts.linear(x_NM, weight_2FM))
    return out_NF
