"""What a pass of a decoder begins with: rows of the embedding, the first norm of them, cosines and sines of their positions.

An item is a tile of whole rows, as for the norms of `layer_kernels`, and of few enough that a thread has few angles: each is
some 100 instructions, twice. A row comes behind a chain of two loads, or three where its id is a code, each of which waits for
memory. All loads start before the first store, and the angles are worked out while the rows are on their way.

The sum of squares and the rounding are those of the norm of its own. An angle is rounded to fp32 once, as the reference
does; cosine and sine are the compiler's full-range ones, not the hardware's approximations, whose error grows with the angle.
"""

import triton
import triton.language as tl

from .layer_kernels import normalised


@triton.jit
def begin_rows(
    embedding_ptr,
    id_ptr,
    token_of_ptr,
    norm_weight_ptr,
    position_ptr,
    frequency_ptr,
    residual_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    num_rows,
    num_items,
    eps,
    HAS_TABLE: tl.constexpr,
    M: tl.constexpr,
    M_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """residual[t], out[t], cos[t] and sin[t] of id[t], or of token_of[id[t]], and position[t]; all arrays are contiguous."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    m_M = tl.arange(0, M_PAD)
    d_D = tl.arange(0, D_PAD)
    weight_M = tl.load(norm_weight_ptr + m_M, mask=m_M < M, other=0.0)
    frequency_D = tl.load(frequency_ptr + d_D, mask=d_D < D, other=0.0)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row_R = tl.cast(item, tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        is_row_R = row_R < num_rows
        token_R = tl.load(id_ptr + row_R, mask=is_row_R, other=0).to(tl.int64)
        if HAS_TABLE:
            token_R = tl.load(token_of_ptr + token_R, mask=is_row_R, other=0)
        is_used_RM = is_row_R[:, None] & (m_M[None, :] < M)
        place_RM = token_R[:, None] * M + m_M[None, :]
        x_RM = tl.load(embedding_ptr + place_RM, mask=is_used_RM, other=0.0)
        position_R = tl.load(position_ptr + row_R, mask=is_row_R, other=0).to(tl.float32)
        angle_RD = position_R[:, None] * frequency_D[None, :]
        is_used_RD = is_row_R[:, None] & (d_D[None, :] < D)
        place_RD = row_R[:, None] * D + d_D[None, :]
        tl.store(cos_ptr + place_RD, tl.cos(angle_RD), mask=is_used_RD)
        tl.store(sin_ptr + place_RD, tl.sin(angle_RD), mask=is_used_RD)
        out_RM = normalised(x_RM.to(tl.float32), weight_M, eps, M, dtype)
        place_RM = row_R[:, None] * M + m_M[None, :]
        tl.store(residual_ptr + place_RM, x_RM, mask=is_used_RM)
        tl.store(out_ptr + place_RM, out_RM.to(dtype), mask=is_used_RM)


@triton.jit(do_not_specialize=["num_rows", "num_items"])
def embedding_rms_norm_cos_sin_kernel(
    embedding_ptr,
    id_ptr,
    token_of_ptr,
    norm_weight_ptr,
    position_ptr,
    frequency_ptr,
    residual_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    num_rows,
    num_items,
    eps,
    HAS_TABLE: tl.constexpr,
    M: tl.constexpr,
    M_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """See `begin_rows`."""
    begin_rows(
        embedding_ptr, id_ptr, token_of_ptr, norm_weight_ptr, position_ptr, frequency_ptr, residual_ptr, out_ptr,
        cos_ptr, sin_ptr, num_rows, num_items, eps, HAS_TABLE, M, M_PAD, D, D_PAD, TILE_ROWS,
    )  # fmt: skip
