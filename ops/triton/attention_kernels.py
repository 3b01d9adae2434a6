"""Kernels of the unshared attention stage and of the merge.

unshared: one item is a beam row and a tile of KV heads. Its queries stay on the chip, the slot's keys and values come
token by token, each token's heads as one contiguous run straight from the slot: nothing is gathered into a second
buffer. Traffic: queries and the slot's rows once, out and lse once. There are few tokens (levels - 1), hence a running
maximum over tokens and no matrix product: with one query row per head the cube unit or tensor core would idle.

merge: one item is a tile of (row, head) pairs. Where a side is empty the weights are selected, not computed, so that the
other passes bit for bit whatever exp and log round to.

Maxima propagate NaN: on a vector unit that is one operation, while the other rule takes compares and selects.

Letters: G KV heads, X query heads of a KV head, D head dim; *_PAD is the next power of two.
"""

import triton
import triton.language as tl

# Stands for the maximum of nothing: -inf - -inf would be NaN, exp(-inf - LEAST) is 0 and log(0) is -inf, as the ops want it.
LEAST: tl.constexpr = tl.constexpr(-3.0e38)
# The weight of a side that is empty, whose out is 0: the product is -0.0, and x + -0.0 is x for every x, -0.0 included.
# (A weight of -0.0 would say it plainly, but some releases of Triton make +0.0 of that constant.)
NO_WEIGHT: tl.constexpr = tl.constexpr(-1.0e-37)


@triton.jit
def _per_query_head(kv_HD, H: tl.constexpr, X_PAD: tl.constexpr, D_PAD: tl.constexpr):
    """fp32 [H * X_PAD, D_PAD]: every KV head's row once for each of its query heads.

    Two dims from here on: statistics are then one vector of all heads; as [heads, 2] each row is a vector of its own.
    """
    kv_HXD = tl.broadcast_to(kv_HD.to(tl.float32)[:, None, :], (H, X_PAD, D_PAD))
    return tl.reshape(kv_HXD, (H * X_PAD, D_PAD))


