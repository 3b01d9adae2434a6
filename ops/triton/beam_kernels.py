"""Kernels of the normalisers and of the failure flags.

A normaliser reads each logit once: a running largest logit and a running sum relative to it, so that a row may be of
any length. A row with +inf has no finite largest logit; nothing is subtracted there, and +inf, NaN and -inf come out
of the sum by themselves. The order of a row's sum depends on nothing but its own length.
"""

import triton
import triton.language as tl

from .candidate_kernels import children_of_tile, rows_of_tile


@triton.jit
def add_logits(largest_R, total_R, logit_RC):
    """The running largest logit and sum of rows after more logits of theirs."""
    new_R = tl.maximum(largest_R, tl.max(logit_RC, axis=1))
    # nothing is subtracted where nothing is finite: inf - inf would be NaN
    shift_R = tl.where((new_R > float("-inf")) & (new_R < float("inf")), new_R, 0.0)
    old_R = tl.where(largest_R > float("-inf"), largest_R, shift_R)
    total_R = total_R * tl.exp(old_R - shift_R) + tl.sum(
        tl.exp(logit_RC - shift_R[:, None]), axis=1
    )
    return new_R, total_R


@triton.jit
def close_logsumexp(largest_R, total_R):
    """Log-sum-exp from the running values."""
    is_finite_R = (largest_R > float("-inf")) & (largest_R < float("inf"))
    return tl.where(is_finite_R, largest_R, 0.0) + tl.log(total_R)


@triton.jit
def logsumexp_of_row(row, logit_ptr, num_codes, row_stride, column_stride, TILE: tl.constexpr):
    """fp32 [1] of one row, TILE logits at a time."""
    place = logit_ptr + tl.cast(row, tl.int64) * row_stride
    largest_R = tl.full([1], float("-inf"), tl.float32)
    total_R = tl.zeros([1], tl.float32)
    for first in range(0, num_codes, TILE):
        code_C = first + tl.arange(0, TILE)
        place_C = place + code_C.to(tl.int64) * column_stride
        logit_C = tl.load(place_C, mask=code_C < num_codes, other=float("-inf"))
        largest_R, total_R = add_logits(largest_R, total_R, logit_C[None, :])
    return close_logsumexp(largest_R, total_R)


@triton.jit
def level_logsumexp_kernel(
    logit_ptr,
    out_ptr,
    num_codes,
    row_stride,
    column_stride,
    TILE: tl.constexpr,
):
    """out[row] of one row."""
    row = tl.program_id(0)
    lse_R = logsumexp_of_row(row, logit_ptr, num_codes, row_stride, column_stride, TILE)
    tl.store(out_ptr + row + tl.arange(0, 1), lse_R)


@triton.jit(do_not_specialize=["failed_status", "num_searches"])
def flagged_level_logsumexp_kernel(
    logit_ptr,
    out_ptr,
    score_ptr,
    search_ptr,
    start_ptr,
    status_ptr,
    failed_status,
    num_searches,
    num_codes,
    row_stride,
    column_stride,
    TILE: tl.constexpr,
    FLAG_TILE: tl.constexpr,
):
    """out[row] of one row; where it fails its search, the status and -inf for all of the search's rows.

    Rows of a search need not know of each other. The first that fails finds status and scores as they were; whoever comes after
    it may find the new status or its own row dead already, and whatever it then writes, or leaves, is what the first one writes.
    """
    row = tl.program_id(0)
    search = tl.load(search_ptr + row)
    score = tl.load(score_ptr + row)
    status = tl.load(status_ptr + search)
    lse_R = logsumexp_of_row(row, logit_ptr, num_codes, row_stride, column_stride, TILE)
    tl.store(out_ptr + row + tl.arange(0, 1), lse_R)
    lse = tl.sum(lse_R, axis=0)
    is_bad = (score > float("-inf")) & ((lse == float("inf")) | (lse != lse))
    if status != 0:
        tl.store(score_ptr + row, float("-inf"))
    elif is_bad & (search < num_searches):
        tl.store(status_ptr + search, failed_status)
        end = tl.load(start_ptr + search + 1)
        for first in range(tl.load(start_ptr + search), end, FLAG_TILE):
            row_N = first + tl.arange(0, FLAG_TILE)
            dead_N = tl.full([FLAG_TILE], float("-inf"), tl.float32)
            tl.store(score_ptr + row_N, dead_N, mask=row_N < end)


@triton.jit(do_not_specialize=["num_rows", "num_searches"])
def children_logsumexp_kernel(
    logit_ptr,
    score_ptr,
    node_ptr,
    search_ptr,
    rule_ptr,
    offset_ptr,
    code_ptr,
    alive_ptr,
    out_ptr,
    num_rows,
    num_searches,
    num_codes,
    logit_row_stride,
    logit_column_stride,
    alive_row_stride,
    IS_DENSE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """out[row] over the living children of TILE_ROWS rows."""
    row_R, _search_R, _parent_R, edge_R, count_R, alive_R = rows_of_tile(
        tl.program_id(0) * TILE_ROWS,
        num_rows,
        num_searches,
        num_codes,
        score_ptr,
        node_ptr,
        search_ptr,
        rule_ptr,
        offset_ptr,
        alive_row_stride,
        IS_DENSE,
        TILE_ROWS,
    )
    largest_R = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total_R = tl.zeros([TILE_ROWS], tl.float32)
    for first in range(0, tl.max(count_R, axis=0), TILE_COLUMNS):
        _code_RC, _edge_RC, logit_RC, is_alive_RC = children_of_tile(
            first,
            row_R,
            edge_R,
            count_R,
            alive_R,
            logit_ptr,
            logit_row_stride,
            logit_column_stride,
            code_ptr,
            alive_ptr,
            IS_DENSE,
            TILE_COLUMNS,
        )
        logit_RC = tl.where(is_alive_RC, logit_RC, float("-inf"))
        largest_R, total_R = add_logits(largest_R, total_R, logit_RC)
    tl.store(out_ptr + row_R, close_logsumexp(largest_R, total_R), mask=row_R < num_rows)


@triton.jit(do_not_specialize=["failed_status", "num_rows", "num_searches"])
def flag_failed_kernel(
    lse_ptr,
    score_ptr,
    start_ptr,
    status_ptr,
    failed_status,
    num_rows,
    num_searches,
    TILE: tl.constexpr,
):
    """Status of one search, and -inf for its rows where it failed now or before; the last program has the padding."""
    search = tl.program_id(0)
    begin = tl.load(start_ptr + search)
    status = tl.load(status_ptr + search)
    end = num_rows
    if search < num_searches:
        end = tl.load(start_ptr + search + 1)
        num_bad = tl.zeros([], tl.int32)
        for first in range(begin, end, TILE):
            row_N = first + tl.arange(0, TILE)
            score_N = tl.load(score_ptr + row_N, mask=row_N < end, other=float("-inf"))
            lse_N = tl.load(lse_ptr + row_N, mask=row_N < end, other=0.0)
            is_bad_N = (score_N > float("-inf")) & ((lse_N == float("inf")) | (lse_N != lse_N))
            num_bad += tl.sum(is_bad_N.to(tl.int32), axis=0)
        if (status == 0) & (num_bad > 0):
            status = failed_status
            tl.store(status_ptr + search, status)
    if status != 0:
        for first in range(begin, end, TILE):
            row_N = first + tl.arange(0, TILE)
            dead_N = tl.full([TILE], float("-inf"), tl.float32)
            tl.store(score_ptr + row_N, dead_N, mask=row_N < end)
