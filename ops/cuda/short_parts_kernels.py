"""What the attention of few rows and the kernels that join its parts share: how many parts there are, how they are read and added.

How many follows from the lengths on the device: each kernel counts for itself, and all come to the same number. A warp that joins
has one (row, head) pair, and a thread the same few columns of all its parts, so that nothing is exchanged between threads: a sum
over parts that lie in several warps took longer than the attention itself.

Letters: S histories (padded); P (row, head) pairs, D head dim, G KV heads, X query heads of a KV head.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # of a tile: the rows of one matrix instruction
LEAST = gl.constexpr(-3.0e38)  # stands for the maximum of nothing: -inf - -inf would be NaN
LOG2_E = gl.constexpr(1.4426950408889634)


@triton.jit
def count_parts(
    num_tiles, largest_length, G: tl.constexpr, KEYS: tl.constexpr, PROGRAMS: tl.constexpr, MOST_PARTS: tl.constexpr
):  # fmt: skip
    """Parts of the keys where there are num_tiles tiles of rows: what the programs suffice for, none of them for nothing."""
    parts = tl.minimum(PROGRAMS // (tl.maximum(num_tiles, 1) * G), MOST_PARTS)
    key_tiles = tl.maximum((largest_length + KEYS - 1) // KEYS, 1)
    each = (key_tiles + tl.maximum(parts, 1) - 1) // tl.maximum(parts, 1)
    return (key_tiles + each - 1) // each


@gluon.jit
def wait_with(x):
    """x >= 0, and wait for the kernel in front. x is known before: the assembler would rather wait first."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $1, 0; @p griddepcontrol.wait; mov.b32 $0, $1; }",
        "=r,r",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def count_pairs(
    start_ptr, length_ptr, num_histories,
    G: gl.constexpr, X: gl.constexpr, SEGMENTS: gl.constexpr, KEYS: gl.constexpr, PROGRAMS: gl.constexpr, MOST_PARTS: gl.constexpr,
):  # fmt: skip
    """((row, head) pairs of all histories, parts of their keys)."""
    layout: gl.constexpr = gl.BlockedLayout([SEGMENTS // 32], [32], [gl.num_warps()], [0])
    h_S = gl.arange(0, SEGMENTS, layout=layout)
    is_one_S = h_S < num_histories
    first_S = gl.load(start_ptr + h_S, mask=is_one_S, other=0, cache_modifier=".cg")
    end_S = gl.load(start_ptr + h_S + 1, mask=is_one_S, other=0, cache_modifier=".cg")
    length_S = gl.load(length_ptr + h_S, mask=is_one_S, other=0, cache_modifier=".cg")
    num_pairs = gl.sum(end_S - first_S, 0) * (G * X)
    num_tiles = gl.sum(((end_S - first_S) * X + ROWS - 1) // ROWS, 0)
    return num_pairs, count_parts(num_tiles, gl.max(length_S, 0), G, KEYS, PROGRAMS, MOST_PARTS)


@gluon.jit
def load_parts(
    part_ptr, lse_ptr, near_P, num_pairs, num_parts, D: gl.constexpr, PARTS: gl.constexpr, LINES: gl.constexpr
):  # fmt: skip
    """([P, D] and lse [P] of each of num_parts <= PARTS parts) of the pairs near_P.

    What is not there is read as the last part, rather than under a mask: so many loads on their way at once have no registers
    for masks. They are volatile, which keeps them where they stand: the assembler would send the later ones when it has used the
    first. And they go past the first-level cache: the memory was that of another call's parts.
    """
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, LINES))
    lses, parts = (), ()
    for s in gl.static_range(PARTS):
        place_P = gl.minimum(s, num_parts - 1) * num_pairs + near_P
        at_PD = place_P[:, None] * D + d_D[None, :]
        part_PD = gl.load(part_ptr + at_PD, volatile=True)
        lse_P = gl.load(lse_ptr + place_P, volatile=True)
        parts += (part_PD,)  # type: ignore[assignment]  # they grow
        lses += (lse_P,)  # type: ignore[assignment]
    return parts, lses


@gluon.jit
def add_parts(parts, lses, num_parts, largest_P, total_P, out_PD, PARTS: gl.constexpr):
    """[P, D] of (out, total, largest) and then the parts, in their order."""
    new_largest_P = largest_P
    for s in gl.static_range(PARTS):
        new_largest_P = gl.maximum(new_largest_P, lses[s])
    decay_P = gl.exp2(largest_P - new_largest_P)
    total_P *= decay_P
    out_PD *= decay_P[:, None]
    for s in gl.static_range(PARTS):
        weight_P = gl.where(s < num_parts, gl.exp2(lses[s] - new_largest_P), 0.0)
        total_P += weight_P
        out_PD += parts[s] * weight_P[:, None]
    return out_PD * (1.0 / gl.where(total_P == 0.0, 1.0, total_P))[:, None]
