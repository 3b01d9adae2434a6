"""Attention in float32 from matrix products and masks, for the dtype the fused op does not have.

Half precision is refused: there a wrong page size or head dim is to be named, not served at a fraction of the speed.
The shared and the own stage have the bucket's shapes and read nothing by the host, so they may be captured; prefill
follows the host's lengths. Query rows go in tiles, which bounds the scores held at once. Not run on hardware.

B batch entries, H histories, N packed beam rows, T packed tokens, R query rows of one entry, K keys, Q query heads,
G KV heads, X = Q / G, D head dim.
"""

import torch

from xgr_runtime.hal.ops.attention import (
    merge_attention_states,
    prefill_attention,
    shared_attention,
    unshared_attention,
)
from xgr_runtime.hal.registry import OpSpec, impl

from .attention import own_tokens
from .packed_rows import padding_refusal, places_of_rows, rows_of_places

_SCORES_PER_TILE = 1 << 24


def _accepts(spec: OpSpec) -> str | None:
    if spec.dtype == torch.float32:
        return None
    return f"takes torch.float32, got {spec.dtype}; half precision is the fused ops' part"


def _accepts_shared(spec: OpSpec) -> str | None:
    return _accepts(spec) or padding_refusal(spec)


def _tile_rows(num_scores_of_a_row: int) -> int:
    return max(1, _SCORES_PER_TILE // num_scores_of_a_row)


def _attend(
    q_BRQD: torch.Tensor,
    k_BKGD: torch.Tensor,
    v_BKGD: torch.Tensor,
    is_masked_BRK: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, R, Q, D], lse [B, R, Q]); is_masked broadcasts. A row without a key is NaN."""
    num_entries, num_rows, num_heads, head_dim = q_BRQD.shape
    num_kv_heads = k_BKGD.shape[2]
    q_BGrD = q_BRQD.reshape(num_entries, num_rows, num_kv_heads, -1, head_dim).transpose(1, 2)
    q_BGrD = q_BGrD.reshape(num_entries, num_kv_heads, -1, head_dim)
    scores = torch.matmul(q_BGrD, k_BKGD.permute(0, 2, 3, 1)) * scale
    if is_masked_BRK is not None:
        grouped = scores.view(num_entries, num_kv_heads, num_rows, -1, scores.shape[-1])
        scores = grouped.masked_fill(is_masked_BRK[:, None, :, None], -torch.inf).view_as(scores)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights, v_BKGD.transpose(1, 2)) / total
    lse = total.log() + largest
    unfolded = (num_entries, num_kv_heads, num_rows, num_heads // num_kv_heads, -1)
    out_BRQD = out.view(unfolded).transpose(1, 2).reshape(q_BRQD.shape)
    return out_BRQD, lse.view(unfolded).transpose(1, 2).reshape(num_entries, num_rows, num_heads)


@impl(prefill_attention, provider="aten", device="npu", accepts=_accepts)
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
    """Exact lengths, from the host: for eager segments only."""
    out_TQD = torch.zeros_like(q_TQD)
    for h, num_kv in enumerate(kv_lens):
        num_new = q_starts[h + 1] - q_starts[h]
        if num_kv == 0 or num_new == 0:
            continue
        table_P = page_table_HP[h, : -(-num_kv // k_pages.shape[1])]
        k_1KGD = k_pages.index_select(0, table_P).flatten(0, 1)[:num_kv].unsqueeze(0)
        v_1KGD = v_pages.index_select(0, table_P).flatten(0, 1)[:num_kv].unsqueeze(0)
        key_K = torch.arange(num_kv, dtype=torch.int32, device=q_TQD.device)
        tile = _tile_rows(q_TQD.shape[1] * num_kv)
        for first in range(0, num_new, tile):
            last = min(first + tile, num_new)
            rows = slice(q_starts[h] + first, q_starts[h] + last)
            past = num_kv - num_new
            sees_R = torch.arange(past + first, past + last, dtype=torch.int32, device=q_TQD.device)
            is_masked_1RK = (key_K > sees_R.unsqueeze(1)).unsqueeze(0)
            out_1RQD, _ = _attend(q_TQD[rows].unsqueeze(0), k_1KGD, v_1KGD, is_masked_1RK, scale)
            out_TQD[rows] = out_1RQD.squeeze(0)
    return out_TQD


@impl(shared_attention, provider="aten", device="npu", accepts=_accepts_shared)
def shared_as_rectangle(
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
    """All histories at once, each padded to max_rows rows and whole pages; lengths from the device."""
    num_rows, num_heads = q_NQD.shape[:2]
    num_histories, page_size = kv_len_H.shape[0], k_pages.shape[1]
    table_HP = page_table_HP[:, : -(-max_kv // page_size)]
    num_keys = table_HP.shape[1] * page_size
    key_K = torch.arange(num_keys, dtype=torch.int32, device=q_NQD.device)
    is_masked_HK = key_K >= kv_len_H.unsqueeze(1)
    table_HP = table_HP.masked_fill(is_masked_HK[:, ::page_size], 0)
    k_HKGD = _gather_pages(k_pages, table_HP, is_masked_HK)
    v_HKGD = _gather_pages(v_pages, table_HP, is_masked_HK)
    from_N = rows_of_places(row_start_H1, num_rows, max_rows)
    q_HRQD = q_NQD.index_select(0, from_N).view(num_histories, max_rows, num_heads, -1)
    tile = _tile_rows(num_histories * num_heads * num_keys)
    tiles = [
        _attend(tile_HRQD, k_HKGD, v_HKGD, is_masked_HK.unsqueeze(1), scale)
        for tile_HRQD in torch.split(q_HRQD, tile, dim=1)
    ]
    out_HRQD = torch.cat([out for out, _ in tiles], dim=1)
    lse_HRQ = torch.cat([lse for _, lse in tiles], dim=1)
    place_N, is_live_N = places_of_rows(row_start_H1, kv_len_H, num_rows, max_rows)
    is_dead_N1 = is_live_N.logical_not().unsqueeze(1)
    out_NQD = out_HRQD.flatten(0, 1).index_select(0, place_N)
    lse_NQ = lse_HRQ.flatten(0, 1).index_select(0, place_N)
    return (
        out_NQD.masked_fill(is_dead_N1.unsqueeze(2), 0.0),
        lse_NQ.masked_fill(is_dead_N1, -torch.inf),
    )


def _gather_pages(
    pages: torch.Tensor, table_HP: torch.Tensor, is_masked_HK: torch.Tensor
) -> torch.Tensor:
    """[H, K, G, D], zero where masked: an unused page may hold anything, NaN included."""
    rows = pages.index_select(0, table_HP.flatten())
    rows_HKGD = rows.view(*is_masked_HK.shape, *pages.shape[2:])
    return rows_HKGD.masked_fill(is_masked_HK[:, :, None, None], 0.0)


@impl(unshared_attention, provider="aten", device="npu", accepts=_accepts)
def unshared_as_batch(
    q_NQD: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    num_tokens: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every beam row is a batch entry with num_tokens keys."""
    k_NKGD, v_NKGD = own_tokens(k_rows, slot_N, num_tokens), own_tokens(v_rows, slot_N, num_tokens)
    out_N1QD, lse_N1Q = _attend(q_NQD.unsqueeze(1), k_NKGD, v_NKGD, None, scale)
    return out_N1QD.squeeze(1), lse_N1Q.squeeze(1)


