"""Pairs of products around the residual stream. N rows, T packed tokens, K inputs, M hidden size, F feed-forward size.

The first product is added to the stream, and the norm of the new rows is left to the second one. Both start while the kernel
in front of them runs. So a layer has fewer gaps between kernels, which is worth the same whatever the rows are, and the
second product more to do for every row. On one H200, a layer of a prefill in us, bf16, the ops' parts beside both pairs:

| rows | hidden 1,024 | hidden 2,048 |
|---|---|---|
| 1,024 | 107 and 93 | 187 and 186 |
| 5,120 | | 1,021 and 1,070 |
| 8,192 | 552 and 581 | 1,382 and 1,511 |

One of 28 layers of a round in a graph, in us, with the attention of beams between: the parts, as they were bound when these
were measured, in one process up to 1.6 us apart; the best of all other ways that were tried; both pairs; and both pairs where
the first product leaves room for the kernel behind it:

| hidden, rows | parts | others | pairs | with room |
|---|---|---|---|---|
| 1,024, 256 | 45.8 | 44.4 | 44.9 | 44.8 |
| 1,024, 512 | 60.0 to 61.6 | 57.9 | 56.2 | 56.4 |
| 2,048, 256 | 74.5 to 75.1 | 72.7 | 70.6 | 70.3 |

An older measurement, with another attention between that did not start early, had pairs of the same tiles gain nothing of 512
rows: 70.8 us, the parts 70.2.
"""

from dataclasses import replace

import torch

from xgr_runtime.hal.ops.stream import (
    stream_linear_rope_write_shared_kv,
    stream_linear_rope_write_unshared_kv,
    stream_linear_silu_mul,
)
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.launch import check_rows_dense
from .hopper import MOST_CORES, NUM_CORES, WARPGROUP_ROWS, why_head_refused
from .matmul import gated_tiles
from .matmul_warp import (
    Outstanding,
    WarpTiles,
    launch_warp_product,
    register_options,
    tile_descriptor,
    why_warps_refused,
)
from .qkv import OF_ONE_HEAD, HeadTiles, launch_qkv
from .stream_kernels import add_product_kernel

SMALL_HIDDEN, LARGEST_HIDDEN = 1024, 2048
# Rows of rounds, for which there are figures, and of prefills, whose products are the same. Of fewer the parts are faster.
ROWS_OF_SMALL, ROWS_OF_LARGE = range(257, 512 + 1), range(129, 256 + 1)
# Of prefills alone. At its end the gain has become a loss, or has no figures.
ROWS_OF_PREFILL = range(1024, 2048)
TILE_INPUTS = 64  # of the second product; the hidden size fills its tiles
# The largest that give most cores a tile; of the smallest there may be fewer.
ADD_TILES = (WarpTiles(2, 128, 64, 5), WarpTiles(2, 64, 128, 4), WarpTiles(1, 64, 128, 5))


def _accepts(spec: OpSpec) -> str | None:
    if spec.dtype != torch.bfloat16:
        return f"takes torch.bfloat16, as rows that are not normalised overflow others, got {spec.dtype}"
    hidden = spec.dims.get("M", TILE_INPUTS)
    if hidden > LARGEST_HIDDEN or hidden % TILE_INPUTS:
        return f"M must be a multiple of {TILE_INPUTS} up to {LARGEST_HIDDEN}, got {hidden}"
    if refused := _why_rows_refused(spec):
        return refused
    head_inputs = spec.dims.get("Q", 1) * spec.dims.get("D", 8)
    if head_inputs % 8:
        return f"Q times D must be a multiple of 8, got {head_inputs}"
    return why_warps_refused(spec, "F")


def _why_rows_refused(spec: OpSpec) -> str | None:
    rows = spec.dims.get("T", spec.dims.get("N"))
    hidden, is_round = spec.dims.get("M"), "max_rows" in spec.dims
    taken = list[range]()
    if hidden is None or hidden <= SMALL_HIDDEN:
        taken += [ROWS_OF_SMALL] if is_round else [ROWS_OF_SMALL, ROWS_OF_PREFILL]
    if hidden is None or hidden > SMALL_HIDDEN:
        taken.append(ROWS_OF_LARGE)
    if rows is None or any(rows in some for some in taken):
        return None
    expected = " or ".join(f"from {some.start} to {some[-1]}" for some in taken)
    what = "rows of a round" if is_round else "tokens of a prefill"
    return f"{what} must be {expected} where M is {hidden or 'any'}, got {rows}"


def _accepts_heads(spec: OpSpec) -> str | None:
    return why_head_refused(spec) or _accepts(spec)


