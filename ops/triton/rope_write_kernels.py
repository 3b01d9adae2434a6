"""A layer's fused projections of a token: queries and keys normalised and rotated, keys and values put where they stay.

An item is a token. Its heads lie in one run, queries before keys before values. All are read before the first store, as
a compiler moves no load across a store; then values and keys go straight to their slot, queries out packed. A head is
held as its two halves, since the rotation pairs element c with element c + D/2: both halves are whole runs of memory,
and the sum of squares of a head is that of its halves.

Sums and products are in fp32 and rounded where the ops rounded that this replaces: after the normalisation, after its
weight, after the rotation. With the compiler's fusion of multiply and add off, a head that is not normalised is bit for
bit what `rotary_embedding` makes of it.
"""

import triton
import triton.language as tl


@triton.jit
def _places(
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr
):
    """Offsets of the first halves of heads that lie in one run, and which of them there are."""
    head_X = tl.arange(0, HEADS_PAD)
    c_C = tl.arange(0, HALF_PAD)
    offset_XC = head_X[:, None] * (2 * HALF) + c_C[None, :]
    return offset_XC, (head_X[:, None] < HEADS) & (c_C[None, :] < HALF)


@triton.jit
def _load_halves(ptr, offset_XC, is_used_XC, HALF: tl.constexpr):
    first_XC = tl.load(ptr + offset_XC, mask=is_used_XC, other=0.0)
    second_XC = tl.load(ptr + HALF + offset_XC, mask=is_used_XC, other=0.0)
    return first_XC, second_XC


@triton.jit
def _store_halves(ptr, first_XC, second_XC, offset_XC, is_used_XC, HALF: tl.constexpr):
    tl.store(ptr + offset_XC, first_XC, mask=is_used_XC)
    tl.store(ptr + HALF + offset_XC, second_XC, mask=is_used_XC)


@triton.jit
def _weighted(x_XC, inverse_X, weight_C, dtype: tl.constexpr):
    """Half heads (fp32) normalised and weighted, rounded to dtype after each; fp32."""
    scaled_XC = (x_XC * inverse_X[:, None]).to(dtype).to(tl.float32)
    return (scaled_XC * weight_C[None, :]).to(dtype).to(tl.float32)


@triton.jit
def turned(
    first_XC,
    second_XC,
    first_weight_C,
    second_weight_C,
    eps,
    cos_C,
    sin_C,
    IS_NORMALISED: tl.constexpr,
    HALF: tl.constexpr,
):
    """Halves of heads normalised and rotated, in their dtype; zero behind HALF and behind the last head."""
    dtype: tl.constexpr = first_XC.dtype
    first_XC, second_XC = first_XC.to(tl.float32), second_XC.to(tl.float32)
    if IS_NORMALISED:
        mean_X = tl.sum(first_XC * first_XC + second_XC * second_XC, axis=1) / (2 * HALF)
        inverse_X = tl.rsqrt(mean_X + eps)
        first_XC = _weighted(first_XC, inverse_X, first_weight_C, dtype)
        second_XC = _weighted(second_XC, inverse_X, second_weight_C, dtype)
    cos_XC, sin_XC = cos_C[None, :], sin_C[None, :]
    turned_first_XC = (first_XC * cos_XC - second_XC * sin_XC).to(dtype)
    turned_second_XC = (second_XC * cos_XC + first_XC * sin_XC).to(dtype)
    return turned_first_XC, turned_second_XC


@triton.jit
def rope_write_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_slots_ptr,
    v_slots_ptr,
    slot_ptr,
    num_tokens,
    eps,
    cos_stride,
    sin_stride,
    k_slot_stride,
    v_slot_stride,
    IS_NORMALISED: tl.constexpr,
    Q: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
    Q_PAD: tl.constexpr,
    G_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """q_out[t] of token t's queries, k_slots[slot[t]] and v_slots[slot[t]] of its keys and values.

    Both halves of cos and sin are alike, hence the first is read. Norm weights are not read where heads are not normalised.
    """
    c_C = tl.arange(0, HALF_PAD)
    is_used_C = c_C < HALF
    q_place_XC, is_q_XC = _places(Q, Q_PAD, HALF, HALF_PAD)
    kv_place_XC, is_kv_XC = _places(G, G_PAD, HALF, HALF_PAD)
    # not read where heads are not normalised
    is_weight_C = is_used_C & IS_NORMALISED
    q_weights = _load_halves(q_norm_ptr, c_C, is_weight_C, HALF)
    k_weights = _load_halves(k_norm_ptr, c_C, is_weight_C, HALF)
    for item in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        token = tl.cast(item, tl.int64)
        q_ptr = qkv_ptr + token * (2 * HALF * (Q + 2 * G))
        k_ptr = q_ptr + 2 * HALF * Q
        v_ptr = k_ptr + 2 * HALF * G
        q_first_XC, q_second_XC = _load_halves(q_ptr, q_place_XC, is_q_XC, HALF)
        k_first_XC, k_second_XC = _load_halves(k_ptr, kv_place_XC, is_kv_XC, HALF)
        v_first_XC, v_second_XC = _load_halves(v_ptr, kv_place_XC, is_kv_XC, HALF)
        slot = tl.load(slot_ptr + token).to(tl.int64)
        cos_C = tl.load(cos_ptr + token * cos_stride + c_C, mask=is_used_C, other=0.0)
        sin_C = tl.load(sin_ptr + token * sin_stride + c_C, mask=is_used_C, other=0.0)
        v_out = v_slots_ptr + slot * v_slot_stride
        _store_halves(v_out, v_first_XC, v_second_XC, kv_place_XC, is_kv_XC, HALF)
        k_first_XC, k_second_XC = turned(
            k_first_XC, k_second_XC, *k_weights, eps, cos_C, sin_C, IS_NORMALISED, HALF
        )
        k_out = k_slots_ptr + slot * k_slot_stride
        _store_halves(k_out, k_first_XC, k_second_XC, kv_place_XC, is_kv_XC, HALF)
        q_first_XC, q_second_XC = turned(
            q_first_XC, q_second_XC, *q_weights, eps, cos_C, sin_C, IS_NORMALISED, HALF
        )
        q_out = q_out_ptr + token * (2 * HALF * Q)
        _store_halves(q_out, q_first_XC, q_second_XC, q_place_XC, is_q_XC, HALF)
