"""Kernels that finish a round: lists that found no room are made anew, then every entry is ranked and written.

`stream_kernel` is for what groups cannot bound: thousands of candidates that tie, or one row that holds nearly all good
ones. Each of a search's SEGMENTS programs walks a share of its rows in order and keeps what is better than everything
it had to drop: when its list is full, the list is cut to its W best, in order, and of ties the first stay; later ones
come after them in the contract's order too and are dropped from then on. The union of the lists holds the search's W
best. Where no list overflowed the kernel only passes the counts on; where none can, it is not started.

`rank_kernel` counts for each entry how many come before it. That is its child row; entries are distinct, so rows are
too, whatever order the lists are in. W^2 comparisons of one int64 each, spread over programs, need no sort and no
second pass. The lists of a search are read as one, so that a program waits for memory once, not once a list.
"""

import triton
import triton.language as tl

from .candidate_kernels import (
    LARGEST,
    LAST_PLACE,
    NOTHING,
    children_of_tile,
    keys_of_tile,
    put_entries,
    rows_of_tile,
    score_of_key,
)


@triton.jit
def count_entries(entry_ptr, num_entries, least, TILE: tl.constexpr):
    """How many of the entries have a key that reaches `least`."""
    count = tl.zeros([], tl.int32)
    for at in range(0, num_entries, TILE):
        place_B = at + tl.arange(0, TILE)
        is_used_B = place_B < num_entries
        key_B = (tl.load(entry_ptr + place_B, mask=is_used_B, other=0) >> 32).to(tl.int32)
        count += tl.sum((is_used_B & (key_B >= least)).to(tl.int32), axis=0)
    return count


@triton.jit
def cut_list(entry_ptr, node_ptr, num_entries, width, TILE: tl.constexpr):
    """Keep the first `width` of a list of more, in the contract's order, where they lie; returns the W-th best key.

    The list is in the order of (row, code), so of equal keys the first are kept.
    """
    tl.debug_barrier()
    low = tl.full([], NOTHING, tl.int64)
    high = tl.full([], LARGEST, tl.int64)
    while high - low > 1:
        middle = low + (high - low) // 2
        is_safe = count_entries(entry_ptr, num_entries, middle.to(tl.int32), TILE) >= width
        low = tl.where(is_safe, middle, low)
        high = tl.where(is_safe, high, middle)
    least = low.to(tl.int32)
    num_ties = width - count_entries(entry_ptr, num_entries, least + 1, TILE)
    num_kept = tl.zeros([], tl.int32)
    for at in range(0, num_entries, TILE):
        place_B = at + tl.arange(0, TILE)
        is_used_B = place_B < num_entries
        entry_B = tl.load(entry_ptr + place_B, mask=is_used_B, other=0)
        node_B = tl.load(node_ptr + place_B, mask=is_used_B, other=0)
        key_B = (entry_B >> 32).to(tl.int32)
        tie_B = (is_used_B & (key_B == least)).to(tl.int32)
        is_first_tie_B = (tie_B > 0) & (tl.cumsum(tie_B, axis=0) <= num_ties)
        kept_B = ((is_used_B & (key_B > least)) | is_first_tie_B).to(tl.int32)
        to_B = num_kept + tl.cumsum(kept_B, axis=0) - kept_B
        tl.debug_barrier()
        tl.store(entry_ptr + to_B, entry_B, mask=kept_B > 0)
        tl.store(node_ptr + to_B, node_B, mask=kept_B > 0)
        num_kept += tl.sum(kept_B, axis=0)
        num_ties -= tl.sum(tie_B, axis=0)
    tl.debug_barrier()
    return least


