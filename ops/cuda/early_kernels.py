"""Kernels of the search that start before the kernel in front of them has ended (programmatic dependent launch).

Each is the kernel of `xgr_ops.triton` behind a wait: whatever it reads or writes, counters and scratch included, comes after
that. As all of them wait, in each program, one that has waited comes after every kernel in front: the one before it could not
end before it had waited itself. So no kernel writes what another, however far in front, still reads, and none reads what is
still to be written. In front of the first of them stands a kernel that starts in the ordinary way, or that waits in each of its
programs as products do. Only a kernel's start runs beside the kernel in front.

(A function that is handed to the one kernel as a constant would need no second kernels, but Triton cannot say beforehand that it
is about to compile such a kernel: `hal/triton_kernels.py`.)
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..triton.beam_kernels import (
    children_logsumexp_kernel,
    flag_failed_kernel,
    flagged_level_logsumexp_kernel,
    level_logsumexp_kernel,
)
from ..triton.select_kernels import collect_kernel, group_bests_kernel
from ..triton.select_rank_kernels import rank_kernel, stream_kernel
from ..triton.threshold_kernels import threshold_kernel


@triton.jit
def wait_for_kernel_in_front():
    """Let the next kernel come, then wait until the one in front has ended and what it wrote can be read.

    The next one may come at once: it waits likewise before it touches memory. A kernel that was started in the ordinary way
    finds nothing to wait for.
    """
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def early_level_logsumexp_kernel(
    logit_ptr, out_ptr, num_codes, row_stride, column_stride, TILE: tl.constexpr,
):  # fmt: skip
    """Likewise `level_logsumexp_kernel`."""
    wait_for_kernel_in_front()
    level_logsumexp_kernel(
        logit_ptr, out_ptr, num_codes, row_stride, column_stride, TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["failed_status", "num_searches"])
def early_flagged_level_logsumexp_kernel(
    logit_ptr, out_ptr, score_ptr, search_ptr, start_ptr, status_ptr, failed_status, num_searches, num_codes, row_stride,
    column_stride, TILE: tl.constexpr, FLAG_TILE: tl.constexpr,
):  # fmt: skip
    """Likewise `flagged_level_logsumexp_kernel`."""
    wait_for_kernel_in_front()
    flagged_level_logsumexp_kernel(
        logit_ptr, out_ptr, score_ptr, search_ptr, start_ptr, status_ptr, failed_status, num_searches, num_codes,
        row_stride, column_stride, TILE, FLAG_TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_searches"])
def early_children_logsumexp_kernel(
    logit_ptr, score_ptr, node_ptr, search_ptr, rule_ptr, offset_ptr, code_ptr, alive_ptr, out_ptr, num_rows,
    num_searches, num_codes, logit_row_stride, logit_column_stride, alive_row_stride, IS_DENSE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Likewise `children_logsumexp_kernel`."""
    wait_for_kernel_in_front()
    children_logsumexp_kernel(
        logit_ptr, score_ptr, node_ptr, search_ptr, rule_ptr, offset_ptr, code_ptr, alive_ptr, out_ptr, num_rows,
        num_searches, num_codes, logit_row_stride, logit_column_stride, alive_row_stride, IS_DENSE, TILE_ROWS,
        TILE_COLUMNS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["failed_status", "num_rows", "num_searches"])
