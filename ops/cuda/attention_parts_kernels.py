"""Joins attention over parts of the keys. It starts before the kernel in front of it has ended, and waits for its results.

Letters: S parts (padded), P (row, head) pairs, D head dim.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST: tl.constexpr = tl.constexpr(-3.0e38)  # stands for the maximum of nothing, else -inf - -inf


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
