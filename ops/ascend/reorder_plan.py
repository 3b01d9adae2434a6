"""Where each child row's keys and values come from and go to: the plan of a reorder, whoever copies. Not run on hardware.

It is the reference's, without its scatter_reduce (whose amin falls back to the host): a stable sort puts children of one
parent next to each other, in their order, and whoever has the same slot before it has to move. int32 throughout, sorted
as fp32.

N child rows, L slots, S searches.
"""

import torch

from .limits import EXACT_IN_FP32


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
