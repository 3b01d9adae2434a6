"""Writing keys and values, copying the beginnings of pages, and moving beams' own keys and values to their children, in place.

Reorder: rows map to slots. The first child of a parent keeps the parent's slot, further children take slots of the
same search that no child reads from. Hence no slot is both read and written (a kept slot is only ever rewritten with
its own content), whatever the parents are, and the copies can go tile by tile in any order through a small scratch.
About a third of the rows move in practice; a second buffer is never needed.

X layers times two (K and V), N rows, S searches, T packed tokens, G KV heads, D head dim, P pages, R rounds.
"""

import torch

from xgr_runtime.hal.registry import op


@op
def write_shared_kv(
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_T: torch.Tensor,
) -> None:
    """Store the keys and values of packed tokens in pages.

    Args:
        k_TGD: [T, G, D]; may be a view with another stride over tokens.
        v_TGD: likewise.
        k_pages: [P, page_size, G, D], contiguous, dtype of k_TGD; MUTATED.
        v_pages: like k_pages; MUTATED.
        slot_T: int64 [T], page * page_size + offset; padding tokens name slots of page 0, the null page. Otherwise
            distinct.
    """
    k_pages.flatten(0, 1).index_copy_(0, slot_T, k_TGD)
    v_pages.flatten(0, 1).index_copy_(0, slot_T, v_TGD)


@op
def copy_page_starts(
    kv_pages: torch.Tensor,
    source_H: torch.Tensor,
    target_H: torch.Tensor,
    num_tokens_H: torch.Tensor,
) -> None:
    """Copy the first tokens of a page to another page for each history, in all layers.

    Args:
        kv_pages: [X, P, page_size, G, D], contiguous, all layers, K and V stacked; MUTATED in place.
        source_H: int32 [H], the page that is read, nobody's target.
        target_H: int32 [H], the page that is written; distinct where something is copied.
        num_tokens_H: int32 [H], in [0, page_size]; 0: nothing is copied, and the pages are page 0, the null page.
    """
    page_size = kv_pages.shape[2]
    token_P = torch.arange(page_size, device=kv_pages.device)
    is_copied_HP = token_P < num_tokens_H.unsqueeze(1)
    # Whatever is not copied stays: it is written with its own content, in the null page.
    from_T = (source_H.long().unsqueeze(1) * page_size + token_P).where(is_copied_HP, token_P)
    to_T = (target_H.long().unsqueeze(1) * page_size + token_P).where(is_copied_HP, token_P)
    for pages in kv_pages.flatten(
        1, 2
    ):  # a layer at a time: all of them would need as much memory again
        pages.index_copy_(0, to_T.flatten(), pages.index_select(0, from_T.flatten()))


@op
def write_unshared_kv(
    k_NGD: torch.Tensor,
    v_NGD: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    position: int,
) -> None:
    """Store the keys and values of one token per beam row at `position` of its slot.

    Args:
        k_NGD: [N, G, D]; may be a view with another stride over rows.
        v_NGD: likewise.
        k_rows: [slots, R - 1, G, D], dtype of k_NGD; MUTATED.
        v_rows: like k_rows; MUTATED.
        slot_N: int32 [N]; padding rows name the dummy slot. Otherwise distinct.
        position: in [0, R - 1).
    """
    slot_N = slot_N.long()
    k_rows[:, position].index_copy_(0, slot_N, k_NGD)
    v_rows[:, position].index_copy_(0, slot_N, v_NGD)


