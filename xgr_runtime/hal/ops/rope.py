"""Rotary position embedding in the half-split convention: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).

T packed tokens, Q query heads, G KV heads, D head dim.
"""

import torch

from xgr_runtime.hal.registry import op


def _rotate(x_TQD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    x_fp32_TQD = x_TQD.float()
    first, second = x_fp32_TQD.chunk(2, dim=-1)
    turned_TQD = torch.cat((-second, first), dim=-1)
    return (x_fp32_TQD * cos_T1D + turned_TQD * sin_T1D).to(x_TQD.dtype)


@op
def rotary_embedding(
    q_TQD: torch.Tensor, k_TGD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions' angles, in fp32, rounded once.

    Args:
        q_TQD: float [T, Q, D], D even; may be a view with another stride over tokens.
        k_TGD: [T, G, D], dtype of q; likewise.
        cos_TD: fp32 [T, D], both halves alike.
        sin_TD: fp32 [T, D], both halves alike.

    Returns:
        (q, k) rotated, dtypes of the inputs, new contiguous memory. Nothing is mutated.
    """
    cos_T1D, sin_T1D = cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)
    return _rotate(q_TQD, cos_T1D, sin_T1D), _rotate(k_TGD, cos_T1D, sin_T1D)
