"""A beam's own tokens, as the first keys that a tile of query rows sees.

Each row has keys of its own, so there is no product of matrices: a token is a row of elementwise products. Rows of one beam
(the query heads of a KV head) read the same memory.

Letters: R query rows of a tile, D head dim, X query heads of a KV head.
"""

import triton
import triton.language as tl


@triton.jit
def attend_own(
    q_RD,
    k_ptr,
    v_ptr,
    slot_ptr,
    row_R,
    is_row_R,
    k_slot_stride,
    v_slot_stride,
    k_token_stride,
    v_token_stride,
    num_tokens,
    scale_log2,
    largest_R,
    total_R,
    sum_RD,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Take in the tokens of slot[row[r]]; the pointers are at the KV head. Returns (largest, total, sum), base 2."""
    d_D = tl.arange(0, D_PAD)
    is_used_RD = is_row_R[:, None] & (d_D[None, :] < D)
    slot_R = tl.load(slot_ptr + row_R, mask=is_row_R, other=0).to(tl.int64)
    for token in range(0, num_tokens):
        k_offset_R = slot_R * k_slot_stride + token * k_token_stride
        v_offset_R = slot_R * v_slot_stride + token * v_token_stride
        k_RD = tl.load(k_ptr + k_offset_R[:, None] + d_D[None, :], mask=is_used_RD, other=0.0)
        v_RD = tl.load(v_ptr + v_offset_R[:, None] + d_D[None, :], mask=is_used_RD, other=0.0)
        score_R = tl.sum(q_RD.to(tl.float32) * k_RD.to(tl.float32), axis=1) * scale_log2
        new_largest_R = tl.maximum(largest_R, score_R)
        decay_R = tl.exp2(largest_R - new_largest_R)
        weight_R = tl.exp2(score_R - new_largest_R)
        total_R = total_R * decay_R + weight_R
        sum_RD = sum_RD * decay_R[:, None] + weight_R[:, None] * v_RD.to(tl.float32)
        largest_R = new_largest_R
    return largest_R, total_R, sum_RD
