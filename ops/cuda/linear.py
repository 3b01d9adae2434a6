"""Products of few rows with the residual stream and its norm behind them: the weight is read by as many cores as it takes.

The inner dim is cut among programs, and the kernel that adds the parts up goes on with the residual and the norm. On one
H200, us, bf16, beside the library's product and the norm behind it:

| rows | hidden 1,024: inputs 2,048 / 3,072 | hidden 2,048: inputs 2,048 / 6,144 |
|---|---|---|
| 32 | 4.5 and 8.2 / 5.1 and 9.8 | 6.0 and 8.3 / 11.7 and 14.9 |
| 64 | 4.6 and 8.1 / 5.7 and 10.2 | 6.2 and 8.4 / 11.5 and 15.0 |
| 128 | 5.6 and 8.4 / 6.4 and 10.3 | 7.3 and 8.9 / 13.4 and 16.5 |
| 256 | 6.9 and 8.9 / 7.5 and 10.2 | 10.0 and 9.3 / 18.4 and 16.6 |
| 512 | 8.8 and 8.9 / 10.5 and 10.6 | 13.3 and 12.1 / 25.6 and 24.7 |

Many rows are more bytes than the weight. There the library adds its product to the stream where it lies, and the norm reads
the stream alone: of five passes over rows in memory four are left. On an H200 (torch 2.11) the bits are those of the parts:
the library rounds the product before it adds.
"""

import torch

from xgr_runtime.hal.ops.linear import linear_add_rms_norm
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.launch import check_rows_dense, next_power_of_two, row_elements
from .linear_kernels import add_parts_rms_norm_kernel, stream_norm_kernel
from .matmul_warp import (
    NUM_CORES,
    WARPGROUP_ROWS,
    WarpTiles,
    launch_warp_parts,
    why_warps_refused,
)
from .rules import RULES, why_row_refused

SMALL_HIDDEN, LARGEST_HIDDEN = 1024, 2048  # larger ones have no figures yet
MOST_ROWS_SMALL, MOST_ROWS = 256, 128
# More programs read no faster, and more parts are more to write and to add up.
MOST_PROGRAMS = NUM_CORES * 3 // 4
LEAST_TILES = 32  # below that, rows of a tile are halved rather than parts of the inner dim added
# Rows that are added in place, of a hidden size up to SMALL_HIDDEN and of a larger one. Of 512 rows it takes a layer of
# hidden size 1,024 from 70 us to 72.
IN_PLACE_ROWS_SMALL, IN_PLACE_ROWS = range(1024, 2**31), range(1024, 2**31)


def _accepts(spec: OpSpec) -> str | None:
    hidden, rows = spec.dims.get("M", 1), spec.dims.get("T", spec.dims.get("N", 1))
    most_rows = MOST_ROWS_SMALL if hidden <= SMALL_HIDDEN else MOST_ROWS
    if rows > most_rows:
        return f"T must be at most {most_rows} where M is {hidden}, got {rows}"
    if hidden > LARGEST_HIDDEN:
        return f"M must be at most {LARGEST_HIDDEN}, got {hidden}"
    head_inputs = spec.dims.get("Q", 1) * spec.dims.get("D", 8)
    if head_inputs % 8:
        return f"Q times D must be a multiple of 8, got {head_inputs}"
    return why_warps_refused(spec, "F")


def _accepts_many(spec: OpSpec) -> str | None:
    hidden = spec.dims.get("M", 1)
    taken = IN_PLACE_ROWS_SMALL if hidden <= SMALL_HIDDEN else IN_PLACE_ROWS
    rows = spec.dims.get("T", spec.dims.get("N", taken.start))
    if rows not in taken:
        return f"T must be from {taken.start} to {taken.stop - 1} where M is {hidden}, got {rows}"
    return why_row_refused(spec, "M") or why_warps_refused(spec)


