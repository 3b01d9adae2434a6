"""Attention in three stages that meet through a log-sum-exp, so that a history's keys are read once for all beams.

Stage one attends to the history (`shared_attention`), stage two to a beam's own tokens (`unshared_attention`), stage
three merges them exactly (`merge_attention_states`). The references have fixed shapes: the bounds `max_q`, `max_rows`
and `max_kv` are static, the true lengths act through clamped gathers and masks. Masked keys and values are replaced by
zeros before use, since an unused page may hold anything, NaN included. Query rows go in tiles, which bounds the
scores held at once.

The lengths come twice: as device tensors, and as the host's own numbers for kernels that take lengths from the host
(fused attention on an Ascend NPU does). A captured graph keeps the host's numbers of its capture, unless its device
updates them (`Graph.replay`: of each history's length alone); providers of any other device do not read them inside a
captured segment.

H histories, N packed beam rows, T packed tokens, Q query heads, G KV heads, D head dim, P pages, K keys.
Query head q reads KV head q // (Q // G).
"""

import torch

from xgr_runtime.hal.registry import op

_ROWS_PER_TILE = 128


def attend_dense(
    q_RQD: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    allowed_RK: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked attention of R rows over K keys in fp32: (out fp32 [R, Q, D], lse fp32 [R, Q]).

    allowed_RK: bool [R, K] or [1, K]. A row without an allowed key gives out 0 and lse -inf.
    """
    num_rows, num_heads, head_dim = q_RQD.shape
    num_kv_heads = k_KGD.shape[1]
    q_GXRD = (
        q_RQD.float()
        .reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        .permute(1, 2, 0, 3)
    )
    k_G1DK = k_KGD.float().permute(1, 2, 0).unsqueeze(1)
    v_G1KD = v_KGD.float().permute(1, 0, 2).unsqueeze(1)
    scores_GXRK = (torch.matmul(q_GXRD, k_G1DK) * scale).masked_fill(~allowed_RK, -torch.inf)
    weights_GXRK, lse_GXR = _softmax_with_lse(scores_GXRK)
    out_GXRD = torch.matmul(weights_GXRK, v_G1KD)
    out_RQD = out_GXRD.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)
    return out_RQD, lse_GXR.permute(2, 0, 1).reshape(num_rows, num_heads)


def _softmax_with_lse(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dim and its log-sum-exp; a row of -inf gives zeros and -inf."""
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    lse = (largest + total.log()).squeeze(-1)
    return weights / total.masked_fill(total == 0.0, 1.0), lse


def _gather_history(
    pages: torch.Tensor, page_table_P: torch.Tensor, is_used_K: torch.Tensor
) -> torch.Tensor:
    """[K, G, D] keys or values of one history, zero where not used."""
    page_size = pages.shape[1]
    position_K = torch.arange(is_used_K.shape[0], device=pages.device)
    page_K = (position_K // page_size).clamp(max=page_table_P.shape[0] - 1)
    slot_K = page_table_P.long()[page_K] * page_size + position_K % page_size
    rows_KGD = pages.flatten(0, 1).index_select(0, slot_K.masked_fill(~is_used_K, 0))
    return rows_KGD.masked_fill(~is_used_K[:, None, None], 0.0)


@op
def prefill_attention(
    q_TQD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_HP: torch.Tensor,
    q_start_H1: torch.Tensor,
    kv_len_H: torch.Tensor,
    scale: float,
    max_q: int,
    max_kv: int,
    q_starts: tuple[int, ...],
    kv_lens: tuple[int, ...],
) -> torch.Tensor:
    """Causal attention of packed new tokens over their histories' pages (cached prefix and the new tokens).

    The new tokens of history h are rows q_start[h] .. q_start[h + 1] of q and the LAST of its kv_len[h] tokens; their
    own keys and values are already in the pages.

    Args:
        q_TQD: [T, Q, D] float, contiguous.
        k_pages: [P, page_size, G, D], dtype of q, contiguous. Q is a multiple of G.
        v_pages: like k_pages.
        page_table_HP: int32 [H, pages of a history]; entry i holds tokens i * page_size onward.
        q_start_H1: int32 [H + 1], not decreasing, at most T.
        kv_len_H: int32 [H], tokens in the pages, new ones included; 0 for a padding history.
        scale: factor of the scores.
        max_q: static upper bound of the new tokens of a history, at least 1.
        max_kv: static upper bound of kv_len, at least 1.
        q_starts: [H + 1], q_start_H1 as the host knows it.
        kv_lens: [H], kv_len_H as the host knows it.

    Returns:
        [T, Q, D], dtype of q, new memory. Rows of no history, and rows of a history with kv_len 0, are 0.
        Nothing is mutated.
    """
    num_tokens, num_histories = q_TQD.shape[0], kv_len_H.shape[0]
    out_TQD = q_TQD.new_zeros(
        (num_tokens + 1, *q_TQD.shape[1:])
    )  # the last row takes what is masked
    key_K = torch.arange(max_kv, device=q_TQD.device)
    for h in range(num_histories):
        is_used_K = key_K < kv_len_H[h]
        k_KGD = _gather_history(k_pages, page_table_HP[h], is_used_K)
        v_KGD = _gather_history(v_pages, page_table_HP[h], is_used_K)
        num_new = q_start_H1[h + 1] - q_start_H1[h]
        for first in range(0, max_q, _ROWS_PER_TILE):
            row_R = torch.arange(first, min(first + _ROWS_PER_TILE, max_q), device=q_TQD.device)
            is_row_R = row_R < num_new
            packed_R = (row_R + q_start_H1[h]).masked_fill(~is_row_R, num_tokens)
            position_R = row_R + (kv_len_H[h] - num_new)
            allowed_RK = (key_K <= position_R[:, None]) & is_used_K & is_row_R[:, None]
            q_RQD = q_TQD.index_select(0, packed_R.clamp(max=num_tokens - 1))
            out_RQD, _ = attend_dense(q_RQD, k_KGD, v_KGD, allowed_RK, scale)
            out_TQD.index_copy_(0, packed_R, out_RQD.to(out_TQD.dtype))
    return out_TQD[:num_tokens]


@op
def shared_attention(
    q_NQD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_HP: torch.Tensor,
    row_start_H1: torch.Tensor,
    kv_len_H: torch.Tensor,
    scale: float,
    max_rows: int,
    max_kv: int,
    kv_lens: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed beam rows over their history's pages, not causal: every row sees all kv_len tokens.

    Args:
        q_NQD: [N, Q, D] float, contiguous.
        k_pages: [P, page_size, G, D], dtype of q, contiguous. Q is a multiple of G.
        v_pages: like k_pages.
        page_table_HP: int32 [H, pages of a history].
        row_start_H1: int32 [H + 1], not decreasing: history h owns rows row_start[h] .. row_start[h + 1].
        kv_len_H: int32 [H], tokens in the pages; 0 is legal.
        scale: factor of the scores.
        max_rows: static upper bound of the rows of a history, at least 1.
        max_kv: static upper bound of kv_len, at least 1.
        kv_lens: [H], kv_len_H as the host knows it.

    Returns:
        (out [N, Q, D] in the dtype of q, lse [N, Q] fp32, natural logarithm of the sum of exp(scale * q.k)).
        Rows beyond row_start_H1[-1] and rows of a history with kv_len 0: out 0, lse -inf.
        Nothing is mutated.
    """
    num_rows, num_heads = q_NQD.shape[:2]
    out_NQD = q_NQD.new_zeros((num_rows + 1, *q_NQD.shape[1:]))
    lse_NQ = q_NQD.new_full((num_rows + 1, num_heads), -torch.inf, dtype=torch.float32)
    key_K = torch.arange(max_kv, device=q_NQD.device)
    for h in range(kv_len_H.shape[0]):
        is_used_K = key_K < kv_len_H[h]
        k_KGD = _gather_history(k_pages, page_table_HP[h], is_used_K)
        v_KGD = _gather_history(v_pages, page_table_HP[h], is_used_K)
        for first in range(0, max_rows, _ROWS_PER_TILE):
            row_R = torch.arange(first, min(first + _ROWS_PER_TILE, max_rows), device=q_NQD.device)
            row_R = row_R + row_start_H1[h]
            packed_R = row_R.masked_fill(row_R >= row_start_H1[h + 1], num_rows)
            q_RQD = q_NQD.index_select(0, packed_R.clamp(max=num_rows - 1))
            out_RQD, lse_RQ = attend_dense(q_RQD, k_KGD, v_KGD, is_used_K[None], scale)
            out_NQD.index_copy_(0, packed_R, out_RQD.to(out_NQD.dtype))
            lse_NQ.index_copy_(0, packed_R, lse_RQ)
    return out_NQD[:num_rows], lse_NQ[:num_rows]


@op
def unshared_attention(
    q_NQD: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    num_tokens: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each beam row over the first `num_tokens` own tokens in its slot.

    Args:
        q_NQD: [N, Q, D] float.
        k_rows: [slots, R - 1, G, D], dtype of q. Q is a multiple of G.
        v_rows: like k_rows.
        slot_N: int32 [N]; padding rows name the dummy slot and get an unspecified result.
        num_tokens: in [1, R - 1].
        scale: factor of the scores.

    Returns:
        (out [N, Q, D] in the dtype of q, lse [N, Q] fp32, natural logarithm). Nothing is mutated.
    """
    num_rows, num_heads, head_dim = q_NQD.shape
    num_kv_heads = k_rows.shape[2]
    k_NKGD = k_rows[:, :num_tokens].index_select(0, slot_N).float()
    v_NKGD = v_rows[:, :num_tokens].index_select(0, slot_N).float()
    q_NGXD = q_NQD.float().reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores_NGXK = torch.matmul(q_NGXD, k_NKGD.permute(0, 2, 3, 1)) * scale
    weights_NGXK, lse_NGX = _softmax_with_lse(scores_NGXK)
    out_NGXD = torch.matmul(weights_NGXK, v_NKGD.permute(0, 2, 1, 3))
    return (
        out_NGXD.reshape(num_rows, num_heads, head_dim).to(q_NQD.dtype),
        lse_NGX.reshape(num_rows, num_heads),
    )


@op
def merge_attention_states(
    out_a_NQD: torch.Tensor, lse_a_NQ: torch.Tensor, out_b_NQD: torch.Tensor, lse_b_NQ: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the union of two disjoint sets of keys, from the two partial results.

    Args:
        out_a_NQD: [N, Q, D] float, the result over the first set.
        lse_a_NQ: fp32 [N, Q], natural logarithm; -inf where the set was empty.
        out_b_NQD: like out_a_NQD, over the second set.
        lse_b_NQ: like lse_a_NQ.

    Returns:
        (out [N, Q, D] in the dtype of out_a, lse fp32 [N, Q]). Where one side is empty the other comes out bit for
        bit, where both are: out 0, lse -inf. Nothing is mutated.
    """
    largest_NQ = torch.maximum(lse_a_NQ, lse_b_NQ)
    finite_NQ = largest_NQ.masked_fill(largest_NQ == -torch.inf, 0.0)
    weight_a_NQ, weight_b_NQ = (lse_a_NQ - finite_NQ).exp(), (lse_b_NQ - finite_NQ).exp()
    total_NQ = weight_a_NQ + weight_b_NQ
    share_NQ = total_NQ.masked_fill(total_NQ == 0.0, 1.0)
    out_NQD = out_a_NQD.float() * (weight_a_NQ / share_NQ).unsqueeze(-1)
    out_NQD += out_b_NQD.float() * (weight_b_NQ / share_NQ).unsqueeze(-1)
    return out_NQD.to(out_a_NQD.dtype), finite_NQ + total_NQ.log()
