"""Writing and moving keys and values: npu_scatter_nd_update_ on contiguous memory seen as rows. Not run on hardware.

Views with gaps are avoided where something is written: an op on such a view may copy all of it there and back, and a
part of the tokens of every slot is such a view. Rows of one token are contiguous whatever the number of tokens.

The plan of a reorder is the reference's, without its scatter_reduce (whose amin falls back to the host): a stable sort
puts children of one parent next to each other, in their order, and whoever has the same slot before it has to move.
int32 throughout, sorted as fp32.

X layers times two (K and V), N rows, L slots, S searches, T packed tokens, G KV heads, D head dim, E elements of a
token's row, I rows of a tile.
"""

import torch

from xgr_runtime.hal.ops.cache import reorder_unshared_kv, write_shared_kv, write_unshared_kv
from xgr_runtime.hal.registry import OpSpec, impl

from .limits import EXACT_IN_FP32, refuse_dtype, refuse_size, refuse_soc


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


def plan_moves(
    parents_N: torch.Tensor,
    slot_in_N: torch.Tensor,
    search_of_row_N: torch.Tensor,
    slot_start_S1: torch.Tensor,
    num_slots: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(source slot, destination slot) int32 [children] of each child row; equal where nothing moves."""
    assert num_slots < EXACT_IN_FP32, "slots are sorted in fp32"
    num_searches, dummy = slot_start_S1.shape[0] - 1, num_slots - 1
    is_padding_N = search_of_row_N >= num_searches
    src_N = slot_in_N.index_select(0, parents_N.masked_fill(is_padding_N, 0))
    src_N.masked_fill_(is_padding_N, dummy)
    moving_N = _later_children(src_N).masked_fill_(is_padding_N, 0)

    free_L = torch.ones(num_slots, dtype=torch.int32, device=src_N.device)
    free_L.scatter_(0, src_N.long(), 0)
    free_before_L = free_L.cumsum(0, dtype=torch.int32) - free_L
    # free_slots[k] is the k-th free slot of all; slots in use end up in the place behind the last.
    place_L = free_before_L.masked_fill(free_L == 0, num_slots).long()
    slot_L = torch.arange(num_slots, dtype=torch.int32, device=src_N.device)
    free_slots = src_N.new_full((num_slots + 1,), dummy).scatter_(0, place_L, slot_L)

    # The k-th moving child of a search takes the k-th free slot of that search's range.
    num_moving_S1 = src_N.new_zeros(num_searches + 1).index_add(0, search_of_row_N, moving_N)
    moving_before_S1 = num_moving_S1.cumsum(0, dtype=torch.int32) - num_moving_S1
    first_free_S1 = free_before_L.index_select(0, slot_start_S1.clamp(max=dummy))
    offset_N = (first_free_S1 - moving_before_S1).index_select(0, search_of_row_N)
    place_N = offset_N + moving_N.cumsum(0, dtype=torch.int32) - 1
    target_N = free_slots.index_select(0, place_N.clamp_(0, num_slots))
    return src_N, torch.where(moving_N > 0, target_N, src_N)


def _later_children(src_N: torch.Tensor) -> torch.Tensor:
    """int32 [N]: 1 where an earlier row has the same source slot, else 0; new memory."""
    later_N = torch.zeros_like(src_N)
    if src_N.shape[0] < 2:
        return later_N
    sorted_N, order_N = torch.sort(src_N.float(), stable=True)
    is_repeated = (sorted_N[1:] == sorted_N[:-1]).to(src_N.dtype)
    return later_N.scatter_(0, order_N[1:], is_repeated)


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