def tiles_in_parts(num_rows: int, num_outputs: int, num_inputs: int) -> WarpTiles:
    """Tiles of 64 columns, and parts of the inner dim of equal length."""
    columns, inputs = 64, 64
    column_tiles = -(-num_outputs // columns)
    of_two = -(-num_rows // (2 * WARPGROUP_ROWS)) * column_tiles
    warpgroups = 2 if num_rows > WARPGROUP_ROWS and of_two >= LEAST_TILES else 1
    num_tiles = -(-num_rows // (warpgroups * WARPGROUP_ROWS)) * column_tiles
    steps = -(-num_inputs // inputs)
    most_parts = max(1, min(MOST_PROGRAMS // num_tiles, steps))
    parts = next(parts for parts in range(most_parts, 0, -1) if steps % parts == 0)
    return WarpTiles(warpgroups, columns, inputs, 12 if warpgroups == 1 else 8, parts=parts)


@impl(linear_add_rms_norm, provider="gluon", device="cuda", accepts=_accepts)
def linear_add_rms_norm_in_parts(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Two kernels. The kernel in front on the stream must write neither weight."""
    tiles = tiles_in_parts(x_NK.shape[0], weight_MK.shape[0], x_NK.shape[1])
    num_warps = 8 if weight_MK.shape[0] <= SMALL_HIDDEN else 4
    return launch_linear_add_rms_norm(
        x_NK, weight_MK, residual_NM, norm_weight_M, eps, tiles, num_warps
    )


def launch_linear_add_rms_norm(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    tiles: WarpTiles,
    num_warps: int,
) -> torch.Tensor:
    """See `xgr_runtime.hal.ops.linear.linear_add_rms_norm`; raises ValueError for a dtype or strides it cannot take.

    The parts are memory of this call from torch's allocator: in a captured graph it is the graph's pool, and whoever gets it
    next on the stream writes it behind the sum that reads it here.
    """
    check_rows_dense("residual_NM", residual_NM, 2)
    check_rows_dense("norm_weight_M", norm_weight_M, 1)
    num_rows, size = residual_NM.shape
    out_NM = torch.empty_like(residual_NM)
    if num_rows == 0:
        return out_NM
    parts_SNM = launch_warp_parts(x_NK, weight_MK, tiles)
    add_parts_rms_norm_kernel[(num_rows,)](
        parts_SNM,
        residual_NM,
        norm_weight_M,
        out_NM,
        num_rows,
        eps,
        S=tiles.parts,
        M=size,
        M_PAD=next_power_of_two(size),
        TILE_ROWS=1,
        IS_DEPENDENT=True,
        num_warps=num_warps,
        launch_pdl=True,
    )
    return out_NM


@impl(linear_add_rms_norm, provider="torch", device="cuda", accepts=_accepts_many)
def linear_add_rms_norm_in_place(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The library's product added to the residual in place, then the norm. The kernel in front must not write its weight."""
    residual_NM.addmm_(x_NK, weight_MK.T)
    return launch_stream_norm(residual_NM, norm_weight_M, eps)


def launch_stream_norm(
    residual_NM: torch.Tensor, norm_weight_M: torch.Tensor, eps: float
) -> torch.Tensor:
    """rms_norm of what the kernel in front on the stream has written there; raises ValueError as above."""
    check_rows_dense("residual_NM", residual_NM, 2)
    check_rows_dense("norm_weight_M", norm_weight_M, 1)
    num_rows, size = residual_NM.shape
    out_NM = torch.empty_like(residual_NM)
    if num_rows == 0:
        return out_NM
    tile_rows = max(1, RULES.max_tile_elements // row_elements(size))
    stream_norm_kernel[(-(-num_rows // tile_rows),)](
        residual_NM,
        norm_weight_M,
        out_NM,
        num_rows,
        eps,
        M=size,
        M_PAD=next_power_of_two(size),
        TILE_ROWS=tile_rows,
        IS_DEPENDENT=True,
        launch_pdl=True,
        **RULES.options,
    )
    return out_NM
