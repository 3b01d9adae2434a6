"""Launcher of the plan of a reorder.

N child rows, S searches.
"""

import torch

from .launch import LaunchRules, next_power_of_two
from .reorder_kernels import plan_reorder_kernel

LARGEST_TILE = 1024


def launch_plan_reorder(
    parents_N: torch.Tensor,
    slot_in_N: torch.Tensor,
    search_of_row_N: torch.Tensor,
    slot_start_S1: torch.Tensor,
    num_slots: int,
    rules: LaunchRules,
    dst_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(source slot, destination slot) int32 [N] of each child row; equal where nothing moves.

    Arguments as in `xgr_runtime.hal.ops.cache.reorder_unshared_kv`; rules: of the device. dst_N: where the destinations shall be
    written, contiguous, memory of no other argument.
    """
    num_children, num_searches = parents_N.shape[0], slot_start_S1.shape[0] - 1
    device = parents_N.device
    src_N = torch.empty(num_children, dtype=torch.int32, device=device)
    if dst_N is None:
        dst_N = torch.empty_like(src_N)
    first_child, free = torch.empty((2, num_slots), dtype=torch.int32, device=device)
    plan_reorder_kernel[(num_searches + 1,)](
        parents_N,
        slot_in_N,
        search_of_row_N,
        slot_start_S1,
        src_N,
        dst_N,
        first_child,
        free,
        num_children,
        num_searches,
        num_slots,
        TILE=min(LARGEST_TILE, next_power_of_two(max(1, num_children))),
        **rules.options,
    )
    return src_N, dst_N