def early_flag_failed_kernel(
    lse_ptr, score_ptr, start_ptr, status_ptr, failed_status, num_rows, num_searches, TILE: tl.constexpr,
):  # fmt: skip
    """Likewise `flag_failed_kernel`."""
    wait_for_kernel_in_front()
    flag_failed_kernel(
        lse_ptr, score_ptr, start_ptr, status_ptr, failed_status, num_rows, num_searches, TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_counts", "num_rows", "num_children", "num_searches"])
def early_group_bests_kernel(
    logit_ptr, lse_ptr, score_ptr, node_ptr, search_ptr, rule_ptr, offset_ptr, code_ptr, alive_ptr, best_ptr,
    parent_start_ptr, child_search_ptr, score_out_ptr, node_out_ptr, parent_out_ptr, code_out_ptr, count_ptr, num_counts,
    num_rows, num_children, num_searches, num_codes, logit_row_stride, logit_column_stride, alive_row_stride,
    IS_DENSE: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, STRETCHES: tl.constexpr,
    PARTS: tl.constexpr, GROUPS: tl.constexpr, DEAD_ROWS: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Likewise `group_bests_kernel`."""
    wait_for_kernel_in_front()
    group_bests_kernel(
        logit_ptr, lse_ptr, score_ptr, node_ptr, search_ptr, rule_ptr, offset_ptr, code_ptr, alive_ptr, best_ptr,
        parent_start_ptr, child_search_ptr, score_out_ptr, node_out_ptr, parent_out_ptr, code_out_ptr, count_ptr,
        num_counts, num_rows, num_children, num_searches, num_codes, logit_row_stride, logit_column_stride,
        alive_row_stride, IS_DENSE, TILE_ROWS, TILE_COLUMNS, STRETCHES, PARTS, GROUPS, DEAD_ROWS, COUNTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_searches"])
def early_collect_kernel(
    logit_ptr, lse_ptr, score_ptr, node_ptr, search_ptr, rule_ptr, offset_ptr, code_ptr, child_ptr, alive_ptr, best_ptr,
    parent_start_ptr, child_start_ptr, threshold_ptr, count_ptr, entry_ptr, entry_node_ptr, num_rows, num_searches,
    num_codes, logit_row_stride, logit_column_stride, alive_row_stride, IS_DENSE: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, STRETCHES: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr,
    SEGMENTS: tl.constexpr, ROOM_BESIDES_WIDTH: tl.constexpr, THRESHOLD_TILE: tl.constexpr,
):  # fmt: skip
    """Likewise `collect_kernel`."""
    wait_for_kernel_in_front()
    collect_kernel(
        logit_ptr, lse_ptr, score_ptr, node_ptr, search_ptr, rule_ptr, offset_ptr, code_ptr, child_ptr, alive_ptr,
        best_ptr, parent_start_ptr, child_start_ptr, threshold_ptr, count_ptr, entry_ptr, entry_node_ptr, num_rows,
        num_searches, num_codes, logit_row_stride, logit_column_stride, alive_row_stride, IS_DENSE, TILE_ROWS,
        TILE_COLUMNS, STRETCHES, PARTS, GROUPS, SEGMENTS, ROOM_BESIDES_WIDTH, THRESHOLD_TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_searches"])
def early_stream_kernel(
    logit_ptr, lse_ptr, score_ptr, node_ptr, search_ptr, rule_ptr, offset_ptr, code_ptr, child_ptr, alive_ptr, best_ptr,
    parent_start_ptr, child_start_ptr, threshold_ptr, count_ptr, final_count_ptr, entry_ptr, entry_node_ptr, num_rows,
    num_searches, num_codes, logit_row_stride, logit_column_stride, alive_row_stride, IS_DENSE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, STRETCHES: tl.constexpr, GROUPS: tl.constexpr, SEGMENTS: tl.constexpr,
    ROOM_BESIDES_WIDTH: tl.constexpr,
):  # fmt: skip
    """Likewise `stream_kernel`."""
    wait_for_kernel_in_front()
    stream_kernel(
        logit_ptr, lse_ptr, score_ptr, node_ptr, search_ptr, rule_ptr, offset_ptr, code_ptr, child_ptr, alive_ptr,
        best_ptr, parent_start_ptr, child_start_ptr, threshold_ptr, count_ptr, final_count_ptr, entry_ptr, entry_node_ptr,
        num_rows, num_searches, num_codes, logit_row_stride, logit_column_stride, alive_row_stride, IS_DENSE,
        TILE_COLUMNS, STRETCHES, GROUPS, SEGMENTS, ROOM_BESIDES_WIDTH,
    )  # fmt: skip


@triton.jit
def early_rank_kernel(
    best_ptr, score_ptr, parent_start_ptr, child_start_ptr, threshold_ptr, final_count_ptr, entry_ptr, entry_node_ptr,
    counters_ptr, score_out_ptr, node_out_ptr, parent_out_ptr, code_out_ptr, num_codes, SEGMENTS: tl.constexpr,
    ROOM_BESIDES_WIDTH: tl.constexpr, PROGRAMS: tl.constexpr, COUNTERS: tl.constexpr, TILE: tl.constexpr,
    OTHERS: tl.constexpr, BESTS: tl.constexpr, COUNT_ROWS: tl.constexpr, COUNT_BESTS: tl.constexpr,
):  # fmt: skip
    """Likewise `rank_kernel`."""
    wait_for_kernel_in_front()
    rank_kernel(
        best_ptr, score_ptr, parent_start_ptr, child_start_ptr, threshold_ptr, final_count_ptr, entry_ptr, entry_node_ptr,
        counters_ptr, score_out_ptr, node_out_ptr, parent_out_ptr, code_out_ptr, num_codes, SEGMENTS, ROOM_BESIDES_WIDTH,
        PROGRAMS, COUNTERS, TILE, OTHERS, BESTS, COUNT_ROWS, COUNT_BESTS,
    )  # fmt: skip


@triton.jit
def early_threshold_kernel(
    best_ptr, parent_start_ptr, child_start_ptr, threshold_ptr, BESTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Likewise `threshold_kernel`."""
    wait_for_kernel_in_front()
    threshold_kernel(
        best_ptr, parent_start_ptr, child_start_ptr, threshold_ptr, BESTS, TILE,
    )  # fmt: skip


EARLY = {
    "level_logsumexp_kernel": early_level_logsumexp_kernel,
    "flagged_level_logsumexp_kernel": early_flagged_level_logsumexp_kernel,
    "children_logsumexp_kernel": early_children_logsumexp_kernel,
    "flag_failed_kernel": early_flag_failed_kernel,
    "group_bests_kernel": early_group_bests_kernel,
    "collect_kernel": early_collect_kernel,
    "stream_kernel": early_stream_kernel,
    "rank_kernel": early_rank_kernel,
    "threshold_kernel": early_threshold_kernel,
}
