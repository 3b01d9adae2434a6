"""Joins attention over parts of the keys: of programs, by a kernel of its own, and of a program's two warpgroups, on the chip.

The kernel starts before the one in front of it has ended, and waits for its results.

Letters: S parts (padded), P (row, head) pairs, R rows of a warpgroup, D head dim.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST: tl.constexpr = tl.constexpr(-3.0e38)  # stands for the maximum of nothing, else -inf - -inf


@gluon.jit
def place_of_parts(k_smem, KEYS: gl.constexpr, K_STAGES: gl.constexpr, R: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """fp32 [R, D] in the key stages of the second of two parts, who does not need them any more."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    place_smem = k_smem._reinterpret(gl.float32, [K_STAGES * KEYS // R, R, D], layout)
    return place_smem.index(K_STAGES * KEYS // R - 1)


@gluon.jit
def give_part(place_s, numbers_smem, is_given, sum_RD, largest_R, total_R):
    """What a warpgroup has found goes into place_s [R, D] and numbers_smem [2, R], all fp32, and is_given is told."""
    gl.thread_barrier()  # other warps may still read what was there
    place_s.store(sum_RD)
    numbers_smem.index(0).store(largest_R)
    numbers_smem.index(1).store(total_R)
    gl.thread_barrier()
    mbarrier.arrive(is_given, count=1)


@gluon.jit
def take_part(
    place_s, numbers_smem, is_given, sum_RD, largest_R, total_R, SUMS: gl.constexpr
):  # fmt: skip
    """(sum, largest, total) over the keys of both warpgroups."""
    rows_of_sums: gl.constexpr = gl.SliceLayout(1, SUMS)
    mbarrier.wait(is_given, 0)
    other_largest_R = numbers_smem.index(0).load(rows_of_sums)
    new_largest_R = gl.maximum(largest_R, other_largest_R)
    decay_R = gl.exp2(largest_R - new_largest_R)
    other_decay_R = gl.exp2(other_largest_R - new_largest_R)
    total_R = total_R * decay_R + numbers_smem.index(1).load(rows_of_sums) * other_decay_R
    sum_RD = sum_RD * decay_R[:, None] + place_s.load(SUMS) * other_decay_R[:, None]
    return sum_RD, new_largest_R, total_R


@triton.jit(do_not_specialize=["num_pairs", "num_parts"])
def join_parts_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    num_pairs,
    num_parts,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
):
    """out[p] of part[s, p] (fp32 [D]) and its lse[s, p]; all parts are on their way at once. D is a power of two."""
    s_S = tl.arange(0, PARTS)
    pair_P = tl.program_id(0) * TILE_PAIRS + tl.arange(0, TILE_PAIRS)
    d_D = tl.arange(0, D)
    place_SP = s_S[:, None].to(tl.int64) * num_pairs + pair_P[None, :]
    is_part_SP = (s_S[:, None] < num_parts) & (pair_P[None, :] < num_pairs)
    gdc_wait()
    gdc_launch_dependents()
    lse_SP = tl.load(lse_ptr + place_SP, mask=is_part_SP, other=float("-inf"))
    part_SPD = tl.load(
        part_ptr + place_SP[:, :, None] * D + d_D[None, None, :],
        mask=is_part_SP[:, :, None],
        other=0.0,
    )
    largest_P = tl.maximum(tl.max(lse_SP, axis=0), LEAST)
    weight_SP = tl.exp(lse_SP - largest_P[None, :])
    total_P = tl.sum(weight_SP, axis=0)
    share_SP = weight_SP / tl.where(total_P == 0.0, 1.0, total_P)[None, :]
    out_PD = tl.sum(part_SPD * share_SP[:, :, None], axis=0)
    tl.store(
        out_ptr + pair_P[:, None].to(tl.int64) * D + d_D[None, :],
        out_PD.to(out_ptr.dtype.element_ty),
        mask=(pair_P < num_pairs)[:, None],
    )
