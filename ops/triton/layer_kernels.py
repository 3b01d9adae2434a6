"""Kernels of a layer beside attention: normalisation, rotary embedding, gated activation. One pass over memory each.

Sums and products are in fp32 and rounded where the references round: after the normalisation and again after its
weight, after the rotation, after silu and again after the product. A product of two 16-bit numbers is exact in fp32, so
rounding it once is what a 16-bit product does. With the compiler's fusion of multiply and add off, rotations are the
reference's bit for bit.

norm: an item is a tile of whole rows, wide ones alone, a head's vectors by many. rotary: an item is a token, all its
query and key heads, whose angles are read once. silu: an item is a part of one row.
"""

import triton
import triton.language as tl


@triton.jit
def normalised(x_RM, weight_M, eps, M: tl.constexpr, dtype: tl.constexpr):
    """Rows of x (fp32, zero behind M) normalised, rounded to dtype and weighted; fp32 that dtype holds but for one rounding."""
    mean_R = tl.sum(x_RM * x_RM, axis=1) / M
    scaled_RM = (x_RM * tl.rsqrt(mean_R + eps)[:, None]).to(dtype).to(tl.float32)
    return scaled_RM * weight_M.to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["num_rows", "num_items"])
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_items,
    eps,
    outer_stride,
    inner_stride,
    INNER: tl.constexpr,
    M: tl.constexpr,
    M_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """out[r] of row r of x, which lies at r // INNER * outer_stride + r % INNER * inner_stride; out is contiguous."""
    m_M = tl.arange(0, M_PAD)
    weight_M = tl.load(weight_ptr + m_M, mask=m_M < M, other=0.0)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row_R = tl.cast(item, tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        is_used_RM = (row_R[:, None] < num_rows) & (m_M[None, :] < M)
        place_R = row_R // INNER * outer_stride + row_R % INNER * inner_stride
        x_RM = tl.load(x_ptr + place_R[:, None] + m_M[None, :], mask=is_used_RM, other=0.0)
        out_RM = normalised(x_RM.to(tl.float32), weight_M, eps, M, out_ptr.dtype.element_ty)
        tl.store(
            out_ptr + row_R[:, None] * M + m_M[None, :],
            out_RM.to(out_ptr.dtype.element_ty),
            mask=is_used_RM,
        )


@triton.jit(do_not_specialize=["num_rows", "num_items"])
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_items,
    eps,
    x_stride,
    residual_stride,
    M: tl.constexpr,
    M_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """residual += x, rounded; out[r] of the new residual's row r."""
    m_M = tl.arange(0, M_PAD)
    weight_M = tl.load(weight_ptr + m_M, mask=m_M < M, other=0.0)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row_R = tl.cast(item, tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        is_used_RM = (row_R[:, None] < num_rows) & (m_M[None, :] < M)
        x_place_RM = row_R[:, None] * x_stride + m_M[None, :]
        place_RM = row_R[:, None] * residual_stride + m_M[None, :]
        x_RM = tl.load(x_ptr + x_place_RM, mask=is_used_RM, other=0.0)
        residual_RM = tl.load(residual_ptr + place_RM, mask=is_used_RM, other=0.0)
        sum_RM = (x_RM.to(tl.float32) + residual_RM.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(residual_ptr + place_RM, sum_RM, mask=is_used_RM)
        out_RM = normalised(sum_RM.to(tl.float32), weight_M, eps, M, out_ptr.dtype.element_ty)
        tl.store(
            out_ptr + row_R[:, None] * M + m_M[None, :],
            out_RM.to(out_ptr.dtype.element_ty),
            mask=is_used_RM,
        )


@triton.jit
def _rotate_heads(
    x_ptr,
    out_ptr,
    cos_C,
    sin_C,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """The heads of one token, contiguous from x_ptr, to out_ptr."""
    head_X = tl.arange(0, HEADS_PAD)
    c_C = tl.arange(0, HALF_PAD)
    is_used_XC = (head_X[:, None] < HEADS) & (c_C[None, :] < HALF)
    offset_XC = head_X[:, None] * (2 * HALF) + c_C[None, :]
    first_XC = tl.load(x_ptr + offset_XC, mask=is_used_XC, other=0.0).to(tl.float32)
    second_XC = tl.load(x_ptr + offset_XC + HALF, mask=is_used_XC, other=0.0).to(tl.float32)
    turned_XC = first_XC * cos_C[None, :] - second_XC * sin_C[None, :]
    tl.store(out_ptr + offset_XC, turned_XC.to(out_ptr.dtype.element_ty), mask=is_used_XC)
    turned_XC = second_XC * cos_C[None, :] + first_XC * sin_C[None, :]
    tl.store(out_ptr + offset_XC + HALF, turned_XC.to(out_ptr.dtype.element_ty), mask=is_used_XC)


@triton.jit(do_not_specialize=["num_tokens"])
def rotary_embedding_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    num_tokens,
    q_stride,
    k_stride,
    cos_stride,
    sin_stride,
    Q: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
    Q_PAD: tl.constexpr,
    G_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Both halves of cos and sin are alike, hence the first is read; outputs are contiguous."""
    c_C = tl.arange(0, HALF_PAD)
    for item in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        token = tl.cast(item, tl.int64)
        cos_C = tl.load(cos_ptr + token * cos_stride + c_C, mask=c_C < HALF, other=0.0)
        sin_C = tl.load(sin_ptr + token * sin_stride + c_C, mask=c_C < HALF, other=0.0)
        q_place, k_place = q_ptr + token * q_stride, k_ptr + token * k_stride
        q_out, k_out = q_out_ptr + token * (2 * Q * HALF), k_out_ptr + token * (2 * G * HALF)
        _rotate_heads(q_place, q_out, cos_C, sin_C, Q, Q_PAD, HALF, HALF_PAD)
        _rotate_heads(k_place, k_out, cos_C, sin_C, G, G_PAD, HALF, HALF_PAD)


@triton.jit(do_not_specialize=["num_items"])
def silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    num_items,
    row_stride,
    F: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """out[n] = silu(gate[n]) * up[n]; items are (row n, tile of columns); out is contiguous."""
    dtype = out_ptr.dtype.element_ty
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = tl.cast(item // NUM_TILES, tl.int64)
        f_F = (item % NUM_TILES) * TILE + tl.arange(0, TILE)
        is_used_F = f_F < F
        place = gate_up_ptr + row * row_stride
        gate_F = tl.load(place + f_F, mask=is_used_F, other=0.0).to(tl.float32)
        up_F = tl.load(place + F + f_F, mask=is_used_F, other=0.0).to(tl.float32)
        silu_F = (gate_F / (1.0 + tl.exp(-gate_F))).to(dtype).to(tl.float32)
        tl.store(out_ptr + row * F + f_F, (silu_F * up_F).to(dtype), mask=is_used_F)
