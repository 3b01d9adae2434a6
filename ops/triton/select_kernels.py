"""Kernels that find the candidates of a round: bests of groups, a threshold from them, and what reaches it.

Scores are never stored. `group_bests_kernel` computes each once and keeps the best of small groups of candidates; the
W-th best of a search's groups is a score that at least W candidates reach (`threshold_kernel`), so nothing below it can
be chosen; `collect_kernel` computes again, only where a group reaches the threshold, and lists what does: a little
more than W candidates, in any order, because the list is ranked afterwards. Early termination is that second pass: a
row, and a stretch of a long row, whose groups stay below is not read again.

A score is a key: the int32 that orders as the fp32 does. NOTHING, below every key, is no candidate. A list entry is
(key, place) in one int64 that sorts as the contract does, place being row x codes + code, and the node. Each search
has SEGMENTS lists with a room of its width + ROOM_BESIDES_WIDTH entries each; a counter may pass the room, its list is
then not complete and `select_rank_kernels` makes it anew.

Tiles: TILE_ROWS x TILE_COLUMNS candidates, columns being children of a row in the order of codes. A row of more
columns is several stretches; PARTS programs share them. A stretch has GROUPS groups, of interleaved columns, so that
a short row fills them evenly.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-(2**31))
LARGEST = tl.constexpr(2**31 - 1)
# rows x codes of a round fit into the lower half of an entry
LAST_PLACE = tl.constexpr(2**32 - 1)


@triton.jit
def ordered_key(score):
    """int32 keys that order as the finite fp32 scores do (no -0.0 among them), its own inverse on the bits."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def rows_of_tile(
    first_row,
    num_rows,
    num_searches,
    num_codes,
    score_ptr,
    node_ptr,
    search_ptr,
    rule_ptr,
    offset_ptr,
    alive_row_stride,
    IS_DENSE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Row, search, parent's score, first edge, number of children (0 for dead rows), start of its `alive` bits."""
    row_R = first_row + tl.arange(0, TILE_ROWS)
    is_row_R = row_R < num_rows
    search_R = tl.load(search_ptr + row_R, mask=is_row_R, other=num_searches)
    parent_R = tl.load(score_ptr + row_R, mask=is_row_R, other=float("-inf")) + 0.0
    is_live_R = (parent_R > float("-inf")) & (search_R < num_searches)
    node_R = tl.load(node_ptr + row_R, mask=is_live_R, other=0).to(tl.int64)
    rule_R = tl.load(rule_ptr + search_R, mask=is_live_R, other=0).to(tl.int64)
    if IS_DENSE:
        edge_R = node_R * num_codes
        count_R = tl.where(is_live_R, num_codes, 0)
    else:
        edge_R = tl.load(offset_ptr + node_R, mask=is_live_R, other=0).to(tl.int64)
        end_R = tl.load(offset_ptr + node_R + 1, mask=is_live_R, other=0).to(tl.int64)
        count_R = (end_R - edge_R).to(tl.int32)
    return row_R, search_R, parent_R, edge_R, count_R, rule_R * alive_row_stride


