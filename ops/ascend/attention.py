"""Attention from torch_npu's fused ops: the history and the own tokens by fused inference attention, their merge.

The fused op takes the lengths of the keys from the host. Prefill runs eagerly and calls it once a history, on the rows
where they lie. The shared stage is one call for all histories inside a captured graph: the device updates the recorded
lengths before a replay, and nothing else here depends on a length of the host. What the op leaves unspecified (padding,
empty histories) is replaced on the device. Not run on hardware.

H histories, N packed beam rows, T packed tokens, Q query heads, G KV heads, D head dim.
"""

from collections.abc import Iterator

import torch

from xgr_runtime.hal.ops.attention import (
    merge_attention_states,
    prefill_attention,
    shared_attention,
    unshared_attention,
)
from xgr_runtime.hal.registry import OpSpec, impl

from .fused_infer import (
    MASK_SIZE,
    MAX_BATCH,
    attend_dense,
    attend_pages,
    fused_infer_refusal,
    num_pages_of,
    soc_refusal,
)
from .packed_rows import padding_refusal, places_of_rows, rows_of_places

_MERGE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MERGE_WITH_LSE = 1


def _accepts_paged(spec: OpSpec) -> str | None:
    return fused_infer_refusal(spec, is_paged=True)


def _accepts_shared(spec: OpSpec) -> str | None:
    return _accepts_paged(spec) or padding_refusal(spec)


def _accepts_own(spec: OpSpec) -> str | None:
    num_rows = spec.dims.get("N", 0)
    if num_rows > MAX_BATCH:
        return (
            f"{num_rows} rows: the fused op takes up to {MAX_BATCH}; lower scheduler.max_batch_rows"
        )
    return fused_infer_refusal(spec, is_paged=False)


def _accepts_merge(spec: OpSpec) -> str | None:
    """Of the head dim: CANN's description of AttentionUpdate, which torch_npu calls."""
    if spec.dtype not in _MERGE_DTYPES:
        return f"takes {', '.join(str(dtype) for dtype in _MERGE_DTYPES)}, got {spec.dtype}"
    dim = spec.dims.get("D", 8)
    if dim % 8 or not 8 <= dim <= 512:
        return f"head dim {dim}: the update op needs a multiple of 8 up to 512; model.dtype: float32 is served without it"
    return soc_refusal(spec)


def causal_mask(device: torch.device) -> torch.Tensor:
    """bool [2048, 2048], true above the diagonal: the form the fused op expects (4 MiB).

    Made on the current stream by each prefill that needs one, and not kept: two engines of a process have two streams, and
    nothing would order the one's use behind the other's making.
    """
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)


def _calls(
    q_starts: tuple[int, ...], kv_lens: tuple[int, ...], page_size: int, num_pages: int
) -> Iterator[range]:
    """Histories of each call: one with several rows alone, neighbours of one row together while their pages are allowed."""
    run, num_used = range(0), 0
    for h, need in enumerate(num_pages_of(kv_lens, page_size)):
        num_rows = q_starts[h + 1] - q_starts[h] if kv_lens[h] else 0
        is_single = num_rows == 1
        if run and is_single and num_used + need <= num_pages:
            run, num_used = range(run.start, h + 1), num_used + need
            continue
        if run:
            yield run
        run, num_used = (range(h, h + 1), need) if is_single else (range(0), 0)
        if num_rows > 1:
            yield range(h, h + 1)
    if run:
        yield run


@impl(prefill_attention, provider="torch_npu", device="npu", accepts=_accepts_paged)
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
    """Sizes and launches follow the host's lengths: for eager segments only.

    A single query row takes the fused op's other branch, where masks mean nothing: it sees all keys, as it should.
    """
    num_pages, page_size = k_pages.shape[:2]
    out_TQD = torch.zeros_like(q_TQD)
    mask: torch.Tensor | None = None
    for histories in _calls(q_starts, kv_lens, page_size, num_pages):
        rows = slice(q_starts[histories.start], q_starts[histories.stop])
        lens = kv_lens[histories.start : histories.stop]
        q_BSQD = q_TQD[rows].view(len(histories), -1, *q_TQD.shape[1:])
        is_causal = q_BSQD.shape[1] > 1
        if is_causal and mask is None:
            mask = causal_mask(q_TQD.device)
        num_used = max(num_pages_of(lens, page_size))
        out_BSQD, _ = attend_pages(
            q_BSQD,
            k_pages,
            v_pages,
            page_table_HP[histories.start : histories.stop, :num_used],
            lens,
            scale,
            mask=mask if is_causal else None,
        )
        out_TQD[rows] = out_BSQD.flatten(0, 1)
    return out_TQD


