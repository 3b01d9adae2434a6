"""Attention of many query rows over a history in pages: the shared stage of beams, and the causal one of a prefill.

One program is a tile of query rows of one history and one KV head, and a part of the history's keys where those are
split. The query heads of a KV head are rows too (row r is packed row r // X, head r % X of the group), so that beams and
heads that share keys share every key tile that is loaded. Scores never leave the chip: a running maximum, a total and
a weighted sum per row, products on the tensor cores with fp32 sums.

Lengths and row starts are read from device memory. The grid is the most tiles that any lengths can need; a program finds
its history by counting tiles, which costs a few operations and lets one wide search stand beside many narrow ones.
The rows behind the last history are a segment of their own without keys, so nothing has to be filled before.

Key tiles that every row sees whole come first and need no mask; the masked rest loads zeros for what is not used, since
an unused slot of a page may hold NaN, and 0 * NaN would leak through the product. Where a page holds whole tiles one
entry of the page table is read a tile, else one a key, in either case a tile ahead, as the addresses of a tile's keys
wait for it. Where the grid would leave cores idle the keys of a tile are
split over programs, and a second kernel weighs the partial results by their log-sum-exp.

The row tile is chosen for the tensor core: 128 rows by 128 keys for 16-bit numbers, less where a row is longer; in fp32
the products are exact (`ieee`: no TF32), on the vector units, and tiles are small.

Letters: R query rows of a tile, K keys, G KV heads, X query heads of a KV head, D head dim, P (row, head) pairs;
*_PAD is the next power of two, of D at least 16, which a product needs.
"""

import triton
import triton.language as tl

from .own_tokens_kernels import attend_own

# Stands for the maximum of nothing, as in attention_kernels: -inf - -inf would be NaN.
LEAST: tl.constexpr = tl.constexpr(-3.0e38)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
PARTS: tl.constexpr = tl.constexpr(8)  # of the keys, which are joined at a time


