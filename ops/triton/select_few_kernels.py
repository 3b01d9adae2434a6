"""A round of few candidates in one kernel: each program scores all candidates of its search and ranks its own share of them.

Where all candidates of a round fit one tile, as one long row of a first level or the rows of a sparse last level do, scoring
them takes less time than the start of another kernel and what it would have to be told. So nothing is stored between: a program
has the keys of its search's candidates in registers, finds a threshold that at least W reach (`threshold_kernels`), and of its
share, every PROGRAMS-th candidate, counts for each that reaches it how many come before it. That is its child row: all programs
hold the same candidates, and no two are equal. Shares are interleaved, so that neighbours, which are often good together, are
ranked by different programs. A share is ranked from its best on and ranks grow, so a program ends behind the first that is no
child, however many equal ones reach the threshold.

An entry is (key, LAST_PLACE - place) in one int64 that sorts as the contract does; place is row of the tile x columns + column.
"""

import triton
import triton.language as tl

from .candidate_kernels import (
    LAST_PLACE,
    NOTHING,
    children_at,
    children_of_tile,
    keys_of_tile,
    rows_at,
    rows_of_tile,
    score_of_key,
    write_dead_rows,
)
from .threshold_kernels import reached_by


@triton.jit
def write_rest_as_dead(
    search,
    start,
    end,
    num_found,
    num_children,
    num_searches,
    child_search_ptr,
    parent_start_ptr,
    child_start_ptr,
    score_out_ptr,
    node_out_ptr,
    parent_out_ptr,
    code_out_ptr,
    TILE: tl.constexpr,
):
    """Child rows of a search behind its last candidate; of the last search the padding rows too."""
    for first in range(start + num_found, end, TILE):
        write_dead_rows(
            first,
            end,
            num_searches,
            child_search_ptr,
            parent_start_ptr,
            score_out_ptr,
            node_out_ptr,
            parent_out_ptr,
            code_out_ptr,
            TILE,
        )
    if search == num_searches - 1:
        for first in range(tl.load(child_start_ptr + num_searches), num_children, TILE):
            write_dead_rows(
                first,
                num_children,
                num_searches,
                child_search_ptr,
                parent_start_ptr,
                score_out_ptr,
                node_out_ptr,
                parent_out_ptr,
                code_out_ptr,
                TILE,
            )


@triton.jit(do_not_specialize=["num_rows", "num_children", "num_searches"])
def select_few_kernel(
    logit_ptr,
    lse_ptr,
    score_ptr,
    node_ptr,
    search_ptr,
    rule_ptr,
    offset_ptr,
    code_ptr,
    child_ptr,
    alive_ptr,
    parent_start_ptr,
    child_start_ptr,
    child_search_ptr,
    counters_ptr,
    score_out_ptr,
    node_out_ptr,
    parent_out_ptr,
    code_out_ptr,
    num_rows,
    num_children,
    num_searches,
    num_codes,
    logit_row_stride,
    logit_column_stride,
    alive_row_stride,
    IS_DENSE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DEAD_ROWS: tl.constexpr,
):
    """All of a round. A search has PROGRAMS programs, and no more than TILE_ROWS rows of TILE_COLUMNS children."""
    CANDIDATES: tl.constexpr = TILE_ROWS * TILE_COLUMNS
    search, program = tl.program_id(0) // PROGRAMS, tl.program_id(0) % PROGRAMS
    first_row = tl.load(parent_start_ptr + search)
    end_row = tl.load(parent_start_ptr + search + 1)
    start = tl.load(child_start_ptr + search)
    end = tl.load(child_start_ptr + search + 1)
    # the program's share; asked for beside all the others, which it waits for anyway
    own_I = program + PROGRAMS * tl.arange(0, CANDIDATES // PROGRAMS)
    own_row_I = first_row + own_I // TILE_COLUMNS
    _search_I, own_parent_I, own_edge_I, own_count_I, own_alive_I = rows_at(
        own_row_I,
        end_row,
        num_searches,
        num_codes,
        score_ptr,
        node_ptr,
        search_ptr,
        rule_ptr,
        offset_ptr,
        alive_row_stride,
        IS_DENSE,
    )
    row_R, _search_R, parent_R, edge_R, count_R, alive_R = rows_of_tile(
        first_row,
        end_row,
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
    own_lse_I = tl.load(lse_ptr + own_row_I, mask=own_count_I > 0, other=0.0)
    lse_R = tl.load(lse_ptr + row_R, mask=row_R < end_row, other=0.0)
    own_code_IU, own_edge_IU, own_logit_IU, is_own_alive_IU = children_at(
        (own_I % TILE_COLUMNS)[:, None],
        own_row_I,
        own_edge_I,
        own_count_I,
        own_alive_I,
        logit_ptr,
        logit_row_stride,
        logit_column_stride,
        code_ptr,
        alive_ptr,
        IS_DENSE,
    )
    _code_RC, _edge_RC, logit_RC, is_alive_RC = children_of_tile(
        0,
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
    own_key_IU = keys_of_tile(own_parent_I, own_lse_I, own_logit_IU, is_own_alive_IU)
    own_node_IU = own_edge_IU.to(tl.int32)
    if IS_DENSE:
        own_node_IU = tl.load(child_ptr + own_edge_IU, mask=own_key_IU > NOTHING, other=0)
    key_RC = keys_of_tile(parent_R, lse_R, logit_RC, is_alive_RC)
    key_K = tl.reshape(key_RC, (CANDIDATES,))
    threshold = reached_by(key_K, None, 0, 0, end - start, CANDIDATES, True)
    entry_K = (key_K.to(tl.int64) << 32) | (LAST_PLACE - tl.arange(0, CANDIDATES).to(tl.int64))
    own_entry_IU = (own_key_IU.to(tl.int64) << 32) | (LAST_PLACE - own_I.to(tl.int64)[:, None])
    # an entry's key reaches the threshold: what lies below in an int64 only orders entries of one key
    least = threshold.to(tl.int64) << 32
    taken = tl.max(tl.max(own_entry_IU, axis=1), axis=0)
    while taken >= least:
        rank = tl.sum((entry_K > taken).to(tl.int32), axis=0)
        to_IU = start + rank + own_code_IU * 0
        is_taken_IU = (own_entry_IU == taken) & (to_IU < end)
        tl.store(score_out_ptr + to_IU, score_of_key(own_key_IU), mask=is_taken_IU)
        tl.store(node_out_ptr + to_IU, own_node_IU, mask=is_taken_IU)
        tl.store(parent_out_ptr + to_IU, own_row_I[:, None], mask=is_taken_IU)
        tl.store(code_out_ptr + to_IU, own_code_IU, mask=is_taken_IU)
        # behind one that is no child comes none
        is_behind_IU = (own_entry_IU < taken) & (to_IU < end)
        behind_IU = tl.where(is_behind_IU, own_entry_IU, -(2**63))
        taken = tl.max(tl.max(behind_IU, axis=1), axis=0)
    if program == PROGRAMS - 1:
        write_rest_as_dead(
            search,
            start,
            end,
            tl.minimum(tl.sum((key_K > NOTHING).to(tl.int32), axis=0), end - start),
            num_children,
            num_searches,
            child_search_ptr,
            parent_start_ptr,
            child_start_ptr,
            score_out_ptr,
            node_out_ptr,
            parent_out_ptr,
            code_out_ptr,
            DEAD_ROWS,
        )
        num_live = tl.sum((parent_R > float("-inf")).to(tl.int32), axis=0)
        tl.atomic_add(counters_ptr, num_live.to(tl.int64), mask=num_live > 0, sem="relaxed")