@triton.jit
def unshared_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    out_ptr,
    lse_ptr,
    num_items,
    scale,
    q_row_stride,
    k_slot_stride,
    v_slot_stride,
    k_token_stride,
    v_token_stride,
    NUM_TOKENS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    G: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    X_PAD: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """out[n], lse[n] of the first NUM_TOKENS tokens of slot[n]; items are (row n, tile of TILE_HEADS KV heads)."""
    x_X = tl.arange(0, X_PAD)
    d_D = tl.arange(0, D_PAD)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = tl.cast(item // NUM_TILES, tl.int64)
        g_H = (item % NUM_TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)
        is_head_HX = (g_H[:, None] < G) & (x_X[None, :] < X)
        is_q_HXD = is_head_HX[:, :, None] & (d_D[None, None, :] < D)
        is_kv_HD = (g_H[:, None] < G) & (d_D[None, :] < D)
        head_HX = g_H[:, None] * X + x_X[None, :]
        q_offset_HXD = head_HX[:, :, None] * D + d_D[None, None, :]
        kv_offset_HD = g_H[:, None] * D + d_D[None, :]

        q_HXD = tl.load(q_ptr + row * q_row_stride + q_offset_HXD, mask=is_q_HXD, other=0.0)
        q_QD = tl.reshape(q_HXD, (TILE_HEADS * X_PAD, D_PAD)).to(tl.float32) * scale
        slot = tl.load(slot_ptr + row).to(tl.int64)
        k_slot_ptr = k_ptr + slot * k_slot_stride
        v_slot_ptr = v_ptr + slot * v_slot_stride

        largest_Q = tl.full((TILE_HEADS * X_PAD,), LEAST, tl.float32)
        total_Q = tl.zeros((TILE_HEADS * X_PAD,), tl.float32)
        sum_QD = tl.zeros((TILE_HEADS * X_PAD, D_PAD), tl.float32)
        for token in range(NUM_TOKENS):
            k_HD = tl.load(
                k_slot_ptr + token * k_token_stride + kv_offset_HD, mask=is_kv_HD, other=0.0
            )
            v_HD = tl.load(
                v_slot_ptr + token * v_token_stride + kv_offset_HD, mask=is_kv_HD, other=0.0
            )
            score_Q = tl.sum(q_QD * _per_query_head(k_HD, TILE_HEADS, X_PAD, D_PAD), axis=1)
            new_largest_Q = tl.maximum(largest_Q, score_Q, propagate_nan=tl.PropagateNan.ALL)
            decay_Q = tl.exp(largest_Q - new_largest_Q)
            weight_Q = tl.exp(score_Q - new_largest_Q)
            total_Q = total_Q * decay_Q + weight_Q
            sum_QD = sum_QD * decay_Q[:, None]
            sum_QD += weight_Q[:, None] * _per_query_head(v_HD, TILE_HEADS, X_PAD, D_PAD)
            largest_Q = new_largest_Q

        # the largest score adds exp(0) to the total, which is hence 0 (no score above -inf), at least 1, or NaN
        divisor_Q = tl.maximum(total_Q, 0.5, propagate_nan=tl.PropagateNan.ALL)
        out_QD = sum_QD / divisor_Q[:, None]
        out_HXD = tl.reshape(out_QD.to(out_ptr.dtype.element_ty), (TILE_HEADS, X_PAD, D_PAD))
        tl.store(out_ptr + row * (G * X * D) + q_offset_HXD, out_HXD, mask=is_q_HXD)
        lse_HX = tl.reshape(largest_Q + tl.log(total_Q), (TILE_HEADS, X_PAD))
        tl.store(lse_ptr + row * (G * X) + head_HX, lse_HX, mask=is_head_HX)


@triton.jit
def merge_attention_states_kernel(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    num_pairs,
    num_items,
    D: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Merge TILE_PAIRS contiguous (row, head) pairs an item; all tensors are contiguous."""
    d_D = tl.arange(0, D_PAD)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        first = tl.cast(item, tl.int64) * TILE_PAIRS
        pair_P = tl.arange(0, TILE_PAIRS)
        is_pair_P = pair_P < num_pairs - item * TILE_PAIRS
        is_used_PD = is_pair_P[:, None] & (d_D[None, :] < D)
        offset_PD = pair_P[:, None] * D + d_D[None, :]
        lse_a_P = tl.load(lse_a_ptr + first + pair_P, mask=is_pair_P, other=0.0)
        lse_b_P = tl.load(lse_b_ptr + first + pair_P, mask=is_pair_P, other=0.0)
        a_PD = tl.load(out_a_ptr + first * D + offset_PD, mask=is_used_PD, other=0.0)
        b_PD = tl.load(out_b_ptr + first * D + offset_PD, mask=is_used_PD, other=0.0)
        a_PD = a_PD.to(tl.float32)
        b_PD = b_PD.to(tl.float32)

        is_a_empty_P = lse_a_P == float("-inf")
        is_b_empty_P = lse_b_P == float("-inf")
        largest_P = tl.maximum(lse_a_P, lse_b_P, propagate_nan=tl.PropagateNan.ALL)
        largest_P = tl.maximum(largest_P, LEAST, propagate_nan=tl.PropagateNan.ALL)
        weight_a_P = tl.exp(lse_a_P - largest_P)
        weight_b_P = tl.exp(lse_b_P - largest_P)
        # at least 1 unless both sides are empty
        total_P = weight_a_P + weight_b_P
        total_P = tl.maximum(total_P, 1.0, propagate_nan=tl.PropagateNan.ALL)
        only_b_P = tl.where(is_b_empty_P, 0.0, NO_WEIGHT)
        only_a_P = tl.where(is_b_empty_P, 1.0, weight_a_P / total_P)
        share_a_P = tl.where(is_a_empty_P, only_b_P, only_a_P)
        share_b_P = tl.where(is_a_empty_P, 1.0, weight_b_P / total_P)
        share_b_P = tl.where(is_b_empty_P, NO_WEIGHT, share_b_P)
        merged_PD = a_PD * share_a_P[:, None] + b_PD * share_b_P[:, None]
        merged_lse_P = tl.where(is_a_empty_P, lse_b_P, largest_P + tl.log(total_P))
        merged_lse_P = tl.where(is_b_empty_P, lse_a_P, merged_lse_P)
        tl.store(
            out_ptr + first * D + offset_PD,
            merged_PD.to(out_ptr.dtype.element_ty),
            mask=is_used_PD,
        )
        tl.store(lse_ptr + first + pair_P, merged_lse_P, mask=is_pair_P)
