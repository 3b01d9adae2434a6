"""Pairs of products around the residual stream. N rows, T packed tokens, K inputs, M hidden size, F feed-forward size.

The first product is added to the stream, and the norm of the new rows is left to the second one. Both start while the kernel
in front of them runs. So a layer has fewer gaps between kernels, which is worth the same whatever the rows are, and the
second product more to do for every row. On one H200, a layer of a prefill in us, bf16, the ops' parts beside both pairs:

| rows | hidden 1,024 | hidden 2,048 |
|---|---|---|
| 1,024 | 107 and 93 | 187 and 186 |
| 5,120 | | 1,021 and 1,070 |
| 8,192 | 552 and 581 | 1,382 and 1,511 |
"""

import torch

from xgr_runtime.hal.ops.stream import (
    stream_linear_rope_write_shared_kv,
    stream_linear_silu_mul,
)
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.launch import check_rows_dense
from .hopper import MOST_CORES, NUM_CORES, REGISTERS, WARPGROUP_ROWS, why_head_refused
from .matmul import gated_tiles
from .matmul_warp import (
    Outstanding,
    WarpTiles,
    launch_warp_product,
    tile_descriptor,
    why_warps_refused,
)
from .qkv import HeadTiles, launch_qkv
from .stream_kernels import add_product_kernel

# Of 512 rows there is nothing to gain. Between 1,024 and 8,192, where the gain has become a loss, there are no figures.
LEAST_ROWS, ROWS_END = 1024, 2048
LARGEST_HIDDEN = 1024
TILE_INPUTS = 64  # of the second product; the hidden size fills its tiles
# The largest that give most cores a tile; of the smallest there may be fewer.
ADD_TILES = (WarpTiles(2, 128, 64, 5), WarpTiles(2, 64, 128, 4), WarpTiles(1, 64, 128, 5))
# Two heads and the sums of squares are more than a thread's registers hold: of 1,024 rows and 1,024 inputs, tiles of one head
# take a layer from 98 us to 93.
HEADS_OF_A_TILE = HeadTiles(2, 1, 6)


def _accepts(spec: OpSpec) -> str | None:
    if spec.dtype != torch.bfloat16:
        return f"takes torch.bfloat16, as rows that are not normalised overflow others, got {spec.dtype}"
    rows = spec.dims.get("T", spec.dims.get("N", LEAST_ROWS))
    if not LEAST_ROWS <= rows < ROWS_END:
        return f"T must be at least {LEAST_ROWS} and below {ROWS_END}, got {rows}"
    if "max_rows" in spec.dims:
        return "rounds of a search have no figures"
    hidden = spec.dims.get("M", TILE_INPUTS)
    if hidden > LARGEST_HIDDEN or hidden % TILE_INPUTS:
        return f"M must be a multiple of {TILE_INPUTS} up to {LARGEST_HIDDEN}, got {hidden}"
    head_inputs = spec.dims.get("Q", 1) * spec.dims.get("D", 8)
    if head_inputs % 8:
        return f"Q times D must be a multiple of 8, got {head_inputs}"
    return why_warps_refused(spec, "F")


def _accepts_heads(spec: OpSpec) -> str | None:
    return why_head_refused(spec) or _accepts(spec)


def add_tiles(num_rows: int, num_columns: int) -> WarpTiles:
    """How the product that is added is cut."""
    for tiles in ADD_TILES:
        row_tiles = -(-num_rows // (tiles.warpgroups * WARPGROUP_ROWS))
        if row_tiles * -(-num_columns // tiles.columns) >= MOST_CORES:
            return tiles
    return ADD_TILES[-1]


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
    rows_TM, norm = launch_add_product(
        x_TK, weight_MK, residual_TM, norm_weight_M, eps, add_tiles(*residual_TM.shape)
    )
    slots = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    heads = (qkv_weight_OM, q_norm_D, k_norm_D, eps, cos_TD, sin_TD)
    return launch_qkv(rows_TM, *heads, *slots, slot_T, HEADS_OF_A_TILE, norm)


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
        NUM_REGISTERS=REGISTERS,
        num_warps=4,
        launch_pdl=True,  # starts before the kernel in front of it has ended
    )
    return out_NM, Outstanding(squares_NS, eps)
