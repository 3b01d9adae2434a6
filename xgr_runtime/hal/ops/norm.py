"""Root-mean-square normalisation, computed in fp32 and rounded once before the weight, as the checkpoints were trained.

N rows, M size of the last dim.
"""

import torch

from xgr_runtime.hal.registry import op


@op
def rms_norm(x_NM: torch.Tensor, weight_M: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim.

    Args:
        x_NM: float [..., M]; any number of leading dims (a head's vector is normalised as [N, Q, D]).
        weight_M: [M], dtype of x.
        eps: added to the mean square.

    Returns:
        Shape and dtype of x, new memory. Nothing is mutated.
    """
    x_fp32_NM = x_NM.float()
    inverse_N1 = (x_fp32_NM.square().mean(-1, keepdim=True) + eps).rsqrt()
    return weight_M * (x_fp32_NM * inverse_N1).to(x_NM.dtype)


@op
def add_rms_norm(
    x_NM: torch.Tensor, residual_NM: torch.Tensor, weight_M: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add x to the residual stream and normalise the sum.

    Args:
        x_NM: float [N, M].
        residual_NM: [N, M], dtype of x; MUTATED: += x, rounded to its dtype.
        weight_M: [M], dtype of x.
        eps: added to the mean square.

    Returns:
        rms_norm of the new residual, [N, M], new memory.
    """
    residual_NM += x_NM
    return rms_norm.reference(residual_NM, weight_M, eps)
