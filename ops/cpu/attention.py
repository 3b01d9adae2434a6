"""Attention and the head's normaliser on the CPU, with exact lengths instead of the bucket's bounds.

Beams of one history and the query heads of one KV head are folded into the rows of one product per KV head. Rows go in
tiles whose scores stay near the caches, scores are exponentiated in place. Sums are in fp32 for every dtype.

H histories, N packed beam rows, T packed tokens, Q query heads, G KV heads, D head dim, K keys.
"""

import torch

from xgr_runtime.hal.ops.attention import prefill_attention, shared_attention
from xgr_runtime.hal.ops.head import head_logsumexp
from xgr_runtime.hal.registry import OpSpec, impl

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SCORES_PER_TILE = 1 << 20
_HEAD_TILE_ROWS = 1024


def _accepts(spec: OpSpec) -> str | None:
    """Sums are in fp32, hence nothing wider comes in."""
    if spec.dtype in _DTYPES:
        return None
    return f"takes {', '.join(str(dtype) for dtype in _DTYPES)}, got {spec.dtype}"


def _history(pages: torch.Tensor, page_table_P: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[G, K, D] keys or values of one history."""
    num_pages = -(-num_tokens // pages.shape[1])
    rows_KGD = pages.index_select(0, page_table_P[:num_pages]).flatten(0, 1)[:num_tokens]
    return rows_KGD.transpose(0, 1)


@impl(prefill_attention, provider="torch", device="cpu", accepts=_accepts)
def prefill_by_history(
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
    """One fused attention per history; without a cached prefix no mask is stored."""
    out_TQD = torch.zeros_like(q_TQD)
    for h, num_kv in enumerate(kv_lens):
        first, num_new = q_starts[h], q_starts[h + 1] - q_starts[h]
        if num_new == 0 or num_kv == 0:
            continue
        q_QKD = q_TQD[first : first + num_new].transpose(0, 1)
        mask_KK = None
        if 1 < num_new < num_kv:
            mask_KK = torch.ones(num_new, num_kv, dtype=torch.bool).tril(num_kv - num_new)
        out_1QKD = torch.nn.functional.scaled_dot_product_attention(
            q_QKD.unsqueeze(0),
            _history(k_pages, page_table_HP[h], num_kv).unsqueeze(0),
            _history(v_pages, page_table_HP[h], num_kv).unsqueeze(0),
            attn_mask=mask_KK,
            is_causal=num_new == num_kv,
            scale=scale,
            enable_gqa=True,
        )
        out_TQD[first : first + num_new] = out_1QKD[0].transpose(0, 1)
    return out_TQD


@impl(shared_attention, provider="torch", device="cpu", accepts=_accepts)
def shared_by_history(
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
    """Products of all rows of a history with its keys, tile by tile."""
    num_heads = q_NQD.shape[1]
    out_NQD = torch.zeros_like(q_NQD)
    lse_NQ = torch.full(q_NQD.shape[:2], -torch.inf)
    starts = row_start_H1.tolist()
    for h, num_kv in enumerate(kv_lens):
        if num_kv == 0 or starts[h] == starts[h + 1]:
            continue
        k_GKD = _history(k_pages, page_table_HP[h], num_kv).float()
        v_GKD = _history(v_pages, page_table_HP[h], num_kv).float()
        tile_rows = max(1, _SCORES_PER_TILE // (num_heads * num_kv))
        for first in range(starts[h], starts[h + 1], tile_rows):
            rows = slice(first, min(first + tile_rows, starts[h + 1]))
            out_NQD[rows], lse_NQ[rows] = _attend(q_NQD[rows].float() * scale, k_GKD, v_GKD)
    return out_NQD, lse_NQ


def _attend(
    q_RQD: torch.Tensor, k_GKD: torch.Tensor, v_GKD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out fp32 [R, Q, D], lse fp32 [R, Q]) of scaled queries."""
    num_rows, num_heads, head_dim = q_RQD.shape
    num_kv_heads = k_GKD.shape[0]
    folded = (num_rows, num_kv_heads, num_heads // num_kv_heads)
    q_GXD = q_RQD.view(*folded, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    scores_GXK = torch.bmm(q_GXD, k_GKD.transpose(1, 2))
    largest_GX1 = scores_GXK.amax(-1, keepdim=True)
    largest_GX1 = largest_GX1.masked_fill_(largest_GX1 == -torch.inf, 0.0)
    total_GX1 = scores_GXK.sub_(largest_GX1).exp_().sum(-1, keepdim=True)
    out_GXD = torch.bmm(scores_GXK, v_GKD).div_(total_GX1.masked_fill(total_GX1 == 0.0, 1.0))
    lse_GX1 = total_GX1.log_().add_(largest_GX1)
    unfolded = (num_kv_heads, num_rows, num_heads // num_kv_heads)
    return (
        out_GXD.view(*unfolded, head_dim).transpose(0, 1).reshape(num_rows, num_heads, head_dim),
        lse_GX1.view(unfolded).transpose(0, 1).reshape(num_rows, num_heads),
    )


@impl(head_logsumexp, provider="torch", device="cpu", accepts=_accepts)
def head_logsumexp_in_place(
    hidden_NM: torch.Tensor, weight_VM: torch.Tensor, scale: float
) -> torch.Tensor:
    """The reference's running maximum and sum over smaller tiles, exponentiated in one reused buffer."""
    hidden_fp32_NM = hidden_NM.float() * scale
    largest_N1 = hidden_fp32_NM.new_full((hidden_NM.shape[0], 1), -torch.inf)
    total_N1 = torch.zeros_like(largest_N1)
    buffer = hidden_fp32_NM.new_empty(hidden_NM.shape[0] * _HEAD_TILE_ROWS)
    for first in range(0, weight_VM.shape[0], _HEAD_TILE_ROWS):
        weight_CM = weight_VM[first : first + _HEAD_TILE_ROWS].float()
        shape = (hidden_NM.shape[0], weight_CM.shape[0])
        logits_NC = buffer[: shape[0] * shape[1]].view(shape)
        torch.mm(hidden_fp32_NM, weight_CM.T, out=logits_NC)
        new_largest_N1 = torch.maximum(largest_N1, logits_NC.amax(-1, keepdim=True))
        finite_N1 = new_largest_N1.masked_fill(new_largest_N1.isinf(), 0.0)
        total_N1 *= (largest_N1 - finite_N1).exp_()
        total_N1 += logits_NC.sub_(finite_N1).exp_().sum(-1, keepdim=True)
        largest_N1 = new_largest_N1
    finite_N1 = largest_N1.masked_fill(largest_N1.isinf(), 0.0)
    return (finite_N1 + total_N1.log_()).squeeze(-1)
