"""Into how many parts the keys of a prefill of few tokens go, and the kernel that joins the parts' results.

It starts before the kernel in front of it has ended, counts the parts meanwhile, and then asks for all of them at once.

Letters: S histories (padded), and parts where it stands beside another letter; P (row, head) pairs, D head dim, G KV heads, X
query heads of a KV head.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS: tl.constexpr = tl.constexpr(64)  # of a tile
LEAST: tl.constexpr = tl.constexpr(-3.0e38)  # stands for the maximum of nothing, else -inf - -inf


@triton.jit
def count_parts(
    num_tiles, largest_length, G: tl.constexpr, KEYS: tl.constexpr, PROGRAMS: tl.constexpr, MOST_PARTS: tl.constexpr
):  # fmt: skip
    """Parts of the keys where there are num_tiles tiles of rows: what the programs suffice for, none of them for nothing."""
    parts = tl.minimum(PROGRAMS // (tl.maximum(num_tiles, 1) * G), MOST_PARTS)
    key_tiles = tl.maximum((largest_length + KEYS - 1) // KEYS, 1)
    each = (key_tiles + tl.maximum(parts, 1) - 1) // tl.maximum(parts, 1)
    return (key_tiles + each - 1) // each


@triton.jit(do_not_specialize=["num_rows", "num_histories"])
def join_short_prefill_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    start_ptr,
    length_ptr,
    num_rows,
    num_histories,
    G: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    SEGMENTS: tl.constexpr,
    KEYS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out[p] of part[s, p] and lse[s, p], and 0 in rows of no history; where there is one part, its rows are left alone."""
    gdc_launch_dependents()
    if not EARLY:
        gdc_wait()
    h_S = tl.arange(0, SEGMENTS)
    is_one_S = h_S < num_histories
    first_S = tl.load(start_ptr + h_S, mask=is_one_S, other=0, cache_modifier=".cg")
    end_S = tl.load(start_ptr + h_S + 1, mask=is_one_S, other=0, cache_modifier=".cg")
    length_S = tl.load(length_ptr + h_S, mask=is_one_S, other=0, cache_modifier=".cg")
    total_rows = tl.sum(end_S - first_S, axis=0)
    num_tiles = tl.sum(((end_S - first_S) * X + ROWS - 1) // ROWS, axis=0)
    num_parts = count_parts(num_tiles, tl.max(length_S, axis=0), G, KEYS, PROGRAMS, MOST_PARTS)
    if EARLY:
        gdc_wait()
    s_S = tl.arange(0, MOST_PARTS)
    d_D = tl.arange(0, D)
    pair_P = tl.program_id(0) * TILE_PAIRS + tl.arange(0, TILE_PAIRS)
    is_row_P = pair_P // (G * X) < total_rows
    is_part_SP = (s_S[:, None] < num_parts) & is_row_P[None, :] & (num_parts > 1)
    place_SP = s_S[:, None].to(tl.int64) * total_rows * (G * X) + pair_P[None, :]
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
    is_new_P = (pair_P < num_rows * (G * X)) & ((num_parts > 1) | (is_row_P == 0))
    tl.store(
        out_ptr + pair_P[:, None].to(tl.int64) * D + d_D[None, :],
        out_PD.to(out_ptr.dtype.element_ty),
        mask=is_new_P[:, None],
    )
