"""Writing and moving keys and values: npu_scatter_nd_update_ on contiguous memory seen as rows. Not run on hardware.

Views with gaps are avoided where something is written: an op on such a view may copy all of it there and back, and a
part of the tokens of every slot is such a view. Rows of one token are contiguous whatever the number of tokens.

X layers times two (K and V), N rows, L slots, S searches, T packed tokens, G KV heads, D head dim, E elements of a
token's row, I rows of a tile.
"""

import torch

from xgr_runtime.hal.ops.cache import (
    copy_page_starts,
    reorder_unshared_kv,
    write_shared_kv,
    write_unshared_kv,
)
from xgr_runtime.hal.registry import OpSpec, impl

from .limits import EXACT_IN_FP32, refuse_dtype, refuse_size, refuse_soc
from .reorder_plan import plan_moves

_COPY_BYTES = 1 << 26  # of keys and values that a copy of pages holds at a time


def _accepts_writes(spec: OpSpec) -> str | None:
    reason = refuse_dtype(spec, "npu_scatter_nd_update_")
    if reason is None and spec.dtype == torch.bfloat16:
        reason = refuse_soc(spec, "npu_scatter_nd_update_ takes bfloat16 on Atlas A2 and A3")
    return reason


def _accepts_reorder(spec: OpSpec) -> str | None:
    return (
        refuse_dtype(spec, "npu_scatter_nd_update_")
        or refuse_soc(spec, "sort in fp32 and scatter are documented for Atlas A2 and A3")
        or refuse_size(spec, "N", EXACT_IN_FP32, "slots are sorted in fp32")
    )


@impl(write_shared_kv, provider="torch_npu", device="npu", accepts=_accepts_writes)
def write_shared_kv_npu(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_T: torch.Tensor,
) -> None:
    """Pages are rows of one token; which padding token stays in the null page is not defined, nor needed."""
    slot_T1 = slot_T.unsqueeze(1)
    for pages, rows_TGD in ((k_pages, k_TGD), (v_pages, v_TGD)):
        torch.ops.npu.npu_scatter_nd_update_(pages.view(-1, *pages.shape[2:]), slot_T1, rows_TGD)


@impl(copy_page_starts, provider="torch_npu", device="npu", accepts=_accepts_writes)
def copy_page_starts_npu(
    kv_pages: torch.Tensor,
    source_H: torch.Tensor,
    target_H: torch.Tensor,
    num_tokens_H: torch.Tensor,
) -> None:
    """As many layers at a time as the scratch holds; what is not copied writes the null page with its own content."""
    num_layers, num_pages, page_size = kv_pages.shape[:3]
    layer_rows = num_pages * page_size
    assert num_layers * layer_rows < 1 << 31, "rows are counted in int32"
    rows_E = kv_pages.view(num_layers * layer_rows, -1)
    token_P = torch.arange(page_size, dtype=torch.int32, device=kv_pages.device)
    is_copied_HP = token_P < num_tokens_H.unsqueeze(1)
    from_M = torch.where(is_copied_HP, source_H.unsqueeze(1) * page_size + token_P, token_P)
    to_M = torch.where(is_copied_HP, target_H.unsqueeze(1) * page_size + token_P, token_P)
    layer_X1 = torch.arange(num_layers, dtype=torch.int32, device=kv_pages.device).unsqueeze(1)
    layer_X1 = layer_X1 * layer_rows
    step = max(1, _COPY_BYTES // max(1, from_M.numel() * rows_E[0].nbytes))
    for first in range(0, num_layers, step):
        layers_I1 = layer_X1[first : first + step]
        kept_IE = torch.index_select(rows_E, 0, (layers_I1 + from_M.flatten()).flatten())
        to_I1 = (layers_I1 + to_M.flatten()).view(-1, 1)
        torch.ops.npu.npu_scatter_nd_update_(rows_E, to_I1, kept_IE)


@impl(write_unshared_kv, provider="torch_npu", device="npu", accepts=_accepts_writes)
def write_unshared_kv_npu(
    k_NGD: torch.Tensor,
    v_NGD: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    position: int,
) -> None:
    """Token `position` of slot s is row s * (R - 1) + position."""
    row_N1 = (slot_N * k_rows.shape[1] + position).unsqueeze(1)
    for cache, rows_NGD in ((k_rows, k_NGD), (v_rows, v_NGD)):
        torch.ops.npu.npu_scatter_nd_update_(cache.view(-1, *cache.shape[2:]), row_N1, rows_NGD)


@impl(reorder_unshared_kv, provider="torch_npu", device="npu", accepts=_accepts_reorder)
def reorder_unshared_kv_npu(
    kv_rows: torch.Tensor,
    parents_N: torch.Tensor,
    slot_in_N: torch.Tensor,
    search_of_row_N: torch.Tensor,
    slot_start_S1: torch.Tensor,
    num_tokens: int,
    slot_out_N: torch.Tensor,
    tile: torch.Tensor,
) -> None:
    """Plan, then copy every row, tile by tile through the scratch: shapes are fixed, a row that stays is copied onto itself."""
    src_N, dst_N = plan_moves(
        parents_N, slot_in_N, search_of_row_N, slot_start_S1, kv_rows.shape[1]
    )
    _move(kv_rows, src_N, dst_N, num_tokens, tile)
    slot_out_N.copy_(dst_N)


def _move(
    kv_rows: torch.Tensor,
    src_N: torch.Tensor,
    dst_N: torch.Tensor,
    num_tokens: int,
    tile: torch.Tensor,
) -> None:
    """Copy the first tokens of slots src_N to dst_N; no slot may be a source and another row's destination."""
    num_layers, num_slots, max_tokens = kv_rows.shape[:3]
    layer_rows = num_slots * max_tokens
    assert num_layers * layer_rows < 1 << 31, "rows are counted in int32"
    rows_E = kv_rows.view(num_layers * layer_rows, -1)
    token_T = torch.arange(num_tokens, dtype=torch.int32, device=kv_rows.device)
    layer_X1 = torch.arange(num_layers, dtype=torch.int32, device=kv_rows.device).unsqueeze(1)
    layer_X1 = layer_X1 * layer_rows
    from_M = (src_N.unsqueeze(1) * max_tokens + token_T).flatten()
    to_M = (dst_N.unsqueeze(1) * max_tokens + token_T).flatten()
    step = tile.shape[1] * num_tokens
    for first in range(0, from_M.shape[0], step):
        from_I = (layer_X1 + from_M[first : first + step]).flatten()
        to_I1 = (layer_X1 + to_M[first : first + step]).view(-1, 1)
        scratch_IE = tile.view(-1)[: from_I.shape[0] * rows_E.shape[1]].view(from_I.shape[0], -1)
        torch.index_select(rows_E, 0, from_I, out=scratch_IE)
        torch.ops.npu.npu_scatter_nd_update_(rows_E, to_I1, scratch_IE)
