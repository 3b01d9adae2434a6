"""Cache writes and the reorder of beams' own keys and values: rows are moved whole, none is gathered into a second buffer.

Why rows move, and no table of ancestors is kept. A search of L levels reorders L - 2 times. On an H200, 8 searches of
512 beams over 1 M items, 28 layers and 2 KiB each for a token's key and value: 58 % of the rows move, 0.54 GB are read
or written, 0.14 ms beside 4 us for the plan. That is 0.4 % of such a batch, and of one search too. A table is made anew
in 3 us a round, so it could save no more than that. In return each attention kernel would look up a slot for each own
token in each layer, a slot could be given back only when no descendant reads it, and every device's kernels, which
take a row's tokens as one run of memory, would need both forms.
"""

from typing import TYPE_CHECKING

from xgr_runtime.hal.ops.cache import (
    copy_page_starts,
    reorder_unshared_kv,
    write_shared_kv,
    write_unshared_kv,
)
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.cache import launch_copy_page_starts, launch_move_slots, launch_write_rows
from ..triton.cache_kernels import copy_page_starts_kernel, move_slots_kernel, write_rows_kernel
from ..triton.launch import why_dtype_refused
from ..triton.reorder import launch_plan_reorder
from .launch_rules import RULES

if TYPE_CHECKING:
    import torch


def _accepts_write(spec: OpSpec) -> str | None:
    return why_dtype_refused(write_rows_kernel, spec.dtype)


def _accepts_move(spec: OpSpec) -> str | None:
    return why_dtype_refused(move_slots_kernel, spec.dtype)


@impl(write_shared_kv, provider="triton", device="cuda", accepts=_accepts_write)
def write_rows_of_pages(
    k_TGD: "torch.Tensor",
    v_TGD: "torch.Tensor",
    k_pages: "torch.Tensor",
    v_pages: "torch.Tensor",
    slot_T: "torch.Tensor",
) -> None:
    """Keys and values in one kernel."""
    launch_write_rows(k_TGD, v_TGD, k_pages.flatten(0, 1), v_pages.flatten(0, 1), slot_T, RULES)


def _accepts_copy(spec: OpSpec) -> str | None:
    return why_dtype_refused(copy_page_starts_kernel, spec.dtype)


@impl(copy_page_starts, provider="triton", device="cuda", accepts=_accepts_copy)
def copy_page_starts_of_all_layers(
    kv_pages: "torch.Tensor",
    source_H: "torch.Tensor",
    target_H: "torch.Tensor",
    num_tokens_H: "torch.Tensor",
) -> None:
    """One kernel for all histories and layers."""
    launch_copy_page_starts(kv_pages, source_H, target_H, num_tokens_H, RULES)


@impl(write_unshared_kv, provider="triton", device="cuda", accepts=_accepts_write)
def write_rows_of_slots(
    k_NGD: "torch.Tensor",
    v_NGD: "torch.Tensor",
    k_rows: "torch.Tensor",
    v_rows: "torch.Tensor",
    slot_N: "torch.Tensor",
    position: int,
) -> None:
    """Keys and values in one kernel, through views of the slots' `position`."""
    launch_write_rows(k_NGD, v_NGD, k_rows[:, position], v_rows[:, position], slot_N, RULES)


@impl(reorder_unshared_kv, provider="triton", device="cuda", accepts=_accepts_move)
def reorder_in_slots(
    kv_rows: "torch.Tensor",
    parents_N: "torch.Tensor",
    slot_in_N: "torch.Tensor",
    search_of_row_N: "torch.Tensor",
    slot_start_S1: "torch.Tensor",
    num_tokens: int,
    slot_out_N: "torch.Tensor",
    tile: "torch.Tensor",
) -> None:
    """A kernel that plans, a kernel that copies the rows that move; `tile` is not needed.

    Slots are planned in place, unless they would be written over those before, which other programs still read.
    """
    is_apart = slot_out_N.is_contiguous() and not _overlap(slot_in_N, slot_out_N)
    src_N, dst_N = launch_plan_reorder(
        parents_N,
        slot_in_N,
        search_of_row_N,
        slot_start_S1,
        kv_rows.shape[1],
        RULES,
        slot_out_N if is_apart else None,
    )
    launch_move_slots(kv_rows, src_N, dst_N, num_tokens, RULES)
    if not is_apart:
        slot_out_N.copy_(dst_N)


def _overlap(first: "torch.Tensor", second: "torch.Tensor") -> bool:
    """Whether contiguous tensors share memory."""
    first_at, second_at = first.data_ptr(), second.data_ptr()
    return first_at < second_at + second.nbytes and second_at < first_at + first.nbytes