@triton.jit(do_not_specialize=["num_rows", "num_searches"])
def stream_kernel(
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
    final_count_ptr,
    entry_ptr,
    entry_node_ptr,
    num_rows,
    num_searches,
    num_codes,
    logit_row_stride,
    logit_column_stride,
    alive_row_stride,
    IS_DENSE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    STRETCHES: tl.constexpr,
    GROUPS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROOM_BESIDES_WIDTH: tl.constexpr,
):
    """final_count[s, segment], and the segment's list where some list of search s had no room for all."""
    search, segment = tl.program_id(0) // SEGMENTS, tl.program_id(0) % SEGMENTS
    start = tl.load(child_start_ptr + search)
    width = tl.load(child_start_ptr + search + 1) - start
    room = width + ROOM_BESIDES_WIDTH
    count_B = tl.load(count_ptr + search * SEGMENTS + tl.arange(0, SEGMENTS))
    num_entries = tl.load(count_ptr + search * SEGMENTS + segment)
    if tl.max(count_B, axis=0) > room:
        list_place = (start.to(tl.int64) + search.to(tl.int64) * ROOM_BESIDES_WIDTH) * SEGMENTS
        list_place += segment * room.to(tl.int64)
        entry_ptr += list_place
        entry_node_ptr += list_place
        # keys above `dropped` are taken; everything of that key or below is known to come after W others
        dropped = tl.load(threshold_ptr + search) - 1
        num_entries = tl.zeros([], tl.int32)
        first_row = tl.load(parent_start_ptr + search) + segment
        for row in range(first_row, tl.load(parent_start_ptr + search + 1), SEGMENTS):
            row_R, _search_R, parent_R, edge_R, count_R, alive_R = rows_of_tile(
                row,
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
                1,
            )
            lse_R = tl.load(lse_ptr + row_R, mask=count_R > 0, other=0.0)
            best_at = best_ptr + tl.cast(row, tl.int64) * (STRETCHES * GROUPS)
            num_stretches = (tl.max(count_R, axis=0) + TILE_COLUMNS - 1) // TILE_COLUMNS
            for stretch in range(0, num_stretches):
                best_G = tl.load(best_at + stretch * GROUPS + tl.arange(0, GROUPS))
                if tl.max(best_G, axis=0) > dropped:
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
                    num_found = tl.sum(tl.sum((key_RC > dropped).to(tl.int32), axis=1), axis=0)
                    if num_entries + num_found > room:
                        # more than W are listed: a stretch alone always finds ROOM_BESIDES_WIDTH
                        dropped = cut_list(
                            entry_ptr, entry_node_ptr, num_entries, width, TILE_COLUMNS
                        )
                        num_entries = width
                    found_RC = (key_RC > dropped).to(tl.int32)
                    put_entries(
                        found_RC > 0,
                        num_entries + tl.cumsum(found_RC, axis=1) - found_RC,
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
                    num_entries += tl.sum(tl.sum(found_RC, axis=1), axis=0)
        if num_entries > width:
            cut_list(entry_ptr, entry_node_ptr, num_entries, width, TILE_COLUMNS)
            num_entries = width
    tl.store(final_count_ptr + search * SEGMENTS + segment, num_entries)


@triton.jit
def count_rows(
    search,
    first_row,
    row_step,
    counters_ptr,
    best_ptr,
    score_ptr,
    parent_start_ptr,
    threshold,
    BESTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_BESTS: tl.constexpr,
):
    """Add a share of a search's live rows, and those that stay below the threshold and so were not read again."""
    num_live = tl.zeros([], tl.int32)
    num_skipped = tl.zeros([], tl.int32)
    end = tl.load(parent_start_ptr + search + 1)
    for first in range(tl.load(parent_start_ptr + search) + first_row, end, row_step):
        row_R = first + tl.arange(0, TILE_ROWS)
        score_R = tl.load(score_ptr + row_R, mask=row_R < end, other=float("-inf"))
        is_live_R = score_R > float("-inf")
        best_R = tl.full([TILE_ROWS], NOTHING, tl.int32)
        for at in range(0, BESTS, TILE_BESTS):
            place_G = at + tl.arange(0, TILE_BESTS)
            place_RG = row_R.to(tl.int64)[:, None] * BESTS + place_G[None, :]
            mask_RG = is_live_R[:, None] & (place_G < BESTS)[None, :]
            best_RG = tl.load(best_ptr + place_RG, mask=mask_RG, other=NOTHING)
            best_R = tl.maximum(best_R, tl.max(best_RG, axis=1))
        num_live += tl.sum(is_live_R.to(tl.int32), axis=0)
        num_skipped += tl.sum((is_live_R & (best_R < threshold)).to(tl.int32), axis=0)
    if num_live > 0:
        tl.atomic_add(counters_ptr, num_live.to(tl.int64), sem="relaxed")
    if num_skipped > 0:
        tl.atomic_add(counters_ptr + 1, num_skipped.to(tl.int64), sem="relaxed")


@triton.jit
def place_in_lists(at, count_ptr, room, SEGMENTS: tl.constexpr):
    """Where the entries `at` of all lists, read one after another, lie from the first list's start."""
    place = at
    end = tl.zeros([], tl.int32)
    for segment in tl.static_range(SEGMENTS):
        num_entries = tl.load(count_ptr + segment)
        end += num_entries
        place += tl.where(at >= end, room - num_entries, 0)
    return place


@triton.jit
def write_children(
    is_child_I,
    to_I,
    entry_I,
    node_I,
    num_codes,
    score_out_ptr,
    node_out_ptr,
    parent_out_ptr,
    code_out_ptr,
):
    """Entries as child rows to_I."""
    key_I = (entry_I >> 32).to(tl.int32)
    place_I = LAST_PLACE - (entry_I & LAST_PLACE)
    row_I = place_I // num_codes
    tl.store(score_out_ptr + to_I, score_of_key(key_I), mask=is_child_I)
    tl.store(node_out_ptr + to_I, node_I, mask=is_child_I)
    tl.store(parent_out_ptr + to_I, row_I.to(tl.int32), mask=is_child_I)
    tl.store(code_out_ptr + to_I, (place_I - row_I * num_codes).to(tl.int32), mask=is_child_I)


@triton.jit
def rank_kernel(
    best_ptr,
    score_ptr,
    parent_start_ptr,
    child_start_ptr,
    threshold_ptr,
    final_count_ptr,
    entry_ptr,
    entry_node_ptr,
    counters_ptr,
    score_out_ptr,
    node_out_ptr,
    parent_out_ptr,
    code_out_ptr,
    num_codes,
    SEGMENTS: tl.constexpr,
    ROOM_BESIDES_WIDTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    COUNTERS: tl.constexpr,
    TILE: tl.constexpr,
    OTHERS: tl.constexpr,
    BESTS: tl.constexpr,
    COUNT_ROWS: tl.constexpr,
    COUNT_BESTS: tl.constexpr,
):
    """Write each entry to the child row of its rank, if there is one. A search has PROGRAMS programs, COUNTERS count."""
    search = tl.program_id(0) // (PROGRAMS + COUNTERS)
    program = tl.program_id(0) % (PROGRAMS + COUNTERS)
    if program >= PROGRAMS:
        count_rows(
            search,
            (program - PROGRAMS) * COUNT_ROWS,
            COUNTERS * COUNT_ROWS,
            counters_ptr,
            best_ptr,
            score_ptr,
            parent_start_ptr,
            tl.load(threshold_ptr + search),
            BESTS,
            COUNT_ROWS,
            COUNT_BESTS,
        )
    else:
        start = tl.load(child_start_ptr + search)
        width = tl.load(child_start_ptr + search + 1) - start
        room = width + ROOM_BESIDES_WIDTH
        list_place = (start.to(tl.int64) + search.to(tl.int64) * ROOM_BESIDES_WIDTH) * SEGMENTS
        entry_ptr += list_place
        entry_node_ptr += list_place
        final_count_ptr += search * SEGMENTS
        num_entries = tl.sum(tl.load(final_count_ptr + tl.arange(0, SEGMENTS)), axis=0)
        for first in range(program * TILE, num_entries, PROGRAMS * TILE):
            at_I = first + tl.arange(0, TILE)
            place_I = place_in_lists(at_I, final_count_ptr, room, SEGMENTS)
            entry_I = tl.load(entry_ptr + place_I, mask=at_I < num_entries, other=0)
            node_I = tl.load(entry_node_ptr + place_I, mask=at_I < num_entries, other=0)
            rank_I = tl.zeros([TILE], tl.int32)
            for other in range(0, num_entries, OTHERS):
                at_J = other + tl.arange(0, OTHERS)
                place_J = place_in_lists(at_J, final_count_ptr, room, SEGMENTS)
                # below every entry
                entry_J = tl.load(entry_ptr + place_J, mask=at_J < num_entries, other=-(2**63))
                is_before_IJ = entry_J[None, :] > entry_I[:, None]
                rank_I += tl.sum(is_before_IJ.to(tl.int32), axis=1)
            write_children(
                (at_I < num_entries) & (rank_I < width),
                start + rank_I,
                entry_I,
                node_I,
                num_codes,
                score_out_ptr,
                node_out_ptr,
                parent_out_ptr,
                code_out_ptr,
            )
