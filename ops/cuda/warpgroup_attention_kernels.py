"""Attention over paged histories for NVIDIA's Hopper generation: loading warps, and two warpgroups that compute.

The same attention as ops/triton's history_attention_kernels, cut for a chip whose tensor cores take their operands from
shared memory and work while the threads that started them go on. Written in Gluon, as it needs what Triton's own
language leaves to the compiler: which warp does what, and what waits for what.

A program is one core's (persistent) and takes items from a list that follows from the lengths in device memory: an item
is 128 query rows (beams or tokens times the X query heads of a KV head) of one history and one KV head, and a part of
the keys where the grid would leave cores idle. One warp copies key tiles with the copy engine, as far ahead as there is
room, over the border of items too. Two warps, one for each warpgroup, copy the queries and the beams' own tokens of the
next item as soon as there is room. Each warpgroup has 64 of the rows and takes every tile:

    scores of tile j + 1 start | weighted values of tile j start | softmax of j + 1 while the latter still run

so the tensor cores have work while the exponentials are computed, and the two warpgroups drift apart by themselves.

Keys go last tile first, so that all masks (the end of a history, the diagonal of a prefill) are in the first tiles.
Slots behind a history's end may hold NaN, which no mask keeps out of a product: the last tile is read from further ahead
so that it ends where the history does; what would lie before its page the copy engine fills with zeros.

The beams' own tokens are a tile of keys as well, those of 64 rows side by side, in which each row sees its beam's.

Every buffer has a barrier that says it is full and one that says it is empty; both count phases, and whoever waits knows
from the number of tiles or items before which phase he waits for.

Letters: R query rows of a warpgroup, K keys, S histories (padded), D head dim, G KV heads, X query heads of a KV head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LEAST = gl.constexpr(-3.0e38)  # stands for the maximum of nothing: -inf - -inf would be NaN
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a warpgroup: the rows of one matrix instruction
CHUNK = gl.constexpr(16)  # rows that a loading warp copies at once: few, as it has few registers


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _items_end(
    start_ptr, length_ptr, num_rows, num_histories, num_splits, X: gl.constexpr, G: gl.constexpr,
    SEGMENTS: gl.constexpr, WITH_REST: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """(index, first row, rows, length, tiles, end of the items) of each history, and how many items there are.

    WITH_REST: the rows behind the last history are a segment of their own, without keys.
    """
    layout: gl.constexpr = gl.BlockedLayout([SEGMENTS // 32], [32], [NUM_WARPS], [0])
    h_S = gl.arange(0, SEGMENTS, layout=layout)
    first_S = gl.load(start_ptr + h_S, mask=h_S <= num_histories, other=0)
    end_S = gl.load(start_ptr + h_S + 1, mask=h_S < num_histories, other=0)
    length_S = gl.load(length_ptr + h_S, mask=h_S < num_histories, other=0)
    if WITH_REST:
        end_S = gl.where(h_S == num_histories, num_rows, end_S)
        rows_S = gl.where(h_S <= num_histories, end_S - first_S, 0)
    else:
        rows_S = gl.where(h_S < num_histories, end_S - first_S, 0)
    tiles_S = (rows_S * X + 2 * ROWS - 1) // (2 * ROWS)
    items_S = tiles_S * (G * num_splits)
    return (
        h_S,
        first_S,
        rows_S,
        length_S,
        tiles_S,
        gl.associative_scan(items_S, 0, _add),
        gl.sum(items_S, 0),
    )


@gluon.jit
def _item(
    k, num_items, num_splits, h_S, first_S, rows_S, length_S, tiles_S, items_end_S,
    X: gl.constexpr, G: gl.constexpr, IS_CAUSAL: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """The k-th item of this program.

    Returns:
        (history, its first packed row, its packed rows, 0 where there is no item, its length, the item's first query row,
        KV head, split, first key tile, first key tile with a mask, key tiles' end).
    """
    c = gl.program_id(0)
    num_programs = gl.num_programs(0)
    # Causal items get shorter along the list: every other round is dealt backwards.
    if IS_CAUSAL:
        c = gl.where(k % 2 == 1, num_programs - 1 - c, c)
    item = k * num_programs + c
    history = gl.sum((items_end_S <= item).to(gl.int32), 0)
    is_it_S = h_S == history
    first_row = gl.sum(gl.where(is_it_S, first_S, 0), 0)
    rows = gl.sum(gl.where(is_it_S, rows_S, 0), 0)
    length = gl.sum(gl.where(is_it_S, length_S, 0), 0)
    tiles = gl.sum(gl.where(is_it_S, tiles_S, 0), 0)
    rest = item - gl.sum(gl.where(is_it_S, items_end_S, 0), 0) + tiles * (G * num_splits)
    tiles = gl.maximum(tiles, 1)
    if IS_CAUSAL:
        split = 0
        g = rest % G
        tile = tiles - 1 - rest // G
    else:
        split = rest // (tiles * G)
        g = rest // tiles % G
        tile = rest % tiles
    # The last round need not be full; there the numbers above mean nothing, and a row below 0 would pass for one of 0.
    first_r = gl.where(item < num_items, tile, 0) * (2 * ROWS)
    rows = gl.where(item < num_items, rows, 0)
    end = length
    least = length
    if IS_CAUSAL:
        before = length - rows
        end = gl.minimum(length, before + (first_r + 2 * ROWS - 1) // X + 1)
        least = gl.maximum(before + first_r // X + 1, 0)
    end = gl.where(item < num_items, end, 0)
    num_tiles = (end + KEYS - 1) // KEYS
    part = (num_tiles + num_splits - 1) // num_splits
    begin_tile = gl.minimum(split * part, num_tiles)
    end_tile = gl.minimum(begin_tile + part, num_tiles)
    masked_tile = gl.maximum(begin_tile, gl.minimum(end_tile, gl.minimum(end, least) // KEYS))
    return history, first_row, rows, length, first_r, g, split, begin_tile, masked_tile, end_tile


@gluon.jit
def _load_tiles(
    k_desc, v_desc, table_ptr, start_ptr, length_ptr, num_rows, num_histories, num_splits, table_stride,
    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr, SEGMENTS: gl.constexpr, WITH_REST: gl.constexpr,
):  # fmt: skip
    """The warp that loads keys and values: every tile of every item, in the order in which they are used."""
    h_S, first_S, rows_S, length_S, tiles_S, items_end_S, num_items = _items_end(
        start_ptr, length_ptr, num_rows, num_histories, num_splits, X, G, SEGMENTS, WITH_REST, 1
    )  # fmt: skip
    count = 0
    for k in range(0, gl.cdiv(num_items, gl.num_programs(0))):
        history, _f, _r, length, _q, g, _s, begin_tile, _m, end_tile = _item(
            k,
            num_items,
            num_splits,
            h_S,
            first_S,
            rows_S,
            length_S,
            tiles_S,
            items_end_S,
            X,
            G,
            IS_CAUSAL,
            KEYS,
        )
        pages = table_ptr + history.to(gl.int64) * table_stride
        for i in range(0, end_tile - begin_tile):
            first = (end_tile - 1 - i) * KEYS
            place = first // PAGE_SIZE
            page = gl.load(pages + place)
            row = gl.minimum(first, length - KEYS) - place * PAGE_SIZE
            stage = count % STAGES
            phase = (count // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), KEYS * D * 2)
            tma.async_copy_global_to_shared(
                k_desc, [page, row, g * D], k_full.index(stage), k_smem.index(stage)
            )
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), KEYS * D * 2)
            tma.async_copy_global_to_shared(
                v_desc, [page, row, g * D], v_full.index(stage), v_smem.index(stage)
            )
            count += 1


@gluon.jit
def _copy_own(
    own_s, own_ptr, slot_ptr, slot_stride, token_stride, first_row, rows, first_r, g, num_tokens,
    X: gl.constexpr, D: gl.constexpr, OWN: gl.constexpr, COPIES: gl.constexpr,
):  # fmt: skip
    """Own keys or values of the beams of 64 query rows into own_s [64 // X * OWN, D]; zeros where there are none."""
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, COPIES))
    for c in gl.static_range(ROWS // X * OWN // CHUNK):
        key_C = c * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, COPIES))
        n_C = first_r // X + key_C // OWN
        token_C = key_C % OWN
        is_key_C = (n_C < rows) & (token_C < num_tokens)
        slot_C = gl.load(slot_ptr + first_row + n_C, mask=is_key_C, other=0).to(gl.int64)
        offset_C = slot_C * slot_stride + token_C * token_stride + g * D
        async_copy.async_copy_global_to_shared(
            own_s.slice(c * CHUNK, CHUNK),
            own_ptr + offset_C[:, None] + d_D[None, :],
            mask=is_key_C[:, None],
        )


