"""Joins the parts of a prefill's few rows.

It starts before the kernel in front of it has ended, counts the parts meanwhile, and then asks for all of them at once: what it
costs is one wait for memory.

Letters: P (row, head) pairs, D head dim, G KV heads, X query heads of a KV head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .short_parts_kernels import LEAST, add_parts, count_pairs, load_parts, wait_with


@gluon.jit
def _join(
    part_ptr, lse_ptr, near_P, num_pairs, num_parts,
    D: gl.constexpr, PARTS: gl.constexpr, PAIRS: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    parts, lses = load_parts(part_ptr, lse_ptr, near_P, num_pairs, num_parts, D, PARTS, LINES)
    largest_P = gl.full([PAIRS], LEAST, gl.float32, gl.SliceLayout(1, LINES))
    total_P = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, LINES))
    out_PD = gl.zeros([PAIRS, D], gl.float32, LINES)
    return add_parts(parts, lses, num_parts, largest_P, total_P, out_PD, PARTS)


@gluon.jit(do_not_specialize=["num_rows", "num_histories", "is_settled"])
def join_short_prefill_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    start_ptr,
    length_ptr,
    num_rows,
    num_histories,
    is_settled,
    G: gl.constexpr,
    X: gl.constexpr,
    D: gl.constexpr,
    SEGMENTS: gl.constexpr,
    KEYS: gl.constexpr,
    PROGRAMS: gl.constexpr,
    MOST_PARTS: gl.constexpr,
):
    """out[p] of part[s, p] and lse[s, p] (base 2), and 0 in rows of no history; where there is one part, its rows are left alone."""
    gdc_launch_dependents()
    PAIRS: gl.constexpr = gl.num_warps()
    LINES: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [PAIRS, 1], [1, 0])
    if is_settled == 0:
        gdc_wait()
    num_pairs, num_parts = count_pairs(
        start_ptr, length_ptr, num_histories, G, X, SEGMENTS, KEYS, PROGRAMS, MOST_PARTS
    )
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, LINES))
    pair_P = gl.program_id(0) * PAIRS + gl.arange(0, PAIRS, layout=gl.SliceLayout(1, LINES))
    near_P = gl.minimum(pair_P, num_pairs - 1)
    out_PD = gl.zeros([PAIRS, D], gl.float32, LINES)
    is_joined = (num_parts > 1) & (gl.program_id(0) * PAIRS < num_pairs)
    # all that depends on the lengths is in the branch, hence done before the kernel in front has ended
    if is_joined:
        num_parts = wait_with(num_parts)
        if num_parts <= MOST_PARTS // 4:
            out_PD = _join(
                part_ptr, lse_ptr, near_P, num_pairs, num_parts, D, MOST_PARTS // 4, PAIRS, LINES
            )
        elif num_parts <= MOST_PARTS // 2:
            out_PD = _join(
                part_ptr, lse_ptr, near_P, num_pairs, num_parts, D, MOST_PARTS // 2, PAIRS, LINES
            )
        else:
            out_PD = _join(
                part_ptr, lse_ptr, near_P, num_pairs, num_parts, D, MOST_PARTS, PAIRS, LINES
            )
    else:
        gdc_wait()
    is_new_P = (pair_P < num_rows * (G * X)) & ((num_parts > 1) | (pair_P >= num_pairs))
    out_PD = gl.where((pair_P < num_pairs)[:, None], out_PD, 0.0)
    gl.store(
        out_ptr + pair_P.to(gl.int64)[:, None] * D + d_D[None, :],
        out_PD.to(out_ptr.dtype.element_ty),
        mask=is_new_P[:, None],
    )
