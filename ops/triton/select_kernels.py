"""Kernels that find the candidates of a round: bests of groups, a threshold from them, and what reaches it.

Scores are never stored. `group_bests_kernel` computes each once and keeps the best of small groups of candidates; the
W-th best of a search's groups is a score that at least W candidates reach (`threshold_kernels`), so nothing below it can
be chosen; `collect_kernel` computes again, only where a group reaches the threshold, and lists what does: a little
more than W candidates, in any order, because the list is ranked afterwards. Early termination is that second pass: a
row, and a stretch of a long row, whose groups stay below is not read again. Where a search has few groups each program
that lists finds the threshold itself, which takes it no longer than reading the answer of another kernel.

Each search has SEGMENTS lists with a room of its width + ROOM_BESIDES_WIDTH entries each; a counter may pass the room, its
list is then not complete and `select_rank_kernels` makes it anew.

Tiles: TILE_ROWS x TILE_COLUMNS candidates, columns being children of a row in the order of codes. A row of more
columns is several stretches; PARTS programs share them. A stretch has GROUPS groups, of interleaved columns, so that
a short row fills them evenly.
"""

import triton
import triton.language as tl

from .candidate_kernels import (
    LARGEST,
    NOTHING,
    children_of_tile,
    keys_of_tile,
    put_entries,
    rows_of_tile,
    write_dead_rows,
)
from .threshold_kernels import threshold_of_search


