"""What follows a product of queries, keys and values whose inner dim was cut: parts added up, heads ended and stored.

A program is a token's run of heads, all queries, all keys or all values, so that few tokens are many programs. It is put onto the
chip while the product still runs, and lets the next kernel come likewise (programmatic dependent launch). What may come from any
kernel in front, slots and angles too, is read once the product has ended.

T packed tokens or beam rows, X = Q + 2 G heads: Q queries, G keys, G values; D head dim; S parts.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..triton.rope_write_kernels import turned


@triton.jit
def _summed(parts_ptr, place_XC, part_size, S: tl.constexpr, dtype: tl.constexpr):
    """In order of the parts, rounded. All loads start before the first addition."""
    parts = ()
    for s in tl.static_range(S):
        parts += (tl.load(parts_ptr + s * part_size + place_XC),)  # type: ignore[assignment]  # they grow
    sum_XC = parts[0]  # type: ignore[misc]
    for s in tl.static_range(1, S):
        sum_XC += parts[s]
    return sum_XC.to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def rope_write_parts_kernel(
    parts_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_slots_ptr,
    v_slots_ptr,
    slot_ptr,
    num_rows,
    eps,
    cos_stride,
    sin_stride,
    k_slot_stride,
    v_slot_stride,
    S: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    Q: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """As `rope_write_kernel`, of parts fp32 [S, T, X, D]; programs (T, X / HEADS).

    HEADS of a program, a power of two, divides Q and G; HALF is a power of two. Norm weights are not read where heads are not
    normalised.
    """
    if IS_DEPENDENT:
        gdc_launch_dependents()
    D: tl.constexpr = 2 * HALF
    dtype = q_out_ptr.dtype.element_ty
    token, head = tl.program_id(0), tl.program_id(1) * HEADS
    c_C = tl.arange(0, HALF)
    place_XC = tl.arange(0, HEADS)[:, None] * D + c_C[None, :]
    norm_ptr = q_norm_ptr
    if head >= Q:
        norm_ptr = k_norm_ptr
    is_weight_C = (c_C < HALF) & IS_NORMALISED
    first_weight_C = tl.load(norm_ptr + c_C, mask=is_weight_C, other=0.0).to(tl.float32)
    second_weight_C = tl.load(norm_ptr + HALF + c_C, mask=is_weight_C, other=0.0).to(tl.float32)
    if IS_DEPENDENT:
        gdc_wait()
    row_ptr = parts_ptr + (token * (Q + 2 * G) + head) * D
    part_size = num_rows * ((Q + 2 * G) * D)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    cos_C = tl.load(cos_ptr + token * cos_stride + c_C)
    sin_C = tl.load(sin_ptr + token * sin_stride + c_C)
    first_XC = _summed(row_ptr, place_XC, part_size, S, dtype)
    second_XC = _summed(row_ptr + HALF, place_XC, part_size, S, dtype)
    if head >= Q + G:
        out_ptr = v_slots_ptr + slot * v_slot_stride + (head - Q - G) * D
    else:
        weights = first_weight_C, second_weight_C
        first_XC, second_XC = turned(
            first_XC, second_XC, *weights, eps, cos_C, sin_C, IS_NORMALISED, HALF
        )
        if head >= Q:
            out_ptr = k_slots_ptr + slot * k_slot_stride + (head - Q) * D
        else:
            out_ptr = q_out_ptr + (token * Q + head).to(tl.int64) * D
    tl.store(out_ptr + place_XC, first_XC)
    tl.store(out_ptr + HALF + place_XC, second_XC)