def add_tiles(num_rows: int, num_columns: int) -> WarpTiles:
    """How the product that is added is cut. Leaving room for the kernel behind it pays for the larger hidden size alone."""
    *larger, smallest = ADD_TILES
    for tiles in larger:
        row_tiles = -(-num_rows // (tiles.warpgroups * WARPGROUP_ROWS))
        if row_tiles * -(-num_columns // tiles.columns) >= MOST_CORES:
            return tiles
    return replace(smallest, is_light=num_columns > SMALL_HIDDEN)


def one_head_tiles(num_rows: int, num_outputs: int, head_dim: int) -> HeadTiles:
    """The smaller where cores are enough. Two heads and the sums of squares are more than a thread's registers hold.

    Of 1,024 rows and 1,024 inputs, tiles of one head take a layer from 98 us to 93.
    """
    small, large = OF_ONE_HEAD
    num_tiles = -(-num_rows // (small.warpgroups * WARPGROUP_ROWS)) * (num_outputs // head_dim)
    return small if num_tiles <= NUM_CORES else large


@impl(stream_linear_silu_mul, provider="gluon", device="cuda", accepts=_accepts)
def stream_linear_silu_mul_by_warps(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    gate_up_2FM: torch.Tensor,
) -> torch.Tensor:
    """Two kernels. The kernel in front on the stream must write no weight."""
    rows_NM, norm = launch_add_product(
        x_NK, weight_MK, residual_NM, norm_weight_M, eps, add_tiles(*residual_NM.shape)
    )
    tiles = gated_tiles(rows_NM.shape[0], gate_up_2FM.shape[0] // 2)
    return launch_warp_product(rows_NM, gate_up_2FM, tiles, is_gated=True, norm=norm)


@impl(stream_linear_rope_write_shared_kv, provider="gluon", device="cuda", accepts=_accepts_heads)
def stream_linear_rope_write_pages_by_warps(
    x_TK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_TM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    qkv_weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    """Likewise."""
    stream = (x_TK, weight_MK, residual_TM, norm_weight_M, eps)
    heads = (qkv_weight_OM, q_norm_D, k_norm_D, eps, cos_TD, sin_TD)
    return _launch_pair(stream, heads, k_pages.flatten(0, 1), v_pages.flatten(0, 1), slot_T)


@impl(
    stream_linear_rope_write_unshared_kv,
    provider="gluon",
    device="cuda",
    accepts=_accepts_heads,
)
def stream_linear_rope_write_rows_by_warps(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    qkv_weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    cos_ND: torch.Tensor,
    sin_ND: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    position: int,
) -> torch.Tensor:
    """Likewise, to `position` of the row's slot."""
    stream = (x_NK, weight_MK, residual_NM, norm_weight_M, eps)
    heads = (qkv_weight_OM, q_norm_D, k_norm_D, eps, cos_ND, sin_ND)
    return _launch_pair(stream, heads, k_rows[:, position], v_rows[:, position], slot_N)


def _launch_pair(
    stream: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float],
    heads: tuple[
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor | None,
        float,
        torch.Tensor,
        torch.Tensor,
    ],
    k_slots: torch.Tensor,
    v_slots: torch.Tensor,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    """stream: of `launch_add_product`. The others: of `launch_qkv`."""
    (num_rows, num_columns), num_outputs = stream[2].shape, heads[0].shape[0]
    rows_TM, norm = launch_add_product(*stream, add_tiles(num_rows, num_columns))
    tiles = one_head_tiles(num_rows, num_outputs, k_slots.shape[2])
    return launch_qkv(rows_TM, *heads, k_slots, v_slots, slot_T, tiles, norm)


def launch_add_product(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    tiles: WarpTiles,
) -> tuple[torch.Tensor, Outstanding]:
    """The new residual times the norm's weight, rounded, and what it still lacks; residual_NM is MUTATED."""
    for name, tensor, num_dims in (
        ("x_NK", x_NK, 2),
        ("weight_MK", weight_MK, 2),
        ("residual_NM", residual_NM, 2),
        ("norm_weight_M", norm_weight_M, 1),
    ):
        check_rows_dense(name, tensor, num_dims)
    num_rows, num_columns = residual_NM.shape
    rows, columns = WARPGROUP_ROWS * tiles.warpgroups, tiles.columns
    num_col_tiles = -(-num_columns // columns)
    out_NM = torch.empty_like(residual_NM)
    squares_NS = x_NK.new_empty((num_rows, num_col_tiles), dtype=torch.float32)
    if num_rows == 0:
        return out_NM, Outstanding(squares_NS, eps)
    add_product_kernel[(min(NUM_CORES, -(-num_rows // rows) * num_col_tiles),)](
        tile_descriptor(x_NK, rows, tiles.inputs),
        tile_descriptor(weight_MK, columns, tiles.inputs),
        tile_descriptor(residual_NM, WARPGROUP_ROWS, columns),
        tile_descriptor(out_NM, WARPGROUP_ROWS, columns),
        residual_NM,
        norm_weight_M,
        squares_NS,
        num_rows,
        num_columns,
        STEPS=-(-x_NK.shape[1] // tiles.inputs),
        STAGES=tiles.stages,
        WARPGROUPS=tiles.warpgroups,
        TILE_O=columns,
        TILE_K=tiles.inputs,
        GROUP=tiles.group,
        **register_options(tiles.is_light),
        num_warps=4,
        launch_pdl=True,  # starts before the kernel in front of it has ended
    )
    return out_NM, Outstanding(squares_NS, eps)