@op
def reorder_unshared_kv(
    kv_rows: torch.Tensor,
    parents_N: torch.Tensor,
    slot_in_N: torch.Tensor,
    search_of_row_N: torch.Tensor,
    slot_start_S1: torch.Tensor,
    num_tokens: int,
    slot_out_N: torch.Tensor,
    tile: torch.Tensor,
) -> None:
    """Give every child row a slot that holds its parent's first `num_tokens` keys and values.

    Afterwards kv_rows[:, slot_out[n], :num_tokens] equals, bit for bit, what
    kv_rows[:, slot_in[parents[n]], :num_tokens] was before, for any multiset of parents inside a search. The numbers
    of parent rows (length of slot_in_N) and of child rows (the other _N tensors) may differ.

    Args:
        kv_rows: [X, slots, R - 1, G, D], all layers, K and V stacked; the last slot is the dummy; MUTATED in place.
        parents_N: int32 [children], packed parent row of each child row, a row of the same search. Ignored for padding.
        slot_in_N: int32 [parents], the slot of each parent row, distinct inside the ranges of slot_start_S1.
        search_of_row_N: int32 [children], search of each child row, not decreasing; S for padding rows.
        slot_start_S1: int32 [S + 1]; search s owns slots slot_start[s] .. slot_start[s + 1], at least as many as it
            has children.
        num_tokens: own tokens to keep, in [1, R - 1].
        slot_out_N: int32 [children], WRITTEN: the slot of each child, distinct; padding rows get the dummy. May be
            the memory of slot_in_N.
        tile: [X, tile_rows, R - 1, G, D], dtype of kv_rows, contiguous scratch; content lost.

    No memory of the size of kv_rows is allocated.
    """
    src_N, dst_N = plan_reorder(
        parents_N, slot_in_N, search_of_row_N, slot_start_S1, kv_rows.shape[1]
    )
    move_slots(kv_rows, src_N, dst_N, num_tokens, tile)
    slot_out_N.copy_(dst_N)


def plan_reorder(
    parents_N: torch.Tensor,
    slot_in_N: torch.Tensor,
    search_of_row_N: torch.Tensor,
    slot_start_S1: torch.Tensor,
    num_slots: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(source slot, destination slot) int64 [children] of each child row; equal where nothing moves."""
    num_children, num_searches = parents_N.shape[0], slot_start_S1.shape[0] - 1
    search_N = search_of_row_N.long()
    is_padding_N = search_N >= num_searches
    row_N = torch.arange(num_children, device=parents_N.device)
    src_N = slot_in_N.long()[parents_N.long().masked_fill(is_padding_N, 0)]
    src_N = src_N.masked_fill(is_padding_N, num_slots - 1)

    first_child = row_N.new_full((num_slots,), num_children).scatter_reduce_(
        0, src_N, row_N, "amin"
    )
    is_moving_N = (first_child[src_N] != row_N) & ~is_padding_N
    is_free = first_child == num_children
    # The k-th moving child of a search takes the k-th free slot of that search's range.
    free_before = is_free.cumsum(0) - is_free.long()
    free_slots = row_N.new_full((num_slots + 1,), num_slots - 1).scatter_(
        0,
        free_before.masked_fill(~is_free, num_slots),
        torch.arange(num_slots, device=row_N.device),
    )
    num_moving_S1 = row_N.new_zeros((num_searches + 1,)).scatter_add_(
        0, search_N, is_moving_N.long()
    )
    moving_before_S1 = num_moving_S1.cumsum(0) - num_moving_S1
    rank_N = is_moving_N.cumsum(0) - 1 - moving_before_S1[search_N]
    target_N = free_before[slot_start_S1.long()[search_N].clamp(max=num_slots - 1)] + rank_N
    dst_N = torch.where(is_moving_N, free_slots[target_N.clamp(0, num_slots)], src_N)
    return src_N, dst_N


def move_slots(
    kv_rows: torch.Tensor,
    src_N: torch.Tensor,
    dst_N: torch.Tensor,
    num_tokens: int,
    tile: torch.Tensor,
) -> None:
    """Copy slots src_N (int64) to dst_N, tile by tile; no slot may be a source and another row's destination.

    Layers and slots are one flat dim: selecting along an inner dim of a part of the tokens copies that whole part
    first (seen on the CPU).
    """
    num_layers, num_slots = kv_rows.shape[:2]
    used_XE = kv_rows.flatten(0, 1).flatten(1)[:, : num_tokens * kv_rows[0, 0, 0].numel()]
    layer_X1 = torch.arange(num_layers, device=kv_rows.device).unsqueeze(1) * num_slots
    tile_rows = tile.shape[1]
    for first in range(0, src_N.shape[0], tile_rows):
        src_R, dst_R = src_N[first : first + tile_rows], dst_N[first : first + tile_rows]
        shape = (num_layers * src_R.shape[0], used_XE.shape[1])
        scratch_XE = tile.flatten()[: shape[0] * shape[1]].view(shape)
        torch.index_select(used_XE, 0, (layer_X1 + src_R).flatten(), out=scratch_XE)
        used_XE.index_copy_(0, (layer_X1 + dst_R).flatten(), scratch_XE)