@impl(merge_attention_states, provider="aten", device="npu", accepts=_accepts)
def merge_by_weights(
    out_a_NQD: torch.Tensor, lse_a_NQ: torch.Tensor, out_b_NQD: torch.Tensor, lse_b_NQ: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights relative to the larger side; an empty side weighs exactly 0 and is not looked at."""
    largest_NQ = torch.maximum(lse_a_NQ, lse_b_NQ)
    largest_NQ = largest_NQ.masked_fill(largest_NQ == -torch.inf, 0.0)
    parts = []
    for out_NQD, lse_NQ in ((out_a_NQD, lse_a_NQ), (out_b_NQD, lse_b_NQ)):
        is_empty_NQ1 = (lse_NQ == -torch.inf).unsqueeze(2)
        parts.append((out_NQD.masked_fill(is_empty_NQ1, 0.0), (lse_NQ - largest_NQ).exp()))
    (a_NQD, weight_a_NQ), (b_NQD, weight_b_NQ) = parts
    total_NQ = weight_a_NQ + weight_b_NQ
    share_NQ = total_NQ.masked_fill(total_NQ == 0.0, 1.0)
    merged_NQD = a_NQD * (weight_a_NQ / share_NQ).unsqueeze(2)
    return merged_NQD + b_NQD * (weight_b_NQ / share_NQ).unsqueeze(2), largest_NQ + total_NQ.log()