@impl(shared_attention, provider="torch_npu", device="npu", accepts=_accepts_shared)
def shared_in_one_call(
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
    """Beams lie along the query's sequence, so that a history's keys are read once for all of them; no mask."""
    num_rows, num_heads, head_dim = q_NQD.shape
    num_histories = kv_len_H.shape[0]
    from_N = rows_of_places(row_start_H1, num_rows, max_rows)
    q_HRQD = q_NQD.index_select(0, from_N).view(num_histories, max_rows, num_heads, head_dim)
    out_HRQD, lse_HQR1 = attend_pages(
        q_HRQD, k_pages, v_pages, page_table_HP, kv_lens, scale, has_lse=True
    )
    place_N, is_live_N = places_of_rows(row_start_H1, kv_len_H, num_rows, max_rows)
    is_dead_N1 = is_live_N.logical_not().unsqueeze(1)
    out_NQD = out_HRQD.flatten(0, 1).index_select(0, place_N)
    lse_NQ = lse_HQR1.squeeze(-1).transpose(1, 2).flatten(0, 1).index_select(0, place_N)
    return (
        out_NQD.masked_fill(is_dead_N1.unsqueeze(2), 0.0),
        lse_NQ.masked_fill(is_dead_N1, -torch.inf),
    )


@impl(unshared_attention, provider="torch_npu", device="npu", accepts=_accepts_own)
def unshared_as_batch(
    q_NQD: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    num_tokens: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every beam row is a batch entry with num_tokens keys, gathered out of its slot."""
    k_NKGD, v_NKGD = own_tokens(k_rows, slot_N, num_tokens), own_tokens(v_rows, slot_N, num_tokens)
    out_N1QD, lse_NQ11 = attend_dense(q_NQD.contiguous().unsqueeze(1), k_NKGD, v_NKGD, scale)
    return out_N1QD.squeeze(1), lse_NQ11.flatten(1)


def own_tokens(rows: torch.Tensor, slot_N: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[N, num_tokens, G, D] of [slots, R - 1, G, D]: only the tokens wanted are read."""
    max_tokens = rows.shape[1]
    token_K = torch.arange(num_tokens, dtype=torch.int32, device=rows.device)
    from_NK = slot_N.unsqueeze(1) * max_tokens + token_K
    tokens = rows.flatten(0, 1).index_select(0, from_NK.flatten())
    return tokens.view(slot_N.shape[0], num_tokens, *rows.shape[2:])


@impl(merge_attention_states, provider="torch_npu", device="npu", accepts=_accepts_merge)
def merge_by_update(
    out_a_NQD: torch.Tensor, lse_a_NQ: torch.Tensor, out_b_NQD: torch.Tensor, lse_b_NQ: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a side is empty the update op's formula has -inf minus -inf or worse: its result is not looked at there."""
    is_a_empty_NQ, is_b_empty_NQ = lse_a_NQ == -torch.inf, lse_b_NQ == -torch.inf
    is_none_NQ = is_a_empty_NQ & is_b_empty_NQ
    lses = [lse_a_NQ.contiguous().flatten(), lse_b_NQ.contiguous().flatten()]
    outs = [out_a_NQD.contiguous().flatten(0, 1), out_b_NQD.contiguous().flatten(0, 1)]
    out, lse_out = torch.ops.npu.npu_attention_update(lses, outs, _MERGE_WITH_LSE)
    out_NQD = torch.where(is_a_empty_NQ.unsqueeze(2), out_b_NQD, out.view_as(out_a_NQD))
    out_NQD = torch.where(is_b_empty_NQ.unsqueeze(2), out_a_NQD, out_NQD)
    lse_NQ = torch.where(is_a_empty_NQ, lse_b_NQ, lse_out.view_as(lse_a_NQ))
    lse_NQ = torch.where(is_b_empty_NQ, lse_a_NQ, lse_NQ)
    return out_NQD.masked_fill(is_none_NQ.unsqueeze(2), 0.0), lse_NQ
