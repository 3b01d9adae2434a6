"""What follows a product: its parts added up in order, with the residual stream and its norm; or the norm alone.

A row is one program's, so that the norm needs no second pass. The kernels are put onto the chip while the product still
runs, and let the next one come likewise (programmatic dependent launch): the product after a norm reads its weight early.

N rows, M hidden size, S parts.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..triton.layer_kernels import normalised


@triton.jit
def _row(row_ptr, m_M, M: tl.constexpr, M_PAD: tl.constexpr):
    """M elements and zeros behind them; without masks where there is nothing behind."""
    if M == M_PAD:
        return tl.load(row_ptr + m_M)
    else:
        return tl.load(row_ptr + m_M, mask=m_M < M, other=0.0)


@triton.jit
def add_parts_rms_norm_kernel(
    parts_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    S: tl.constexpr,
    M: tl.constexpr,
    M_PAD: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """residual += the sum over s of parts[s], rounded; out = rms_norm of the new residual. All are contiguous.

    A program for each row. All of its loads start before the first addition.
    """
    if IS_DEPENDENT:
        gdc_launch_dependents()
    dtype = out_ptr.dtype.element_ty
    m_M = tl.arange(0, M_PAD)
    is_used_M = None if M == M_PAD else m_M < M
    weight_M = _row(weight_ptr, m_M, M, M_PAD).to(tl.float32)
    first = tl.program_id(0) * M
    if IS_DEPENDENT:
        gdc_wait()
    residual_M = _row(residual_ptr + first, m_M, M, M_PAD)
    parts = ()
    for s in tl.static_range(S):
        part_M = _row(parts_ptr + s * (num_rows * M) + first, m_M, M, M_PAD)
        parts += (part_M,)  # type: ignore[assignment]  # they grow
    tl.debug_barrier()
    sum_M = parts[0]  # type: ignore[misc]
    for s in tl.static_range(1, S):
        sum_M += parts[s]
    new_M = (sum_M + residual_M.to(tl.float32)).to(dtype)
    tl.store(residual_ptr + first + m_M, new_M, mask=is_used_M)
    new_M = new_M.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(new_M * new_M, axis=0) / M + eps)
    scaled_M = (new_M * inverse).to(dtype).to(tl.float32)
    tl.store(out_ptr + first + m_M, (scaled_M * weight_M).to(dtype), mask=is_used_M)


@triton.jit(do_not_specialize=["num_rows"])
def stream_norm_kernel(
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    M: tl.constexpr,
    M_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """out = rms_norm of the residual that the kernel in front has written. All are contiguous."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
    m_M = tl.arange(0, M_PAD)
    weight_M = tl.load(weight_ptr + m_M, mask=m_M < M, other=0.0)
    row_R = tl.cast(tl.program_id(0), tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_used_RM = (row_R[:, None] < num_rows) & (m_M[None, :] < M)
    place_RM = row_R[:, None] * M + m_M[None, :]
    if IS_DEPENDENT:
        gdc_wait()
    residual_RM = tl.load(residual_ptr + place_RM, mask=is_used_RM, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    out_RM = normalised(residual_RM, weight_M, eps, M, dtype).to(dtype)
    tl.store(out_ptr + place_RM, out_RM, mask=is_used_RM)