@triton.jit
def children_of_tile(
    first_column,
    row_R,
    edge_R,
    count_R,
    alive_R,
    logit_ptr,
    logit_row_stride,
    logit_column_stride,
    code_ptr,
    alive_ptr,
    IS_DENSE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Code, edge, logit and liveness of a stretch of children, each [TILE_ROWS, TILE_COLUMNS]."""
    column_RC = first_column + tl.arange(0, TILE_COLUMNS)[None, :] + count_R[:, None] * 0
    is_child_RC = column_RC < count_R[:, None]
    edge_RC = edge_R[:, None] + column_RC
    code_RC = column_RC if IS_DENSE else tl.load(code_ptr + edge_RC, mask=is_child_RC, other=0)
    alive_RC = tl.load(alive_ptr + alive_R[:, None] + edge_RC, mask=is_child_RC, other=0)
    place_RC = row_R.to(tl.int64)[:, None] * logit_row_stride
    place_RC += code_RC.to(tl.int64) * logit_column_stride
    logit_RC = tl.load(logit_ptr + place_RC, mask=is_child_RC, other=float("-inf"))
    return code_RC, edge_RC, logit_RC, is_child_RC & (alive_RC != 0)


@triton.jit
def keys_of_tile(parent_R, lse_R, logit_RC, is_alive_RC):
    """The key of each candidate, NOTHING where the child is dead or its score not finite."""
    score_RC = parent_R[:, None] + (logit_RC - lse_R[:, None])
    is_candidate_RC = is_alive_RC & (score_RC > float("-inf")) & (score_RC < float("inf"))
    return tl.where(is_candidate_RC, ordered_key(score_RC), NOTHING)


@triton.jit
def write_dead_rows(
    first,
    last,
    num_searches,
    search_ptr,
    parent_start_ptr,
    score_out_ptr,
    node_out_ptr,
    parent_out_ptr,
    code_out_ptr,
    TILE: tl.constexpr,
):
    """Child rows [first, last) as those of a search without candidates."""
    row_M = first + tl.arange(0, TILE)
    is_row_M = row_M < last
    search_M = tl.load(search_ptr + row_M, mask=is_row_M, other=num_searches)
    is_searched_M = search_M < num_searches
    parent_M = tl.load(parent_start_ptr + search_M, mask=is_searched_M, other=0)
    zero_M = tl.zeros([TILE], tl.int32)
    tl.store(score_out_ptr + row_M, zero_M.to(tl.float32) + float("-inf"), mask=is_row_M)
    tl.store(node_out_ptr + row_M, zero_M, mask=is_row_M)
    tl.store(parent_out_ptr + row_M, parent_M, mask=is_row_M)
    tl.store(code_out_ptr + row_M, zero_M, mask=is_row_M)


@triton.jit(do_not_specialize=["num_rows", "num_children", "num_searches"])
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
):
    """best[row, stretch, group]: the best key of a group. Each program also writes DEAD_ROWS child rows as dead."""
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


@triton.jit
def count_three(key_K, low, step):
    """How many keys reach low + step, + 2 step, + 3 step: three counts of 20 bits in one int64, so one reduction."""
    # no finite score has the key LARGEST, so a border beyond int32 is reached by none
    first = tl.minimum(low + step, LARGEST).to(tl.int32)
    second = tl.minimum(low + 2 * step, LARGEST).to(tl.int32)
    third = tl.minimum(low + 3 * step, LARGEST).to(tl.int32)
    count_K = (key_K >= first).to(tl.int64) + ((key_K >= second).to(tl.int64) << 20)
    return tl.sum(count_K + ((key_K >= third).to(tl.int64) << 40), axis=0)


@triton.jit
def keys_at(ptr, first, end, TILE: tl.constexpr):
    """TILE keys from `first` on, NOTHING from `end` on."""
    place_K = first + tl.arange(0, TILE)
    return tl.load(ptr + place_K, mask=place_K < end, other=NOTHING)


@triton.jit
def threshold_kernel(
    best_ptr,
    parent_start_ptr,
    child_start_ptr,
    threshold_ptr,
    count_ptr,
    BESTS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """threshold[s]: a key that at least W candidates of search s reach, or the least key; empties its lists.

    A search of keys that quarters their range at each step and ends as soon as the W-th best group is known but for an
    eighth of W: the threshold has to be safe, not exact.
    """
    search = tl.program_id(0)
    tl.store(count_ptr + search * SEGMENTS + tl.arange(0, SEGMENTS), tl.zeros([SEGMENTS], tl.int32))
    begin = tl.load(parent_start_ptr + search).to(tl.int64) * BESTS
    end = tl.load(parent_start_ptr + search + 1).to(tl.int64) * BESTS
    width = tl.load(child_start_ptr + search + 1) - tl.load(child_start_ptr + search)
    first_K = keys_at(best_ptr, begin, end, TILE)
    most = tl.max(first_K, axis=0)
    least = tl.min(tl.where(first_K == NOTHING, LARGEST, first_K), axis=0)
    num_low = tl.sum((first_K > NOTHING).to(tl.int32), axis=0)
    for at in range(begin + TILE, end, TILE):
        key_K = keys_at(best_ptr, at, end, TILE)
        most = tl.maximum(most, tl.max(key_K, axis=0))
        least = tl.minimum(least, tl.min(tl.where(key_K == NOTHING, LARGEST, key_K), axis=0))
        num_low += tl.sum((key_K > NOTHING).to(tl.int32), axis=0)
    # at least `width` groups reach low, fewer reach low + span
    low, span = least.to(tl.int64), most.to(tl.int64) + 1 - least
    is_short = num_low < width
    enough = width + width // 8
    while (span > 1) & (num_low > enough) & (width > 0) & (not is_short):
        step = (span + 3) // 4
        packed = count_three(first_K, low, step)
        num_1, num_2, num_3 = packed & 0xFFFFF, (packed >> 20) & 0xFFFFF, packed >> 40
        for at in range(begin + TILE, end, TILE):
            packed = count_three(keys_at(best_ptr, at, end, TILE), low, step)
            num_1 += packed & 0xFFFFF
            num_2 += (packed >> 20) & 0xFFFFF
            num_3 += packed >> 40
        num_safe = (num_1 >= width).to(tl.int32)
        num_safe += (num_2 >= width).to(tl.int32) + (num_3 >= width).to(tl.int32)
        num_low = tl.where(num_safe == 1, num_1.to(tl.int32), num_low)
        num_low = tl.where(num_safe == 2, num_2.to(tl.int32), num_low)
        num_low = tl.where(num_safe == 3, num_3.to(tl.int32), num_low)
        low += num_safe * step
        span = tl.minimum(step, span - num_safe * step)
    threshold = tl.where(is_short, NOTHING + 1, low.to(tl.int32))
    tl.store(threshold_ptr + search, tl.where(width == 0, LARGEST, threshold))


@triton.jit
def put_entries(
    is_kept,
    at,
    entry_ptr,
    node_out_ptr,
    key,
    row,
    code,
    edge,
    num_codes,
    child_ptr,
    IS_DENSE: tl.constexpr,
):
    """Write list entries where is_kept. Of one score the lower row, then the lower code, is the larger entry."""
    place = row.to(tl.int64) * num_codes + code
    node = tl.load(child_ptr + edge, mask=is_kept, other=0) if IS_DENSE else edge.to(tl.int32)
    tl.store(entry_ptr + at, (key.to(tl.int64) << 32) | (LAST_PLACE - place), mask=is_kept)
    tl.store(node_out_ptr + at, node, mask=is_kept)


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
):
    """List the candidates that reach their search's threshold; count all, also those that find no room."""
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