@triton.jit
def _find_tile(
    tile,
    start_ptr,
    num_rows,
    num_histories,
    X: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """(history, its first packed row, its packed rows, the tile's first query row in it); a surplus tile has no rows.

    The segment behind the last history holds the rows of none.
    """
    h_S = tl.arange(0, SEGMENTS)
    first_S = tl.load(start_ptr + h_S, mask=h_S <= num_histories, other=0)
    end_S = tl.load(start_ptr + h_S + 1, mask=h_S < num_histories, other=0)
    end_S = tl.where(h_S == num_histories, num_rows, end_S)
    rows_S = tl.where(h_S <= num_histories, end_S - first_S, 0)
    tiles_S = (rows_S * X + TILE_ROWS - 1) // TILE_ROWS
    tiles_end_S = tl.cumsum(tiles_S, axis=0)
    history = tl.sum((tiles_end_S <= tile).to(tl.int32), axis=0)
    is_it_S = h_S == history
    first_row = tl.sum(tl.where(is_it_S, first_S, 0), axis=0)
    rows = tl.sum(tl.where(is_it_S, rows_S, 0), axis=0)
    first_tile = tl.sum(tl.where(is_it_S, tiles_end_S - tiles_S, 0), axis=0)
    return history, first_row, rows, (tile - first_tile) * TILE_ROWS


@triton.jit
def _page_of_keys(table_ptr, first, end, PAGE_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """The page of the keys first .. first + TILE_KEYS: one number where a page holds whole tiles, else one a key.

    Keys from `end` on get page 0, which their mask or the end of the loop keeps from being read.
    """
    if PAGE_SIZE % TILE_KEYS == 0:
        page = tl.load(table_ptr + first // PAGE_SIZE, mask=first < end, other=0)
    else:
        key_K = first + tl.arange(0, TILE_KEYS)
        page = tl.load(table_ptr + key_K // PAGE_SIZE, mask=key_K < end, other=0)
    return page


@triton.jit
def _attend(
    q_RD,
    k_ptr,
    v_ptr,
    page,
    first,
    end,
    visible_R,
    scale_log2,
    largest_R,
    total_R,
    sum_RD,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Take in the keys first .. first + TILE_KEYS; masked: row r sees those before visible[r], none is at `end` or behind."""
    d_D = tl.arange(0, D_PAD)
    key_K = first + tl.arange(0, TILE_KEYS)
    slot_K = page.to(tl.int64) * PAGE_SIZE + key_K % PAGE_SIZE
    offset_KD = slot_K[:, None] * (G * D) + d_D[None, :]
    is_used_KD = d_D[None, :] < D
    if IS_MASKED:
        is_used_KD = is_used_KD & (key_K[:, None] < end)
    if IS_MASKED or D != D_PAD:
        k_KD = tl.load(k_ptr + offset_KD, mask=is_used_KD, other=0.0)
    else:
        k_KD = tl.load(k_ptr + offset_KD)
    score_RK = tl.dot(q_RD, tl.trans(k_KD), input_precision="ieee")
    if IS_MASKED:
        score_RK = tl.where(key_K[None, :] < visible_R[:, None], score_RK, float("-inf"))
    new_largest_R = tl.maximum(largest_R, tl.max(score_RK, axis=1) * scale_log2)
    weight_RK = tl.exp2(score_RK * scale_log2 - new_largest_R[:, None])
    decay_R = tl.exp2(largest_R - new_largest_R)
    total_R = total_R * decay_R + tl.sum(weight_RK, axis=1)
    sum_RD = sum_RD * decay_R[:, None]
    if IS_MASKED or D != D_PAD:
        v_KD = tl.load(v_ptr + offset_KD, mask=is_used_KD, other=0.0)
    else:
        v_KD = tl.load(v_ptr + offset_KD)
    sum_RD = tl.dot(weight_RK.to(v_KD.dtype), v_KD, sum_RD, input_precision="ieee")
    return new_largest_R, total_R, sum_RD


# What differs between batches is no constant of the compiler: one kernel serves all captured graphs.
@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_histories",
        "num_tiles",
        "table_stride",
        "num_tokens",
        "num_splits",
    ]
)
def history_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    start_ptr,
    length_ptr,
    out_ptr,
    lse_ptr,
    k_rows_ptr,
    v_rows_ptr,
    slot_ptr,
    num_rows,
    num_histories,
    num_tiles,
    scale,
    table_stride,
    k_slot_stride,
    v_slot_stride,
    k_token_stride,
    v_token_stride,
    num_tokens,
    num_splits,
    IS_CAUSAL: tl.constexpr,
    HAS_OWN: tl.constexpr,
    HAS_LSE: tl.constexpr,
    G: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """out[split, n], lse[split, n]; programs are (split, KV head, tile of rows), the last running fastest.

    Causal: the rows of a history are its last tokens, each sees the tokens up to itself. Later tiles have more keys and
    start first. HAS_OWN: the first part of the keys begins with each row's own tokens.
    """
    program = tl.program_id(0)
    tile = program % num_tiles
    g = (program // num_tiles) % G
    split = program // (num_tiles * G)
    if IS_CAUSAL:
        tile = num_tiles - 1 - tile
    history, first_row, rows, first_r = _find_tile(
        tile, start_ptr, num_rows, num_histories, X, TILE_ROWS, SEGMENTS
    )
    length = tl.load(length_ptr + history, mask=history < num_histories, other=0)
    table_ptr += tl.cast(history, tl.int64) * table_stride

    r_R = first_r + tl.arange(0, TILE_ROWS)
    d_D = tl.arange(0, D_PAD)
    is_row_R = r_R < rows * X
    is_used_RD = is_row_R[:, None] & (d_D[None, :] < D)
    pair_R = (first_row + r_R // X).to(tl.int64) * (G * X) + g * X + r_R % X
    q_RD = tl.load(q_ptr + pair_R[:, None] * D + d_D[None, :], mask=is_used_RD, other=0.0)

    visible_R = tl.zeros((TILE_ROWS,), tl.int32) + length
    least = length  # keys that every row of the tile sees
    end = length  # keys that some row sees
    if IS_CAUSAL:
        before = length - rows
        visible_R = tl.minimum(visible_R, before + r_R // X + 1)
        least = tl.maximum(before + first_r // X + 1, 0)
        end = tl.minimum(length, before + (first_r + TILE_ROWS - 1) // X + 1)
    part = (end + TILE_KEYS * num_splits - 1) // (TILE_KEYS * num_splits) * TILE_KEYS
    begin = split * part
    end = tl.minimum(end, begin + part)
    end_whole = tl.maximum(begin, tl.minimum(end, least) // TILE_KEYS * TILE_KEYS)

    largest_R = tl.full((TILE_ROWS,), LEAST, tl.float32)
    total_R = tl.zeros((TILE_ROWS,), tl.float32)
    sum_RD = tl.zeros((TILE_ROWS, D_PAD), tl.float32)
    scale_log2 = scale * LOG2_E
    if HAS_OWN:  # noqa: SIM102 - a constant of the compiler
        if split == 0:
            largest_R, total_R, sum_RD = attend_own(
                q_RD, k_rows_ptr + g * D, v_rows_ptr + g * D, slot_ptr, first_row + r_R // X, is_row_R,
                k_slot_stride, v_slot_stride, k_token_stride, v_token_stride, num_tokens, scale_log2,
                largest_R, total_R, sum_RD, D, D_PAD,
            )  # fmt: skip
    k_ptr += g * D
    v_ptr += g * D
    page = _page_of_keys(table_ptr, begin, end, PAGE_SIZE, TILE_KEYS)
    for first in range(begin, end_whole, TILE_KEYS):
        next_page = _page_of_keys(table_ptr, first + TILE_KEYS, end, PAGE_SIZE, TILE_KEYS)
        largest_R, total_R, sum_RD = _attend(
            q_RD, k_ptr, v_ptr, page, first, end, visible_R, scale_log2, largest_R, total_R,
            sum_RD, G, D, D_PAD, PAGE_SIZE, TILE_KEYS, False,
        )  # fmt: skip
        page = next_page
    for first in range(end_whole, end, TILE_KEYS):
        next_page = _page_of_keys(table_ptr, first + TILE_KEYS, end, PAGE_SIZE, TILE_KEYS)
        largest_R, total_R, sum_RD = _attend(
            q_RD, k_ptr, v_ptr, page, first, end, visible_R, scale_log2, largest_R, total_R,
            sum_RD, G, D, D_PAD, PAGE_SIZE, TILE_KEYS, True,
        )  # fmt: skip
        page = next_page

    out_RD = sum_RD / tl.where(total_R == 0.0, 1.0, total_R)[:, None]
    pair_R += tl.cast(split, tl.int64) * num_rows * (G * X)
    tl.store(
        out_ptr + pair_R[:, None] * D + d_D[None, :],
        out_RD.to(out_ptr.dtype.element_ty),
        mask=is_used_RD,
    )
    if HAS_LSE:
        tl.store(lse_ptr + pair_R, largest_R * LN_2 + tl.log(total_R), mask=is_row_R)


@triton.jit(do_not_specialize=["num_pairs", "num_items", "num_splits"])
def combine_splits_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    num_pairs,
    num_items,
    num_splits,
    HAS_LSE: tl.constexpr,
    D: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """One result of num_splits over disjoint keys; TILE_PAIRS (row, head) pairs an item, all tensors contiguous.

    The largest comes first, so that no part waits for the one before it: PARTS of them are on their way at a time.
    """
    d_D = tl.arange(0, D_PAD)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        first_pair = tl.cast(item, tl.int64) * TILE_PAIRS
        pair_P = first_pair + tl.arange(0, TILE_PAIRS)
        is_pair_P = pair_P < num_pairs
        is_used_PD = is_pair_P[:, None] & (d_D[None, :] < D)
        largest_P = tl.full((TILE_PAIRS,), LEAST, tl.float32)
        # a scalar of the host's Python makes no mask in every interpreter: the part's number is compared as a vector
        no_part_P = tl.zeros((TILE_PAIRS,), tl.int32)
        for first in range(0, num_splits, PARTS):
            # element-wise, not a reduction over parts: a compiler pass gives up on one whose result is used several times
            for i in tl.static_range(PARTS):
                is_part_P = is_pair_P & (no_part_P + (first + i) < num_splits)
                lse_P = tl.load(
                    part_lse_ptr + tl.cast(first + i, tl.int64) * num_pairs + pair_P,
                    mask=is_part_P,
                    other=float("-inf"),
                )
                largest_P = tl.maximum(largest_P, lse_P)
        total_P = tl.zeros((TILE_PAIRS,), tl.float32)
        sum_PD = tl.zeros((TILE_PAIRS, D_PAD), tl.float32)
        for first in range(0, num_splits, PARTS):
            for i in tl.static_range(PARTS):
                is_part_P = is_pair_P & (no_part_P + (first + i) < num_splits)
                place_P = tl.cast(first + i, tl.int64) * num_pairs + pair_P
                lse_P = tl.load(part_lse_ptr + place_P, mask=is_part_P, other=float("-inf"))
                part_PD = tl.load(
                    part_ptr + place_P[:, None] * D + d_D[None, :],
                    mask=is_used_PD & is_part_P[:, None],
                    other=0.0,
                )
                weight_P = tl.exp(lse_P - largest_P)
                total_P += weight_P
                sum_PD += part_PD * weight_P[:, None]
        out_PD = sum_PD / tl.where(total_P == 0.0, 1.0, total_P)[:, None]
        tl.store(
            out_ptr + pair_P[:, None] * D + d_D[None, :],
            out_PD.to(out_ptr.dtype.element_ty),
            mask=is_used_PD,
        )
        if HAS_LSE:
            tl.store(lse_ptr + pair_P, largest_P + tl.log(total_P), mask=is_pair_P)