@triton.jit(do_not_specialize=["num_counts", "num_rows", "num_children", "num_searches"])
def group_bests_kernel(
    logit_ptr,
    lse_ptr,
    score_ptr,
    node_ptr,
    search_ptr,
    rule_ptr,
    offset_ptr,
    code_ptr,
    alive_ptr,
    best_ptr,
    parent_start_ptr,
    child_search_ptr,
    score_out_ptr,
    node_out_ptr,
    parent_out_ptr,
    code_out_ptr,
    count_ptr,
    num_counts,
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
    STRETCHES: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    DEAD_ROWS: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """best[row, stretch, group]: the best key of a group.

    Each program also writes DEAD_ROWS child rows as dead and COUNTS of the num_counts numbers at count_ptr as 0.
    """
    zero_C = tl.zeros([COUNTS], tl.int32)
    at_C = tl.program_id(0) * COUNTS + tl.arange(0, COUNTS)
    tl.store(count_ptr + at_C, zero_C, mask=at_C < num_counts)
    dead = tl.program_id(0) * DEAD_ROWS
    if dead < num_children:
        write_dead_rows(
            dead,
            num_children,
            num_searches,
            child_search_ptr,
            parent_start_ptr,
            score_out_ptr,
            node_out_ptr,
            parent_out_ptr,
            code_out_ptr,
            DEAD_ROWS,
        )
    row_R, _search_R, parent_R, edge_R, count_R, alive_R = rows_of_tile(
        tl.program_id(0) // PARTS * TILE_ROWS,
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
    lse_R = tl.load(lse_ptr + row_R, mask=count_R > 0, other=0.0)
    best_R = best_ptr + row_R.to(tl.int64) * (STRETCHES * GROUPS)
    group_G = tl.arange(0, GROUPS)
    num_stretches = (tl.max(count_R, axis=0) + TILE_COLUMNS - 1) // TILE_COLUMNS
    part = tl.program_id(0) % PARTS
    for stretch in range(part, STRETCHES, PARTS):
        best_RG = tl.full([TILE_ROWS, GROUPS], NOTHING, tl.int32)
        if stretch < num_stretches:
            _code_RC, _edge_RC, logit_RC, is_alive_RC = children_of_tile(
                stretch * TILE_COLUMNS,
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
            key_RC = keys_of_tile(parent_R, lse_R, logit_RC, is_alive_RC)
            key_RTG = tl.reshape(key_RC, (TILE_ROWS, TILE_COLUMNS // GROUPS, GROUPS))
            best_RG = tl.max(key_RTG, axis=1)
        place_RG = best_R[:, None] + (stretch * GROUPS + group_G)[None, :]
        tl.store(place_RG, best_RG, mask=(row_R < num_rows)[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_searches"])
def collect_kernel(
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
    best_ptr,
    parent_start_ptr,
    child_start_ptr,
    threshold_ptr,
    count_ptr,
    entry_ptr,
    entry_node_ptr,
    num_rows,
    num_searches,
    num_codes,
    logit_row_stride,
    logit_column_stride,
    alive_row_stride,
    IS_DENSE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    STRETCHES: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROOM_BESIDES_WIDTH: tl.constexpr,
    THRESHOLD_TILE: tl.constexpr,
):
    """List the candidates that reach their search's threshold; count all, also those that find no room.

    THRESHOLD_TILE: 0 where thresholds are there; else each program finds those of its rows' searches, that many keys at a time,
    and stores them: all programs of a search find the same one.
    """
    row_R, search_R, parent_R, edge_R, count_R, alive_R = rows_of_tile(
        tl.program_id(0) // PARTS * TILE_ROWS,
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
    is_live_R = count_R > 0
    lse_R = tl.load(lse_ptr + row_R, mask=is_live_R, other=0.0)
    if THRESHOLD_TILE > 0:
        threshold_R = tl.full([TILE_ROWS], LARGEST, tl.int32)
        first = tl.min(tl.where(is_live_R, search_R, num_searches), axis=0)
        last = tl.max(tl.where(is_live_R, search_R, -1), axis=0)
        for search in range(first, last + 1):
            threshold = threshold_of_search(
                search,
                best_ptr,
                parent_start_ptr,
                child_start_ptr,
                STRETCHES * GROUPS,
                THRESHOLD_TILE,
            )
            tl.store(threshold_ptr + search, threshold)
            threshold_R = tl.where(is_live_R & (search_R == search), threshold, threshold_R)
    else:
        threshold_R = tl.load(threshold_ptr + search_R, mask=is_live_R, other=LARGEST)
    start_R = tl.load(child_start_ptr + search_R, mask=is_live_R, other=0)
    room_R = tl.load(child_start_ptr + search_R + 1, mask=is_live_R, other=0) - start_R
    room_R += ROOM_BESIDES_WIDTH
    list_R = (start_R.to(tl.int64) + search_R.to(tl.int64) * ROOM_BESIDES_WIDTH) * SEGMENTS
    best_R = best_ptr + row_R.to(tl.int64) * (STRETCHES * GROUPS)
    group_G = tl.arange(0, GROUPS)
    num_stretches = (tl.max(count_R, axis=0) + TILE_COLUMNS - 1) // TILE_COLUMNS
    for stretch in range(tl.program_id(0) % PARTS, num_stretches, PARTS):
        place_RG = best_R[:, None] + (stretch * GROUPS + group_G)[None, :]
        best_RG = tl.load(place_RG, mask=is_live_R[:, None], other=NOTHING)
        if tl.max((best_RG >= threshold_R[:, None]).to(tl.int32)) > 0:
            code_RC, edge_RC, logit_RC, is_alive_RC = children_of_tile(
                stretch * TILE_COLUMNS,
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
            key_RC = keys_of_tile(parent_R, lse_R, logit_RC, is_alive_RC)
            is_found_RC = key_RC >= threshold_R[:, None]
            found_RC = is_found_RC.to(tl.int32)
            num_R = tl.sum(found_RC, axis=1)
            segment = (tl.program_id(0) + stretch) % SEGMENTS
            counter_R = count_ptr + search_R * SEGMENTS + segment
            before_R = tl.atomic_add(counter_R, num_R, mask=num_R > 0, sem="relaxed")
            rank_RC = before_R[:, None] + tl.cumsum(found_RC, axis=1) - found_RC
            put_entries(
                is_found_RC & (rank_RC < room_R[:, None]),
                (list_R + segment * room_R.to(tl.int64))[:, None] + rank_RC,
                entry_ptr,
                entry_node_ptr,
                key_RC,
                row_R[:, None],
                code_RC,
                edge_RC,
                num_codes,
                child_ptr,
                IS_DENSE,
            )
