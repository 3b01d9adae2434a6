"""A product added to the residual stream, and its norm behind it: of few rows in parts, of many by the library in place.

Of few rows the weight is read by as many cores as it takes: the inner dim is cut among programs, and the kernel that adds the
parts up goes on with the residual and the norm. On one H200, us, bf16, beside the library's product and the norm behind it:

| rows | hidden 1,024: inputs 2,048 / 3,072 | hidden 2,048: inputs 2,048 / 6,144 |
|---|---|---|
| 32 | 4.5 and 8.2 / 5.1 and 9.8 | 6.0 and 8.3 / 11.7 and 14.9 |
| 64 | 4.6 and 8.1 / 5.7 and 10.2 | 6.2 and 8.4 / 11.5 and 15.0 |
| 128 | 5.6 and 8.4 / 6.4 and 10.3 | 7.3 and 8.9 / 13.4 and 16.5 |
| 256 | 6.9 and 8.9 / 7.5 and 10.2 | 10.0 and 9.3 / 18.4 and 16.6 |
| 512 | 8.8 and 8.9 / 10.5 and 10.6 | 13.3 and 12.1 / 25.6 and 24.7 |

Since then the kernels of 32 to 128 rows leave room for each other: a product's threads have registers for its tile alone, so
that the sum waits on the same cores, and a row's sum is 16 warps'. Of 64 rows or less tiles are wide where that leaves as many
programs and makes few parts. One of 28 layers in a graph, us, with the short attention between, each column with what was best of
those before it (room: of all products of hidden size 2,048, of these alone of 1,024):

| hidden, rows | 4 or 8 warps a sum | 16 | wide: inputs 2,048 / the others | room |
|---|---|---|---|---|
| 2,048, 128 | 56.3 | 55.9 | 57.2 / 57.7 | 55.7 |
| 2,048, 32 | 49.4 | 47.2 | 46.9 / 46.9 | 45.8 |
| 1,024, 128 | 34.7 | 34.7 | 35.9 / 36.3 | 32.9 |
| 1,024, 32 | 27.6 | 27.2 | 26.9 / 27.6, 8 parts | 27.1 |

Of two row tiles the sums are more programs than there are cores, and products that leave no room are faster: a layer of hidden
size 1,024, 256 rows, takes 45.8 us with room and 44.4 without. More programs than nearly all cores pay where a part is long
enough: of hidden size 2,048, 128 rows, 6,144 inputs in 4 parts of 24 steps take the layer from 54.2 us to 53.5, but 2,048
inputs in 4 parts from 54.9 to 55.7, and of hidden size 1,024, 256 rows, 3,072 inputs in 4 parts from 44.7 to 45.3.

Asking for weights of products to come, into the L2 cache, from the kernels that run before them takes longer wherever it is
done. A layer of hidden size 2,048, 128 and 32 rows, us: 54.6 and 44.6 without; 56.0 and 44.9 where the kernel behind the
product of queries asks for the attention's output weight, 60.0 and 50.4 for half of the gate's too; 57.9 and 46.2 where
the gate's copying warp asks for down's; 56.5 and 46.9 where the sum behind down asks for the next queries'.

Many rows are more bytes than the weight. There the library adds its product to the stream where it lies, and the norm reads
the stream alone: of five passes over rows in memory four are left. On an H200 (torch 2.11) the bits are those of the parts:
the library rounds the product before it adds. The products of attention and feed-forward of one of 28 layers in a graph, us, by
the op's parts, in place with the norm as it is, and in place with a norm that starts before the product has ended, as here:

| hidden, rows | parts | in place | in place, early norm |
|---|---|---|---|
| 1,024, 1,024 | 26.1 | 25.9 | 26.3 |
| 1,024, 4,096 | 80.1 | 77.7 | 76.1 |
| 1,024, 8,192 | 157.9 | 151.4 | 149.7 |
| 2,048, 1,024 | 61.5 | 59.6 | 60.3 |
| 2,048, 2,048 | 115.1 | 112.2 | 111.8 |
| 2,048, 5,120 | 302.0 | 283.9 | 285.9 |
| 2,048, 8,192 | 468.4 | 440.4 | 440.4 |
"""

