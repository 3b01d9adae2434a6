"""The output head: logits of a level's rows, and the normaliser over the whole vocabulary without logits of that size.

For the latter the head's rows are walked in tiles with a running maximum and a running sum, so that the largest intermediate is one
tile of logits and one tile of weights in fp32. N rows, V rows of the head, M hidden size.
"""

from typing import Any

import torch

from xgr_runtime.hal.registry import by_parts, op

_TILE_ROWS = 8192
_LEVEL_TILE_ROWS = 4096


@op
def head_logsumexp(hidden_NM: torch.Tensor, weight_VM: torch.Tensor, scale: float) -> torch.Tensor:
    """log(sum over v of exp(scale * hidden . weight[v])), over all V rows, accumulated in fp32.

    Args:
        hidden_NM: float [N, M].
        weight_VM: [V, M], V >= 1, any float dtype.
        scale: factor of the logits.

    Returns:
        fp32 [N], natural logarithm. A NaN or +inf logit makes its row NaN or +inf. Nothing is mutated.
    """
    hidden_fp32_NM = hidden_NM.float() * scale
    largest_N = hidden_fp32_NM.new_full((hidden_NM.shape[0],), -torch.inf)
    total_N = torch.zeros_like(largest_N)
    for first in range(0, weight_VM.shape[0], _TILE_ROWS):
        logits_NC = hidden_fp32_NM @ weight_VM[first : first + _TILE_ROWS].float().T
        new_largest_N = torch.maximum(largest_N, logits_NC.amax(-1))
        finite_N = new_largest_N.masked_fill(new_largest_N.isinf(), 0.0)
        total_N = total_N * (largest_N - finite_N).exp()
        total_N += (logits_NC - finite_N.unsqueeze(-1)).exp().sum(-1)
        largest_N = new_largest_N
    finite_N = largest_N.masked_fill(largest_N.isinf(), 0.0)
    return finite_N + total_N.log()


@op
def head_logits(hidden_NM: torch.Tensor, weight_CM: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * hidden . weight[c] for every row of the head's part, products and sums in fp32.

    Args:
        hidden_NM: float [N, M], contiguous.
        weight_CM: [C, M], dtype of hidden, contiguous.
        scale: factor of the logits.

    Returns:
        fp32 [N, C], new memory. Nothing is mutated.
    """
    return _logits_in_fp32(None, hidden_NM, weight_CM, scale)


@by_parts(head_logits)
def _logits_in_fp32(
    parts: Any, hidden_NM: torch.Tensor, weight_CM: torch.Tensor, scale: float
) -> torch.Tensor:
    """16-bit rows are widened tile by tile."""
    hidden_fp32_NM = hidden_NM.float() * scale
    tiles = [
        hidden_fp32_NM @ weight_CM[first : first + _LEVEL_TILE_ROWS].float().T
        for first in range(0, weight_CM.shape[0], _LEVEL_TILE_ROWS)
    ]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)
