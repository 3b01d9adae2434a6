"""Copies and the reorder on the CPU: only what moves is copied (the references, whose shapes are fixed, copy all)."""

from typing import TYPE_CHECKING

from xgr_runtime.hal.ops.cache import (
    copy_page_starts,
    move_slots,
    plan_reorder,
    reorder_unshared_kv,
)
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


@impl(copy_page_starts, provider="torch", device="cpu")
def copy_used_page_starts(
    kv_pages: "torch.Tensor",
    source_H: "torch.Tensor",
    target_H: "torch.Tensor",
    num_tokens_H: "torch.Tensor",
) -> None:
    """One copy over all layers for each history that has something to copy."""
    copies = zip(source_H.tolist(), target_H.tolist(), num_tokens_H.tolist(), strict=True)
    for source, target, num_tokens in copies:
        kv_pages[:, target, :num_tokens] = kv_pages[:, source, :num_tokens]
