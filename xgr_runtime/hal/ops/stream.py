"""Pairs of products around the residual stream: one is added to it, the next reads its normalised rows.

A provider that makes both need not normalise the rows in between: a row's factor may be multiplied to the next product, so
that no kernel waits for whole rows.

N rows, T packed tokens, K inputs of the first product, M hidden size, F feed-forward size, Q query heads, G KV heads, D head
dim, O outputs, which are (Q + 2 G) D, R rounds.
"""

from types import SimpleNamespace
from typing import Any

import torch

from xgr_runtime.hal.ops.activation import linear_silu_mul
from xgr_runtime.hal.ops.fused_attention import (
    linear_rope_write_shared_kv,
    linear_rope_write_unshared_kv,
)
from xgr_runtime.hal.ops.linear import linear_add_rms_norm
from xgr_runtime.hal.registry import by_parts, op


@op
def stream_linear_silu_mul(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    gate_up_2FM: torch.Tensor,
) -> torch.Tensor:
    """`linear_silu_mul` of the rows that `linear_add_rms_norm` returns.

    Args:
        x_NK: float [N, K], contiguous.
        weight_MK: [M, K], dtype of x, contiguous.
        residual_NM: [N, M], dtype of x, contiguous; MUTATED: += the product x weight^T, rounded to its dtype.
        norm_weight_M: [M], dtype of x.
        eps: added to the mean square.
        gate_up_2FM: [2F, M], dtype of x, contiguous; the first half is the gate.

    Returns:
        [N, F], dtype of x, new memory. A fused provider may leave out the rounding of what stays on the way, and round the
        rows before they are normalised instead of behind that.
    """
    return _silu_by_parts(
        _REFERENCES, x_NK, weight_MK, residual_NM, norm_weight_M, eps, gate_up_2FM
    )


@by_parts(stream_linear_silu_mul, linear_add_rms_norm, linear_silu_mul)
def _silu_by_parts(
    parts: Any,
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    gate_up_2FM: torch.Tensor,
) -> torch.Tensor:
    rows_NM = parts.linear_add_rms_norm(x_NK, weight_MK, residual_NM, norm_weight_M, eps)
    out_NF: torch.Tensor = parts.linear_silu_mul(rows_NM, gate_up_2FM)
    return out_NF


@op
def stream_linear_rope_write_shared_kv(
    x_TK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_TM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    qkv_weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    """`linear_rope_write_shared_kv` of the rows that `linear_add_rms_norm` returns.

    Args:
        x_TK: float [T, K], contiguous.
        weight_MK: [M, K], as in `stream_linear_silu_mul`; so are the next three.
        residual_TM: [T, M]; MUTATED.
        norm_weight_M: [M].
        eps: of all norms.
        qkv_weight_OM: [(Q + 2 G) D, M], dtype of x, contiguous: query heads, key heads, value heads.
        q_norm_D: [D] or None, as in `rope_write_shared_kv`; so are the others.
        k_norm_D: [D] or None.
        cos_TD: fp32 [T, D].
        sin_TD: fp32 [T, D].
        k_pages: [P, page_size, G, D]; MUTATED.
        v_pages: like k_pages; MUTATED.
        slot_T: int64 [T].

    Returns:
        The queries, [T, Q, D]. Rounding: as in `stream_linear_silu_mul`.
    """
    return _rope_write_by_parts(
        _REFERENCES, x_TK, weight_MK, residual_TM, norm_weight_M, eps, qkv_weight_OM, q_norm_D, k_norm_D, cos_TD, sin_TD,
        k_pages, v_pages, slot_T,
    )  # fmt: skip


@by_parts(
    stream_linear_rope_write_shared_kv,
    linear_add_rms_norm,
    linear_rope_write_shared_kv,
)
def _rope_write_by_parts(
    parts: Any,
    x_TK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_TM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    qkv_weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    rows_TM = parts.linear_add_rms_norm(x_TK, weight_MK, residual_TM, norm_weight_M, eps)
    q_TQD: torch.Tensor = parts.linear_rope_write_shared_kv(
        rows_TM, qkv_weight_OM, q_norm_D, k_norm_D, eps, cos_TD, sin_TD, k_pages, v_pages, slot_T
    )
    return q_TQD


@op
def stream_linear_rope_write_unshared_kv(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    qkv_weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    cos_ND: torch.Tensor,
    sin_ND: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    position: int,
) -> torch.Tensor:
    """`linear_rope_write_unshared_kv` of the rows that `linear_add_rms_norm` returns.

    Args:
        x_NK: float [N, K], contiguous.
        weight_MK: [M, K], as in `stream_linear_silu_mul`; so are the next three.
        residual_NM: [N, M]; MUTATED.
        norm_weight_M: [M].
        eps: of all norms.
        qkv_weight_OM: [(Q + 2 G) D, M], dtype of x, contiguous: query heads, key heads, value heads.
        q_norm_D: [D] or None, as in `rope_write_unshared_kv`; so are the others.
        k_norm_D: [D] or None.
        cos_ND: fp32 [N, D].
        sin_ND: fp32 [N, D].
        k_rows: [slots, R - 1, G, D]; MUTATED.
        v_rows: like k_rows; MUTATED.
        slot_N: int32 [N].
        position: in [0, R - 1).

    Returns:
        The queries, [N, Q, D]. Rounding: as in `stream_linear_silu_mul`.
    """
    return _rope_write_rows_by_parts(
        _REFERENCES, x_NK, weight_MK, residual_NM, norm_weight_M, eps, qkv_weight_OM, q_norm_D, k_norm_D, cos_ND, sin_ND,
        k_rows, v_rows, slot_N, position,
    )  # fmt: skip


@by_parts(
    stream_linear_rope_write_unshared_kv,
    linear_add_rms_norm,
    linear_rope_write_unshared_kv,
)
def _rope_write_rows_by_parts(
    parts: Any,
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    qkv_weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    cos_ND: torch.Tensor,
    sin_ND: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    position: int,
) -> torch.Tensor:
    rows_NM = parts.linear_add_rms_norm(x_NK, weight_MK, residual_NM, norm_weight_M, eps)
    to = (k_rows, v_rows, slot_N, position)
    q_NQD: torch.Tensor = parts.linear_rope_write_unshared_kv(
        rows_NM, qkv_weight_OM, q_norm_D, k_norm_D, eps, cos_ND, sin_ND, *to
    )
    return q_NQD


_REFERENCES = SimpleNamespace(
    **{
        part.name: part.reference
        for part in (
            linear_add_rms_norm,
            linear_silu_mul,
            linear_rope_write_shared_kv,
            linear_rope_write_unshared_kv,
        )
    }
)
