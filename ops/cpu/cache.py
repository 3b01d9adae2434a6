"""The reorder on the CPU: only rows that move are copied (the reference, whose shapes are fixed, copies all)."""

from typing import TYPE_CHECKING

from xgr_runtime.hal.ops.cache import move_slots, plan_reorder, reorder_unshared_kv
from xgr_runtime.hal.registry import impl

if TYPE_CHECKING:
    import torch


@impl(reorder_unshared_kv, provider="torch", device="cpu")
def reorder_moving_rows(
    kv_rows: "torch.Tensor",
    parents_N: "torch.Tensor",
    slot_in_N: "torch.Tensor",
    search_of_row_N: "torch.Tensor",
    slot_start_S1: "torch.Tensor",
    num_tokens: int,
    slot_out_N: "torch.Tensor",
    tile: "torch.Tensor",
) -> None:
    """Plan as the reference does, then copy the moving rows alone."""
    src_N, dst_N = plan_reorder(
        parents_N, slot_in_N, search_of_row_N, slot_start_S1, kv_rows.shape[1]
    )
    moving = (src_N != dst_N).nonzero().squeeze(1)
    move_slots(kv_rows, src_N[moving], dst_N[moving], num_tokens, tile)
    slot_out_N.copy_(dst_N)