import torch

from xgr_runtime.hal.ops.linear import linear_add_rms_norm
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.launch import check_rows_dense, next_power_of_two, row_elements
from .hopper import BYTES_ON_CHIP, MOST_CORES, NUM_CORES, WARPGROUP_ROWS
from .launch_rules import RULES, why_row_refused
from .linear_kernels import add_parts_rms_norm_kernel, stream_norm_kernel
from .matmul_warp import WarpTiles, launch_warp_parts, why_warps_refused

SMALL_HIDDEN, LARGEST_HIDDEN = 1024, 2048  # larger ones have no figures yet
MOST_ROWS_SMALL, MOST_ROWS = 256, 128
COLUMNS, INPUTS = 64, 64  # of a tile
MOST_PARTS = 8  # of wide tiles
SUM_WARPS = 16  # a row each: few elements of many parts a thread, which are all asked for at once
LEAST_TILES = 32  # below that, rows of a tile are halved rather than parts of the inner dim added
LEAST_STEPS = 24  # tiles of inputs of a part, where parts are so many that every core has a program
LEAST_ROWS_IN_PLACE = 1024  # of 512 it takes a layer of hidden size 1,024 from 70 us to 72


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
    rows = spec.dims.get("T", spec.dims.get("N", LEAST_ROWS_IN_PLACE))
    if rows < LEAST_ROWS_IN_PLACE:
        return f"T must be at least {LEAST_ROWS_IN_PLACE}, got {rows}"
    return why_row_refused(spec, "M") or why_warps_refused(spec)


def tiles_in_parts(num_rows: int, num_outputs: int, num_inputs: int) -> WarpTiles:
    """Tiles of few columns, and parts of the inner dim of equal length."""
    tiles = _in_parts(num_rows, num_outputs, num_inputs, COLUMNS)
    if num_rows > WARPGROUP_ROWS:
        return tiles
    wide = _in_parts(num_rows, num_outputs, num_inputs, 2 * COLUMNS)
    return wide if 2 * tiles.parts <= wide.parts <= MOST_PARTS else tiles


def _in_parts(num_rows: int, num_outputs: int, num_inputs: int, columns: int) -> WarpTiles:
    column_tiles = -(-num_outputs // columns)
    of_two = -(-num_rows // (2 * WARPGROUP_ROWS)) * column_tiles
    warpgroups = 2 if num_rows > WARPGROUP_ROWS and of_two >= LEAST_TILES else 1
    rows = warpgroups * WARPGROUP_ROWS
    num_tiles = -(-num_rows // rows) * column_tiles
    steps = -(-num_inputs // INPUTS)
    # more programs read no faster, and more parts are more to write and to add up
    parts = _most_parts(steps, MOST_CORES // num_tiles)
    if warpgroups == 2:
        on_all = _most_parts(steps, NUM_CORES // num_tiles)
        parts = on_all if steps // on_all >= LEAST_STEPS else parts
    stages = BYTES_ON_CHIP // ((rows + columns) * INPUTS * 2)
    is_light = num_rows <= NUM_CORES  # else not every core has one row's sum at most
    return WarpTiles(warpgroups, columns, INPUTS, stages, parts=parts, is_light=is_light)


def _most_parts(steps: int, most: int) -> int:
    """The largest number of equal parts up to `most`, 1 at least."""
    return next(parts for parts in range(max(1, min(most, steps)), 0, -1) if steps % parts == 0)


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
    return launch_linear_add_rms_norm(x_NK, weight_MK, residual_NM, norm_weight_M, eps, tiles)


def launch_linear_add_rms_norm(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    tiles: WarpTiles,
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
        IS_DEPENDENT=True,
        num_warps=SUM_WARPS,
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
