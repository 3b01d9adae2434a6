"""What every pass of a decoder begins with, in one op: embeddings, the first layer's norm, cosines and sines of positions.

T packed tokens or beam rows, V vocabulary, C codes of a level, M hidden size, D head dim.
"""

from types import SimpleNamespace
from typing import Any

import torch

from xgr_runtime.hal.ops.norm import rms_norm
from xgr_runtime.hal.registry import by_parts, op

Begun = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@op
def embedding_rms_norm_cos_sin(
    embedding_VM: torch.Tensor,
    id_T: torch.Tensor,
    token_of_C: torch.Tensor | None,
    norm_weight_M: torch.Tensor,
    eps: float,
    position_T: torch.Tensor,
    frequency_D: torch.Tensor,
) -> Begun:
    """The residual stream as it begins, its normalised rows, and what `rotary_embedding` turns heads by.

    Args:
        embedding_VM: float [V, M], contiguous.
        id_T: int32 or int64 [T]: tokens, or codes where token_of_C is given.
        token_of_C: int64 [C], the token of each code, or None. Whatever an id names has to be there.
        norm_weight_M: [M], dtype of the embedding.
        eps: added to the mean square.
        position_T: int64 [T], each below 2^24, so that fp32 holds it.
        frequency_D: fp32 [D], radians a position, both halves alike.

    Returns:
        (embeddings [T, M], their `rms_norm` [T, M], cosines fp32 [T, D], sines fp32 [T, D]), all new memory. An angle is the
        fp32 product of position and frequency; its cosine and sine are good to fp32 whatever its size. Nothing is mutated.
    """
    return _begin_by_parts(
        _REFERENCES, embedding_VM, id_T, token_of_C, norm_weight_M, eps, position_T, frequency_D
    )


@by_parts(embedding_rms_norm_cos_sin, rms_norm)
def _begin_by_parts(
    parts: Any,
    embedding_VM: torch.Tensor,
    id_T: torch.Tensor,
    token_of_C: torch.Tensor | None,
    norm_weight_M: torch.Tensor,
    eps: float,
    position_T: torch.Tensor,
    frequency_D: torch.Tensor,
) -> Begun:
    token_T = id_T if token_of_C is None else token_of_C.index_select(0, id_T)
    residual_TM = embedding_VM.index_select(0, token_T)
    # one product takes whole numbers to fp32 and fills both halves
    angle_TD = position_T.unsqueeze(-1) * frequency_D
    rows_TM: torch.Tensor = parts.rms_norm(residual_TM, norm_weight_M, eps)
    return residual_TM, rows_TM, angle_TD.cos(), angle_TD.sin()


_REFERENCES = SimpleNamespace(rms_norm=rms_norm.reference)
