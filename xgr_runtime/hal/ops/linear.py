"""Products with a weight: alone, and with what follows a layer's output product, so that a provider may fuse them.

Few rows read the weight once and little else, so a product is spread over its inner dim too; then the sum of the parts,
the residual and the norm are one pass.

N rows, K inner size, M hidden size, O outputs.
"""

from types import SimpleNamespace
from typing import Any

import torch

from xgr_runtime.hal.ops.norm import add_rms_norm
from xgr_runtime.hal.registry import by_parts, op


@op
def linear(x_NK: torch.Tensor, weight_OK: torch.Tensor) -> torch.Tensor:
    """x weight^T.

    Args:
        x_NK: float [N, K], contiguous.
        weight_OK: [O, K], dtype of x, contiguous.

    Returns:
        [N, O], dtype of x, new memory; summed in fp32. Nothing is mutated.
    """
    return _linear_of_torch(None, x_NK, weight_OK)


@by_parts(linear)
def _linear_of_torch(parts: Any, x_NK: torch.Tensor, weight_OK: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x_NK, weight_OK)


@op
def linear_add_rms_norm(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`add_rms_norm` of the product x weight^T: add it to the residual stream and normalise the sum.

    Args:
        x_NK: float [N, K], contiguous.
        weight_MK: [M, K], dtype of x, contiguous.
        residual_NM: [N, M], dtype of x, contiguous; MUTATED: += the product, rounded to its dtype.
        norm_weight_M: [M], dtype of x.
        eps: added to the mean square.

    Returns:
        rms_norm of the new residual, [N, M], new memory. A fused provider may leave out the rounding of the product.
    """
    parts = SimpleNamespace(linear=linear.reference, add_rms_norm=add_rms_norm.reference)
    return _linear_add_by_parts(parts, x_NK, weight_MK, residual_NM, norm_weight_M, eps)


@by_parts(linear_add_rms_norm, linear, add_rms_norm)
def _linear_add_by_parts(
    parts: Any,
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    out_NM: torch.Tensor = parts.add_rms_norm(
        parts.linear(x_NK, weight_MK), residual_NM, norm_weight_M, eps
    )
    return out_NM
