"""What kernels of the search share: keys of scores, rows and children of a tile, entries of lists, rows without a candidate.

A score is a key: the int32 that orders as the fp32 does. NOTHING, below every key, is no candidate. An entry of a list is
(key, place) in one int64 that sorts as the contract does, place being row x codes + code, and the node.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-(2**31))
LARGEST = tl.constexpr(2**31 - 1)
# rows x codes of a round fit into the lower half of an entry
LAST_PLACE = tl.constexpr(2**32 - 1)


@triton.jit
def ordered_key(score):
    """int32 keys that order as the finite fp32 scores do (no -0.0 among them)."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def score_of_key(key):
    """The fp32 score of an `ordered_key`."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def rows_at(
    row_R,
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
):
    """Search, parent's score, first edge, number of children (0 for dead rows), start of its `alive` bits of each row."""
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
    return search_R, parent_R, edge_R, count_R, rule_R * alive_row_stride


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
    """TILE_ROWS rows from first_row on, and what `rows_at` says of them."""
    row_R = first_row + tl.arange(0, TILE_ROWS)
    search_R, parent_R, edge_R, count_R, alive_R = rows_at(
        row_R,
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
    )
    return row_R, search_R, parent_R, edge_R, count_R, alive_R


@triton.jit
def children_at(
    column_RC,
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
):
    """Code, edge, logit and liveness of the children number `column_RC` of their rows."""
    is_child_RC = column_RC < count_R[:, None]
    edge_RC = edge_R[:, None] + column_RC
    code_RC = column_RC if IS_DENSE else tl.load(code_ptr + edge_RC, mask=is_child_RC, other=0)
    alive_RC = tl.load(alive_ptr + alive_R[:, None] + edge_RC, mask=is_child_RC, other=0)
    place_RC = row_R.to(tl.int64)[:, None] * logit_row_stride
    place_RC += code_RC.to(tl.int64) * logit_column_stride
    logit_RC = tl.load(logit_ptr + place_RC, mask=is_child_RC, other=float("-inf"))
    return code_RC, edge_RC, logit_RC, is_child_RC & (alive_RC != 0)


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
    """Likewise of a stretch of children, each [TILE_ROWS, TILE_COLUMNS]."""
    column_RC = first_column + tl.arange(0, TILE_COLUMNS)[None, :] + count_R[:, None] * 0
    return children_at(
        column_RC,
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
    )


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