@gluon.jit
def _say_full(barrier):
    """After copies: when they are done and the tensor cores can see them."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _load_rows(
    q_ptr, start_ptr, length_ptr, num_rows, num_histories, num_splits,
    k_rows_ptr, v_rows_ptr, slot_ptr, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride, num_tokens,
    q_smem, own_k_smem, own_v_smem, row_bars,
    WHICH: gl.constexpr, G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr,
    IS_CAUSAL: gl.constexpr, OWN: gl.constexpr, SEGMENTS: gl.constexpr, WITH_REST: gl.constexpr,
):  # fmt: skip
    """The warp that loads a warpgroup's queries and own tokens, those of the next item as soon as there is room.

    row_bars: q full, q empty, own keys full, empty, own values full, empty, of each warpgroup.
    """
    COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [1, 1], [1, 0])
    h_S, first_S, rows_S, length_S, tiles_S, items_end_S, num_items = _items_end(
        start_ptr, length_ptr, num_rows, num_histories, num_splits, X, G, SEGMENTS, WITH_REST, 1
    )  # fmt: skip
    q_s = q_smem.index(WHICH)
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, COPIES))
    num_own = 0
    for k in range(0, gl.cdiv(num_items, gl.num_programs(0))):
        _h, first_row, rows, _l, first_r, g, split, _b, _m, _e = _item(
            k,
            num_items,
            num_splits,
            h_S,
            first_S,
            rows_S,
            length_S,
            tiles_S,
            items_end_S,
            X,
            G,
            IS_CAUSAL,
            KEYS,
        )
        first_r += WHICH * ROWS
        phase = (k & 1) ^ 1
        own_phase = (num_own & 1) ^ 1
        if OWN > 0:  # noqa: SIM102 - a constant of the compiler
            if split == 0:
                mbarrier.wait(row_bars.index(WHICH * 6 + 3), own_phase)
                _copy_own(
                    own_k_smem.index(WHICH), k_rows_ptr, slot_ptr, k_slot_stride, k_token_stride,
                    first_row, rows, first_r, g, num_tokens, X, D, OWN, COPIES,
                )  # fmt: skip
                _say_full(row_bars.index(WHICH * 6 + 2))
        mbarrier.wait(row_bars.index(WHICH * 6 + 1), phase)
        for c in gl.static_range(ROWS // CHUNK):
            r_C = first_r + c * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, COPIES))
            pair_C = (first_row + r_C // X).to(gl.int64) * (G * X) + g * X + r_C % X
            async_copy.async_copy_global_to_shared(
                q_s.slice(c * CHUNK, CHUNK),
                q_ptr + pair_C[:, None] * D + d_D[None, :],
                mask=(r_C < rows * X)[:, None],
            )
        _say_full(row_bars.index(WHICH * 6))
        if OWN > 0:  # noqa: SIM102 - as above
            if split == 0:
                # every item ends with its results where the own values were
                mbarrier.wait(row_bars.index(WHICH * 6 + 5), phase)
                _copy_own(
                    own_v_smem.index(WHICH).slice(0, ROWS // X * OWN), v_rows_ptr, slot_ptr, v_slot_stride, v_token_stride,
                    first_row, rows, first_r, g, num_tokens, X, D, OWN, COPIES,
                )  # fmt: skip
                _say_full(row_bars.index(WHICH * 6 + 4))
                num_own += 1


@gluon.jit
def _weigh(
    score_RK, first, base, visible_R, scale_log2, largest_R, total_R,
    KEYS: gl.constexpr, IS_MASKED: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Softmax weights of a tile of scores: (weights, factor of what was summed before, largest, total).

    Masked: the tile's keys are base, base + 1, ..; row r sees those from `first` and before visible[r].
    """
    if IS_MASKED:
        key_K = base + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        is_seen_RK = (key_K[None, :] >= first) & (key_K[None, :] < visible_R[:, None])
        score_RK = gl.where(is_seen_RK, score_RK, float("-inf"))
    new_largest_R = gl.maximum(largest_R, gl.max(score_RK, 1) * scale_log2)
    weight_RK = gl.exp2(score_RK * scale_log2 - new_largest_R[:, None])
    decay_R = gl.exp2(largest_R - new_largest_R)
    return weight_RK, decay_R, new_largest_R, total_R * decay_R + gl.sum(weight_RK, 1)


