"""Fused ops of an attention layer: what its stages do one by one, in one pass over memory where a provider can.

`beam_attention` is the three stages of a round; `rope_write_shared_kv` and `rope_write_unshared_kv` turn the fused product
of a layer's input into rotated queries and stored keys and values, and those with `linear` in front make the product too.

H histories, N packed beam rows, T packed tokens, Q query heads, G KV heads, D head dim, P pages, R rounds, X = Q + 2 G.
"""

from types import SimpleNamespace
from typing import Any

import torch

from xgr_runtime.hal.ops.attention import (
    merge_attention_states,
    shared_attention,
    unshared_attention,
)
from xgr_runtime.hal.ops.cache import write_shared_kv, write_unshared_kv
from xgr_runtime.hal.ops.linear import linear
from xgr_runtime.hal.ops.norm import rms_norm
from xgr_runtime.hal.ops.rope import rotary_embedding
from xgr_runtime.hal.registry import by_parts, op


@op
def beam_attention(
    q_NQD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_HP: torch.Tensor,
    row_start_H1: torch.Tensor,
    kv_len_H: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    num_tokens: int,
    scale: float,
    max_rows: int,
    max_kv: int,
    kv_lens: tuple[int, ...],
) -> torch.Tensor:
    """Attention of packed beam rows over their history's pages and their own tokens.

    Args:
        q_NQD: [N, Q, D] float, contiguous.
        k_pages: [P, page_size, G, D], as in `shared_attention`; so are the next four.
        v_pages: like k_pages.
        page_table_HP: int32 [H, pages of a history].
        row_start_H1: int32 [H + 1], not decreasing.
        kv_len_H: int32 [H]; 0 is legal.
        k_rows: [slots, R - 1, G, D], as in `unshared_attention`; so are the next three.
        v_rows: like k_rows.
        slot_N: int32 [N].
        num_tokens: in [1, R - 1].
        scale: factor of the scores.
        max_rows: static upper bound of the rows of a history, at least 1.
        max_kv: static upper bound of kv_len, at least 1.
        kv_lens: [H], kv_len_H as the host knows it.

    Returns:
        [N, Q, D], dtype of q, new memory; padding rows get an unspecified result. Nothing is mutated.
    """
    return _attend_by_parts(
        _REFERENCES, q_NQD, k_pages, v_pages, page_table_HP, row_start_H1, kv_len_H, k_rows, v_rows,
        slot_N, num_tokens, scale, max_rows, max_kv, kv_lens,
    )  # fmt: skip


@by_parts(beam_attention, shared_attention, unshared_attention, merge_attention_states)
def _attend_by_parts(
    parts: Any,
    q_NQD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_HP: torch.Tensor,
    row_start_H1: torch.Tensor,
    kv_len_H: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    num_tokens: int,
    scale: float,
    max_rows: int,
    max_kv: int,
    kv_lens: tuple[int, ...],
) -> torch.Tensor:
    shared = parts.shared_attention(
        q_NQD, k_pages, v_pages, page_table_HP, row_start_H1, kv_len_H, scale, max_rows, max_kv, kv_lens,
    )  # fmt: skip
    own = parts.unshared_attention(q_NQD, k_rows, v_rows, slot_N, num_tokens, scale)
    out_NQD: torch.Tensor = parts.merge_attention_states(*shared, *own)[0]
    return out_NQD


