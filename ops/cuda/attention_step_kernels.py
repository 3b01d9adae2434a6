"""What a computing warpgroup of the Hopper attention does: tiles of keys, the own tokens of its rows, and its results.

Letters: R query rows of a warpgroup, K keys of a tile, D head dim, X query heads of a KV head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = gl.constexpr(64)  # of a warpgroup: the rows of one matrix instruction
LEAST = gl.constexpr(-3.0e38)  # stands for the maximum of nothing: -inf - -inf would be NaN
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def weigh(
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
def step(
    q_s, q_empty, is_last, k_smem, v_smem, k_full, k_empty, v_full, v_empty, count, first, length, visible_R, scale_log2,
    weight_op, sum_RD, largest_R, total_R,
    D: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PART: gl.constexpr, IS_MASKED: gl.constexpr, TELLS: gl.constexpr,
    SCORES: gl.constexpr, SUMS: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Scores of tile number `count`, and beside their softmax the weighted values of the tile before."""
    k_stage = PART * K_STAGES + count % K_STAGES
    v_stage = PART * V_STAGES + count % V_STAGES
    before = PART * V_STAGES + (count - 1) % V_STAGES
    mbarrier.wait(k_full.index(k_stage), count // K_STAGES & 1)
    zero_RK = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    k_DK = k_smem.index(k_stage).reshape([KEYS, D]).permute((1, 0))
    score_token = warpgroup_mma(q_s, k_DK, zero_RK, use_acc=False, is_async=True)
    v_KD = v_smem.index(before).reshape([KEYS, D])
    sum_token = warpgroup_mma(weight_op, v_KD, sum_RD, is_async=True)
    score_RK = warpgroup_mma_wait(1, deps=[score_token])
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    if TELLS:
        mbarrier.arrive(q_empty, count=1, pred=is_last)
    base = gl.minimum(first, length - KEYS)
    weight_RK, decay_R, largest_R, total_R = weigh(
        score_RK, first, base, visible_R, scale_log2, largest_R, total_R, KEYS, IS_MASKED, SCORES
    )
    weight_op = gl.convert_layout(weight_RK.to(q_s.dtype), WEIGHTS)
    # This wait is for the next step. It stands here as a branch that keeps the assembler from moving the exponentials behind
    # the wait below, where nothing would run beside them.
    mbarrier.wait(v_full.index(v_stage), count // V_STAGES & 1)
    sum_RD, total_R = warpgroup_mma_wait(0, deps=[sum_token, total_R])
    mbarrier.arrive(v_empty.index(before), count=1)
    sum_RD = sum_RD * gl.convert_layout(decay_R, gl.SliceLayout(1, SUMS))[:, None]
    return weight_op, sum_RD, largest_R, total_R


@gluon.jit
def own_weights(
    q_s, own_k_s, num_tokens, scale_log2, X: gl.constexpr, OWN: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """Softmax over the own tokens of a warpgroup's rows alone: (weights for a product with their values, largest, total).

    OWN places a beam: a row sees those of its beam that are there.
    """
    KEYS: gl.constexpr = ROWS // X * OWN
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    rows_of_sums: gl.constexpr = gl.SliceLayout(1, SUMS)
    zero_RK = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    score_RK = warpgroup_mma(q_s, own_k_s.permute((1, 0)), zero_RK, use_acc=False)
    is_own_RK = _is_own(num_tokens, X, OWN, KEYS, SCORES)
    score_RK = gl.where(is_own_RK, score_RK, float("-inf"))
    largest_R = gl.maximum(gl.max(score_RK, 1) * scale_log2, LEAST)
    weight_RK = gl.exp2(score_RK * scale_log2 - largest_R[:, None])
    return (
        gl.convert_layout(weight_RK.to(q_s.dtype), WEIGHTS),
        gl.convert_layout(largest_R, rows_of_sums),
        gl.convert_layout(gl.sum(weight_RK, 1), rows_of_sums),
    )


@gluon.jit
def _is_own(
    num_tokens, X: gl.constexpr, OWN: gl.constexpr, KEYS: gl.constexpr, SCORES: gl.constexpr
):  # fmt: skip
    r_R = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    key_K = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    return (r_R[:, None] // X == key_K[None, :] // OWN) & (key_K[None, :] % OWN < num_tokens)


@gluon.jit
def keep_to_owners(
    own_v_s, num_tokens, total_R,
    X: gl.constexpr, D: gl.constexpr, OWN: gl.constexpr, COPIES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Own values that are not finite become 0, as 0 times them would be NaN in other beams' rows; the totals of those that
    own them, which are returned, become NaN. There are hardly ever any.
    """
    value_KD = own_v_s.load(COPIES).to(gl.float32)
    is_bad_KD = gl.where(gl.abs(value_KD) < float("inf"), 0, 1)
    is_bad_K = gl.max(is_bad_KD, 1)
    if gl.max(is_bad_K, 0) > 0:
        KEYS: gl.constexpr = ROWS // X * OWN
        SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
        own_v_s.store(gl.where(is_bad_KD > 0, 0.0, value_KD).to(own_v_s.dtype))
        column_K = gl.convert_layout(is_bad_K, gl.SliceLayout(0, SCORES))
        is_own_RK = _is_own(num_tokens, X, OWN, KEYS, SCORES)
        is_bad_R = gl.max(gl.where(is_own_RK, column_K[None, :], 0), 1)
        is_bad_R = gl.convert_layout(is_bad_R, gl.SliceLayout(1, SUMS))
        total_R = gl.where(is_bad_R > 0, float("nan"), total_R)
        fence_async_shared()
        gl.thread_barrier()
    return total_R


@gluon.jit
def last_values(v_s, v_empty, weight_op, sum_RD):
    """The sum with the weighted values of the last tile; who loads is told that they have been read."""
    sum_RD = warpgroup_mma(weight_op, v_s, sum_RD)
    mbarrier.arrive(v_empty, count=1)
    return sum_RD


@gluon.jit
def attend_tiles(
    q_s, q_empty, k_smem, v_smem, k_full, k_empty, v_full, v_empty, count, rows, length, first_r,
    begin_tile, masked_tile, end_tile, scale_log2, sum_RD, largest_R, total_R,
    X: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PART: gl.constexpr,
    IS_CAUSAL: gl.constexpr, TELLS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Take in the key tiles of an item, at least one, the last first: (weights, sum, largest, total).

    The weighted values of the last tile are not in the sum yet: `weights` are for its product. count: tiles before. PART: whose
    stages. TELLS: q_empty is told when the last tile has read the queries.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    rows_of_scores: gl.constexpr = gl.SliceLayout(1, SCORES)
    rows_of_sums: gl.constexpr = gl.SliceLayout(1, SUMS)
    row_R = first_r + gl.arange(0, ROWS, layout=rows_of_scores)
    visible_R = gl.zeros([ROWS], gl.int32, rows_of_scores) + length
    if IS_CAUSAL:
        visible_R = gl.minimum(visible_R, length - rows + row_R // X + 1)
    l_R = gl.convert_layout(largest_R, rows_of_scores)
    t_R = gl.convert_layout(total_R, rows_of_scores)
    # the first tile has no values of a tile before beside it
    k_stage = PART * K_STAGES + count % K_STAGES
    v_stage = PART * V_STAGES + count % V_STAGES
    first = (end_tile - 1) * KEYS
    mbarrier.wait(k_full.index(k_stage), count // K_STAGES & 1)
    zero_RK = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    k_DK = k_smem.index(k_stage).reshape([KEYS, D]).permute((1, 0))
    score_RK = warpgroup_mma(q_s, k_DK, zero_RK, use_acc=False)
    mbarrier.arrive(k_empty.index(k_stage), count=1)
    if TELLS:
        mbarrier.arrive(q_empty, count=1, pred=end_tile - begin_tile == 1)
    mbarrier.wait(v_full.index(v_stage), count // V_STAGES & 1)
    base = gl.minimum(first, length - KEYS)
    weight_RK, decay_R, l_R, t_R = weigh(
        score_RK, first, base, visible_R, scale_log2, l_R, t_R, KEYS, True, SCORES
    )
    sum_RD = sum_RD * gl.convert_layout(decay_R, rows_of_sums)[:, None]
    weight_op = gl.convert_layout(weight_RK.to(q_s.dtype), WEIGHTS)
    num_tiles = end_tile - begin_tile
    num_masked = gl.maximum(end_tile - masked_tile, 1)
    for i in range(1, num_masked):
        weight_op, sum_RD, l_R, t_R = step(
            q_s, q_empty, i == num_tiles - 1, k_smem, v_smem, k_full, k_empty, v_full, v_empty, count + i, first - i * KEYS, length,
            visible_R, scale_log2, weight_op, sum_RD, l_R, t_R, D, KEYS, K_STAGES, V_STAGES, PART, True, TELLS, SCORES, SUMS, WEIGHTS,
        )  # fmt: skip
    for i in range(num_masked, num_tiles):
        weight_op, sum_RD, l_R, t_R = step(
            q_s, q_empty, i == num_tiles - 1, k_smem, v_smem, k_full, k_empty, v_full, v_empty, count + i, first - i * KEYS, length,
            visible_R, scale_log2, weight_op, sum_RD, l_R, t_R, D, KEYS, K_STAGES, V_STAGES, PART, False, TELLS, SCORES, SUMS, WEIGHTS,
        )  # fmt: skip
    largest_R = gl.convert_layout(l_R, rows_of_sums)
    return weight_op, sum_RD, largest_R, gl.convert_layout(t_R, rows_of_sums)


@gluon.jit
def store_results(
    out_ptr, lse_ptr, place_s, sum_RD, largest_R, total_R, first_row, rows, num_rows, first_r, g, split,
    G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, IS_SPLIT: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Of a warpgroup's rows: in whole lines by way of place_s [ROWS, D], or as a part's fp32 results and their lse."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows_of_sums: gl.constexpr = gl.SliceLayout(1, SUMS)
    out_RD = sum_RD * (1.0 / gl.where(total_R == 0.0, 1.0, total_R))[:, None]
    if not IS_SPLIT:
        gl.thread_barrier()  # other warps may still read what was there
        place_s.store(out_RD.to(place_s.dtype))
        gl.thread_barrier()
        r_R = first_r + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES))
        d_D = gl.arange(0, D, layout=gl.SliceLayout(0, LINES))
        pair_R = (first_row + r_R // X).to(gl.int64) * (G * X) + g * X + r_R % X
        gl.store(
            out_ptr + pair_R[:, None] * D + d_D[None, :],
            place_s.load(LINES),
            mask=(r_R < rows * X)[:, None],
        )
    else:
        r_R = first_r + gl.arange(0, ROWS, layout=rows_of_sums)
        is_row_R = r_R < rows * X
        row_R = (split * num_rows + first_row + r_R // X).to(gl.int64)
        pair_R = row_R * (G * X) + g * X + r_R % X
        d_D = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
        gl.store(out_ptr + pair_R[:, None] * D + d_D[None, :], out_RD, mask=is_row_R[:, None])
        gl.store(lse_ptr + pair_R, largest_R * LN_2 + gl.log(total_R), mask=is_row_R)