@gluon.jit
def _step(
    q_s, k_smem, v_smem, k_full, k_empty, v_full, v_empty, count, first, length, visible_R, scale_log2,
    weight_op, sum_RD, largest_R, total_R,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, IS_MASKED: gl.constexpr,
    SCORES: gl.constexpr, SUMS: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Scores of tile number `count`, and beside their softmax the weighted values of the tile before."""
    stage = count % STAGES
    before = (count - 1) % STAGES
    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
    zero_RK = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    k_DK = k_smem.index(stage).reshape([KEYS, D]).permute((1, 0))
    score_token = warpgroup_mma(q_s, k_DK, zero_RK, use_acc=False, is_async=True)
    v_KD = v_smem.index(before).reshape([KEYS, D])
    sum_token = warpgroup_mma(weight_op, v_KD, sum_RD, is_async=True)
    score_RK = warpgroup_mma_wait(1, deps=[score_token])
    mbarrier.arrive(k_empty.index(stage), count=1)
    base = gl.minimum(first, length - KEYS)
    weight_RK, decay_R, largest_R, total_R = _weigh(
        score_RK, first, base, visible_R, scale_log2, largest_R, total_R, KEYS, IS_MASKED, SCORES
    )
    # This wait is for the next step. It stands here as a branch that keeps the assembler from moving the exponentials behind
    # the wait below, where nothing would run beside them.
    mbarrier.wait(v_full.index(stage), count // STAGES & 1)
    sum_RD, total_R = warpgroup_mma_wait(0, deps=[sum_token, total_R])
    mbarrier.arrive(v_empty.index(before), count=1)
    sum_RD = sum_RD * gl.convert_layout(decay_R, gl.SliceLayout(1, SUMS))[:, None]
    weight_op = gl.convert_layout(weight_RK.to(q_s.dtype), WEIGHTS)
    return weight_op, sum_RD, largest_R, total_R


@gluon.jit
def _own_tokens(
    q_s, own_k_s, own_v_s, row_bars, num_own, num_tokens, scale_log2,
    WHICH: gl.constexpr, X: gl.constexpr, D: gl.constexpr, OWN: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """(weighted values, largest, total) over the own tokens of a warpgroup's rows."""
    KEYS: gl.constexpr = ROWS // X * OWN
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    rows_of_sums: gl.constexpr = gl.SliceLayout(1, SUMS)
    phase = num_own & 1
    mbarrier.wait(row_bars.index(WHICH * 6 + 2), phase)
    zero_RK = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    score_RK = warpgroup_mma(q_s, own_k_s.permute((1, 0)), zero_RK, use_acc=False)
    mbarrier.arrive(row_bars.index(WHICH * 6 + 3), count=1)
    r_R = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    key_K = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    is_own_RK = (r_R[:, None] // X == key_K[None, :] // OWN) & (key_K[None, :] % OWN < num_tokens)
    score_RK = gl.where(is_own_RK, score_RK, float("-inf"))
    largest_R = gl.max(score_RK, 1) * scale_log2
    weight_RK = gl.exp2(score_RK * scale_log2 - largest_R[:, None])
    total_R = gl.sum(weight_RK, 1)
    weight_op = gl.convert_layout(weight_RK.to(q_s.dtype), WEIGHTS)
    mbarrier.wait(row_bars.index(WHICH * 6 + 4), phase)
    zero_RD = gl.zeros([ROWS, D], gl.float32, SUMS)
    sum_RD = warpgroup_mma(weight_op, own_v_s, zero_RD, use_acc=False)
    return (
        sum_RD,
        gl.convert_layout(largest_R, rows_of_sums),
        gl.convert_layout(total_R, rows_of_sums),
    )


@gluon.jit
def _compute(
    out_ptr, lse_ptr, start_ptr, length_ptr, num_rows, num_histories, num_splits, scale,
    num_tokens, q_smem, own_k_smem, own_v_smem, row_bars, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    WHICH: gl.constexpr, G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    IS_SPLIT: gl.constexpr, IS_CAUSAL: gl.constexpr, OWN: gl.constexpr, SEGMENTS: gl.constexpr, WITH_REST: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: rows WHICH * 64 .. of every item."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows_of_scores: gl.constexpr = gl.SliceLayout(1, SCORES)
    rows_of_sums: gl.constexpr = gl.SliceLayout(1, SUMS)
    h_S, first_S, rows_S, length_S, tiles_S, items_end_S, num_items = _items_end(
        start_ptr, length_ptr, num_rows, num_histories, num_splits, X, G, SEGMENTS, WITH_REST, 4
    )  # fmt: skip
    scale_log2 = scale * LOG2_E
    q_s = q_smem.index(WHICH)
    own_v_s = own_v_smem.index(WHICH)
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, LOADS))
    count = 0
    num_own = 0
    for k in range(0, gl.cdiv(num_items, gl.num_programs(0))):
        _h, first_row, rows, length, first_r, g, split, begin_tile, masked_tile, end_tile = _item(
            k,
            num_items,
            num_splits,
            h_S,
            first_S,
            rows_S,
            length_S,
            tiles_S,
            items_end_S,
            X,
            G,
            IS_CAUSAL,
            KEYS,
        )
        first_r += WHICH * ROWS
        mbarrier.wait(row_bars.index(WHICH * 6), k & 1)
        largest_R = gl.full([ROWS], LEAST, gl.float32, rows_of_sums)
        total_R = gl.zeros([ROWS], gl.float32, rows_of_sums)
        sum_RD = gl.zeros([ROWS, D], gl.float32, SUMS)
        if OWN > 0:  # noqa: SIM102 - a constant of the compiler
            if split == 0:
                sum_RD, largest_R, total_R = _own_tokens(
                    q_s, own_k_smem.index(WHICH), own_v_s.slice(0, ROWS // X * OWN), row_bars, num_own, num_tokens,
                    scale_log2, WHICH, X, D, OWN, SUMS,
                )  # fmt: skip
                num_own += 1
        if end_tile > begin_tile:
            row_R = first_r + gl.arange(0, ROWS, layout=rows_of_scores)
            visible_R = gl.zeros([ROWS], gl.int32, rows_of_scores) + length
            if IS_CAUSAL:
                visible_R = gl.minimum(visible_R, length - rows + row_R // X + 1)
            l_R = gl.convert_layout(largest_R, rows_of_scores)
            t_R = gl.convert_layout(total_R, rows_of_scores)
            # the first tile has no values of a tile before beside it
            stage = count % STAGES
            first = (end_tile - 1) * KEYS
            mbarrier.wait(k_full.index(stage), count // STAGES & 1)
            zero_RK = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
            k_DK = k_smem.index(stage).reshape([KEYS, D]).permute((1, 0))
            score_RK = warpgroup_mma(q_s, k_DK, zero_RK, use_acc=False)
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.wait(v_full.index(stage), count // STAGES & 1)
            weight_RK, decay_R, l_R, t_R = _weigh(
                score_RK,
                first,
                gl.minimum(first, length - KEYS),
                visible_R,
                scale_log2,
                l_R,
                t_R,
                KEYS,
                True,
                SCORES,
            )
            sum_RD = sum_RD * gl.convert_layout(decay_R, rows_of_sums)[:, None]
            weight_op = gl.convert_layout(weight_RK.to(q_s.dtype), WEIGHTS)
            num_tiles = end_tile - begin_tile
            num_masked = gl.maximum(end_tile - masked_tile, 1)
            for i in range(1, num_masked):
                weight_op, sum_RD, l_R, t_R = _step(
                    q_s, k_smem, v_smem, k_full, k_empty, v_full, v_empty, count + i, first - i * KEYS, length,
                    visible_R, scale_log2, weight_op, sum_RD, l_R, t_R, D, KEYS, STAGES, True, SCORES, SUMS, WEIGHTS,
                )  # fmt: skip
            for i in range(num_masked, num_tiles):
                weight_op, sum_RD, l_R, t_R = _step(
                    q_s, k_smem, v_smem, k_full, k_empty, v_full, v_empty, count + i, first - i * KEYS, length,
                    visible_R, scale_log2, weight_op, sum_RD, l_R, t_R, D, KEYS, STAGES, False, SCORES, SUMS, WEIGHTS,
                )  # fmt: skip
            mbarrier.arrive(row_bars.index(WHICH * 6 + 1), count=1)
            count += num_tiles
            last = (count - 1) % STAGES
            sum_RD = warpgroup_mma(weight_op, v_smem.index(last).reshape([KEYS, D]), sum_RD)
            mbarrier.arrive(v_empty.index(last), count=1)
            largest_R = gl.convert_layout(l_R, rows_of_sums)
            total_R = gl.convert_layout(t_R, rows_of_sums)
        else:
            mbarrier.arrive(row_bars.index(WHICH * 6 + 1), count=1)

        out_RD = sum_RD / gl.where(total_R == 0.0, 1.0, total_R)[:, None]
        if not IS_SPLIT:
            own_v_s.store(out_RD.to(q_s.dtype))
            gl.thread_barrier()
            r_R = first_r + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADS))
            pair_R = (first_row + r_R // X).to(gl.int64) * (G * X) + g * X + r_R % X
            gl.store(
                out_ptr + pair_R[:, None] * D + d_D[None, :],
                own_v_s.load(LOADS),
                mask=(r_R < rows * X)[:, None],
            )
        else:
            row_R = first_r + gl.arange(0, ROWS, layout=rows_of_sums)
            is_out_R = row_R < rows * X
            to_R = (
                (split * num_rows + first_row + row_R // X).to(gl.int64) * (G * X)
                + g * X
                + row_R % X
            )
            column_D = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
            gl.store(
                out_ptr + to_R[:, None] * D + column_D[None, :], out_RD, mask=is_out_R[:, None]
            )
            gl.store(lse_ptr + to_R, largest_R * LN_2 + gl.log(total_R), mask=is_out_R)
        mbarrier.arrive(row_bars.index(WHICH * 6 + 5), count=1)


# A kernel for all batches: what differs between them is no constant of the compiler.
@gluon.jit(
    do_not_specialize=[
        "num_rows",
        "num_histories",
        "table_stride",
        "num_tokens",
        "num_splits",
        "scale",
    ]
)
def warpgroup_attention_kernel(
    k_desc,
    v_desc,
    q_ptr,
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
    table_stride,
    k_slot_stride,
    v_slot_stride,
    k_token_stride,
    v_token_stride,
    num_tokens,
    num_splits,
    scale,
    IS_SPLIT: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    OWN: gl.constexpr,
    WITH_REST: gl.constexpr,
    G: gl.constexpr,
    X: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SEGMENTS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out[n], or with splits out[split, n] and lse[split, n]; OWN: own tokens a beam at most, 0 without."""
    dtype: gl.constexpr = k_desc.dtype
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, D], rows_layout)
    own_v_smem = gl.allocate_shared_memory(dtype, [2, ROWS, D], rows_layout)
    own_k_smem = own_v_smem
    if OWN > 0:
        own_k_smem = gl.allocate_shared_memory(dtype, [2, ROWS // X * OWN, D], rows_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, D], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    row_bars = gl.allocate_shared_memory(gl.int64, [12, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
        mbarrier.init(v_empty.index(s), count=2)
    for s in gl.static_range(12):
        mbarrier.init(row_bars.index(s), count=1)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_compute, (
                out_ptr, lse_ptr, start_ptr, length_ptr, num_rows, num_histories, num_splits, scale,
                num_tokens, q_smem, own_k_smem, own_v_smem, row_bars, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                0, G, X, D, KEYS, STAGES, IS_SPLIT, IS_CAUSAL, OWN, SEGMENTS, WITH_REST,
            )),
            (_compute, (
                out_ptr, lse_ptr, start_ptr, length_ptr, num_rows, num_histories, num_splits, scale,
                num_tokens, q_smem, own_k_smem, own_v_smem, row_bars, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                1, G, X, D, KEYS, STAGES, IS_SPLIT, IS_CAUSAL, OWN, SEGMENTS, WITH_REST,
            )),
            (_load_tiles, (
                k_desc, v_desc, table_ptr, start_ptr, length_ptr, num_rows, num_histories, num_splits, table_stride,
                k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                G, X, D, PAGE_SIZE, KEYS, STAGES, IS_CAUSAL, SEGMENTS, WITH_REST,
            )),
            (_load_rows, (
                q_ptr, start_ptr, length_ptr, num_rows, num_histories, num_splits,
                k_rows_ptr, v_rows_ptr, slot_ptr, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride, num_tokens,
                q_smem, own_k_smem, own_v_smem, row_bars,
                0, G, X, D, KEYS, IS_CAUSAL, OWN, SEGMENTS, WITH_REST,
            )),
            (_load_rows, (
                q_ptr, start_ptr, length_ptr, num_rows, num_histories, num_splits,
                k_rows_ptr, v_rows_ptr, slot_ptr, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride, num_tokens,
                q_smem, own_k_smem, own_v_smem, row_bars,
                1, G, X, D, KEYS, IS_CAUSAL, OWN, SEGMENTS, WITH_REST,
            )),
        ],
        [4, 1, 1, 1],
        [232, 40, 40, 40],
    )  # fmt: skip