@op
def rope_write_shared_kv(
    qkv_TXD: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    """Normalise and rotate the queries and keys of packed tokens, and store keys and values in pages.

    Args:
        qkv_TXD: [T, Q + 2 G, D] float, contiguous: query heads, key heads, value heads.
        q_norm_D: [D], dtype of qkv, the weight of each query head's `rms_norm`; None where heads are not normalised.
        k_norm_D: likewise of keys; None exactly where q_norm_D is.
        eps: of the norms.
        cos_TD: fp32 [T, D], as in `rotary_embedding`.
        sin_TD: fp32 [T, D], likewise.
        k_pages: [P, page_size, G, D], contiguous, dtype of qkv; MUTATED.
        v_pages: like k_pages; MUTATED.
        slot_T: int64 [T], as in `write_shared_kv`.

    Returns:
        The queries, [T, Q, D], dtype of qkv, new contiguous memory. Rounded where the parts round.
    """
    return _write_shared_by_parts(
        _REFERENCES, qkv_TXD, q_norm_D, k_norm_D, eps, cos_TD, sin_TD, k_pages, v_pages, slot_T
    )


@by_parts(rope_write_shared_kv, rms_norm, rotary_embedding, write_shared_kv)
def _write_shared_by_parts(
    parts: Any,
    qkv_TXD: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    q_TQD, k_TGD, v_TGD = _rotated(
        parts, qkv_TXD, k_pages.shape[2], q_norm_D, k_norm_D, eps, cos_TD, sin_TD
    )
    parts.write_shared_kv(k_TGD, v_TGD, k_pages, v_pages, slot_T)
    return q_TQD


@op
def rope_write_unshared_kv(
    qkv_NXD: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_ND: torch.Tensor,
    sin_ND: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    position: int,
) -> torch.Tensor:
    """The same for one new token per beam row, stored at `position` of the row's slot.

    Args:
        qkv_NXD: [N, Q + 2 G, D], as in `rope_write_shared_kv`; so are the next five.
        q_norm_D: [D] or None.
        k_norm_D: [D] or None.
        eps: of the norms.
        cos_ND: fp32 [N, D].
        sin_ND: fp32 [N, D].
        k_rows: [slots, R - 1, G, D], dtype of qkv; MUTATED.
        v_rows: like k_rows; MUTATED.
        slot_N: int32 [N], as in `write_unshared_kv`.
        position: in [0, R - 1).

    Returns:
        The queries, [N, Q, D], dtype of qkv, new contiguous memory. Rounded where the parts round.
    """
    return _write_unshared_by_parts(
        _REFERENCES, qkv_NXD, q_norm_D, k_norm_D, eps, cos_ND, sin_ND, k_rows, v_rows, slot_N, position
    )  # fmt: skip


@by_parts(rope_write_unshared_kv, rms_norm, rotary_embedding, write_unshared_kv)
def _write_unshared_by_parts(
    parts: Any,
    qkv_NXD: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_ND: torch.Tensor,
    sin_ND: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    position: int,
) -> torch.Tensor:
    q_NQD, k_NGD, v_NGD = _rotated(
        parts, qkv_NXD, k_rows.shape[2], q_norm_D, k_norm_D, eps, cos_ND, sin_ND
    )
    parts.write_unshared_kv(k_NGD, v_NGD, k_rows, v_rows, slot_N, position)
    return q_NQD


@op
def linear_rope_write_shared_kv(
    x_TM: torch.Tensor,
    weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    """`rope_write_shared_kv` of the product x weight^T.

    Args:
        x_TM: [T, M] float, contiguous.
        weight_OM: [(Q + 2 G) D, M], dtype of x, contiguous: query heads, key heads, value heads.
        q_norm_D: [D] or None, as in `rope_write_shared_kv`; so are the others.
        k_norm_D: [D] or None.
        eps: of the norms.
        cos_TD: fp32 [T, D].
        sin_TD: fp32 [T, D].
        k_pages: [P, page_size, G, D]; MUTATED.
        v_pages: like k_pages; MUTATED.
        slot_T: int64 [T].

    Returns:
        The queries, [T, Q, D]. A fused provider may leave out the rounding of the product.
    """
    return _product_to_shared_by_parts(
        _REFERENCES, x_TM, weight_OM, q_norm_D, k_norm_D, eps, cos_TD, sin_TD, k_pages, v_pages, slot_T
    )  # fmt: skip


@by_parts(linear_rope_write_shared_kv, linear, rope_write_shared_kv)
def _product_to_shared_by_parts(
    parts: Any,
    x_TM: torch.Tensor,
    weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    qkv_TXD = parts.linear(x_TM, weight_OM).unflatten(1, (-1, k_pages.shape[3]))
    q_TQD: torch.Tensor = parts.rope_write_shared_kv(
        qkv_TXD, q_norm_D, k_norm_D, eps, cos_TD, sin_TD, k_pages, v_pages, slot_T
    )
    return q_TQD


@op
def linear_rope_write_unshared_kv(
    x_NM: torch.Tensor,
    weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_ND: torch.Tensor,
    sin_ND: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    position: int,
) -> torch.Tensor:
    """`rope_write_unshared_kv` of the product x weight^T.

    Args:
        x_NM: [N, M] float, contiguous.
        weight_OM: [(Q + 2 G) D, M], as in `linear_rope_write_shared_kv`.
        q_norm_D: [D] or None, as in `rope_write_unshared_kv`; so are the others.
        k_norm_D: [D] or None.
        eps: of the norms.
        cos_ND: fp32 [N, D].
        sin_ND: fp32 [N, D].
        k_rows: [slots, R - 1, G, D]; MUTATED.
        v_rows: like k_rows; MUTATED.
        slot_N: int32 [N].
        position: in [0, R - 1).

    Returns:
        The queries, [N, Q, D]. A fused provider may leave out the rounding of the product.
    """
    return _product_to_unshared_by_parts(
        _REFERENCES, x_NM, weight_OM, q_norm_D, k_norm_D, eps, cos_ND, sin_ND, k_rows, v_rows, slot_N, position
    )  # fmt: skip


@by_parts(linear_rope_write_unshared_kv, linear, rope_write_unshared_kv)
def _product_to_unshared_by_parts(
    parts: Any,
    x_NM: torch.Tensor,
    weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_ND: torch.Tensor,
    sin_ND: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    position: int,
) -> torch.Tensor:
    qkv_NXD = parts.linear(x_NM, weight_OM).unflatten(1, (-1, k_rows.shape[3]))
    q_NQD: torch.Tensor = parts.rope_write_unshared_kv(
        qkv_NXD, q_norm_D, k_norm_D, eps, cos_ND, sin_ND, k_rows, v_rows, slot_N, position
    )
    return q_NQD


def _rotated(
    parts: Any,
    qkv_TXD: torch.Tensor,
    num_kv_heads: int,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = [qkv_TXD.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
    q_TQD, k_TGD, v_TGD = torch.split(qkv_TXD, heads, dim=1)
    if q_norm_D is not None and k_norm_D is not None:
        q_TQD = parts.rms_norm(q_TQD, q_norm_D, eps)
        k_TGD = parts.rms_norm(k_TGD, k_norm_D, eps)
    q_TQD, k_TGD = parts.rotary_embedding(q_TQD, k_TGD, cos_TD, sin_TD)
    return q_TQD, k_TGD, v_TGD


_REFERENCES = SimpleNamespace(
    **{
        part.name: part.reference
        for fused in (
            beam_attention,
            rope_write_shared_kv,
            rope_write_unshared_kv,
            linear_rope_write_shared_kv,
            linear_rope_write_unshared_kv,
        )
        for part in fused.parts
    }
)
