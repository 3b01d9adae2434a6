"""The normaliser over the whole vocabulary without storing logits of that size.

The head's rows are walked in tiles with a running maximum and a running sum, so that the largest intermediate is one
tile of logits and one tile of weights in fp32. N rows, V rows of the head, M hidden size.
"""

import torch

from xgr_runtime.hal.registry import op

_TILE_ROWS = 8192


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
