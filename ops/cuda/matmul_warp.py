"""Launcher of the products whose tiles a copying warp brings. N rows, K inputs, O outputs, F gated outputs, S parts."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction

from xgr_runtime.hal.registry import OpSpec

from ..triton.launch import check_rows_dense, next_power_of_two
from .descriptors import why_descriptors_refused
from .hopper import NUM_CORES, REGISTERS, WARPGROUP_ROWS, why_generation_refused
from .linear_kernels import add_parts_rms_norm_kernel
from .matmul_warp_kernels import warp_product_kernel

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
# Of a product that leaves room on its core for a small kernel: a thread's at the start, then of the second warpgroup.
FEWER_REGISTERS = {"maxnreg": 128, "NUM_REGISTERS": 168}


@dataclass(frozen=True)
class WarpTiles:
    """How a product is cut.

    warpgroups: 1 or 2, a tile has 64 rows for each. columns: of a tile of the result, a power of two; gated ones take so many
    of the gate and as many of up. inputs: of a tile, 64 or 128. stages: tiles of inputs on the chip. group: row tiles that
    share the cache. parts: into how many the inner dim is cut where the result is parts. more: columns of a tile beside those,
    a power of two or 0. is_light: the kernel behind may wait on the same cores, if it is small.
    """

    warpgroups: int
    columns: int
    inputs: int
    stages: int
    group: int = 8
    parts: int = 1
    more: int = 0
    is_light: bool = False


def why_warps_refused(spec: OpSpec, *row_names: str) -> str | None:
    """Why products of rows of these sizes cannot go this way, or None."""
    if refused := why_generation_refused(spec):
        return refused
    if isinstance(add_parts_rms_norm_kernel, InterpretedFunction):
        return "warps that work apart cannot be interpreted (TRITON_INTERPRET unset)"
    if spec.dtype not in DTYPES:
        return f"takes {', '.join(map(str, DTYPES))}, got {spec.dtype}"
    return why_descriptors_refused(spec, *row_names)


@dataclass(frozen=True)
class Outstanding:
    """A norm that rows still lack: squares_NS fp32 [N, S], which add up to a row's sum of squares, and the norm's eps."""

    squares_NS: torch.Tensor
    eps: float


def launch_warp_product(
    x_NK: torch.Tensor,
    weight_OK: torch.Tensor,
    tiles: WarpTiles,
    *,
    is_gated: bool,
    norm: Outstanding | None = None,
) -> torch.Tensor:
    """[N, O], or gated [N, F] of the weight [2F, K]; raises ValueError for a dtype or strides it cannot take.

    norm: what the rows lack; K is then a multiple of the tiles' inputs.
    """
    num_columns = weight_OK.shape[0] // 2 if is_gated else weight_OK.shape[0]
    out_NO = x_NK.new_empty((x_NK.shape[0], num_columns))
    if out_NO.numel() > 0:
        _launch(x_NK, weight_OK, out_NO, None, tiles, is_gated, norm)
    return out_NO


def launch_warp_parts(
    x_NK: torch.Tensor, weight_OK: torch.Tensor, tiles: WarpTiles
) -> torch.Tensor:
    """fp32 [S, N, O], whose sum over S is the product; raises ValueError as above. There is a row at least."""
    shape = (tiles.parts, x_NK.shape[0], weight_OK.shape[0])
    parts_SNO = x_NK.new_empty(shape, dtype=torch.float32)
    _launch(x_NK, weight_OK, None, parts_SNO, tiles, False, None)
    return parts_SNO


def _launch(
    x_NK: torch.Tensor,
    weight_OK: torch.Tensor,
    out_NO: torch.Tensor | None,
    parts_SNO: torch.Tensor | None,
    tiles: WarpTiles,
    is_gated: bool,
    norm: Outstanding | None,
) -> None:
    if x_NK.dtype not in DTYPES or weight_OK.dtype != x_NK.dtype:
        raise ValueError(f"dtypes must be 16-bit and alike, got {x_NK.dtype}, {weight_OK.dtype}")
    check_rows_dense("x_NK", x_NK, 2)
    check_rows_dense("weight_OK", weight_OK, 2)
    num_rows, num_inputs = x_NK.shape
    num_columns = weight_OK.shape[0] // 2 if is_gated else weight_OK.shape[0]
    rows = WARPGROUP_ROWS * tiles.warpgroups
    columns = tiles.columns + tiles.more
    num_tiles = -(-num_rows // rows) * -(-num_columns // columns) * tiles.parts
    widths = [width for width in (tiles.columns, tiles.more) if width]
    weights: list[Any] = [tile_descriptor(weight_OK, width, tiles.inputs) for width in widths]
    outs: list[Any] = [None, None]
    if out_NO is not None:
        outs = [tile_descriptor(out_NO, WARPGROUP_ROWS, width) for width in widths]
    warp_product_kernel[(min(NUM_CORES, num_tiles),)](  # one a core
        tile_descriptor(x_NK, rows, tiles.inputs),
        *([*weights, None])[:2],
        *([*outs, None])[:2],
        parts_SNO,
        None if norm is None else norm.squares_NS,
        num_rows,
        num_columns,
        0.0 if norm is None else norm.eps,
        STEPS=-(-num_inputs // (tiles.inputs * tiles.parts)),
        STAGES=tiles.stages,
        PARTS=tiles.parts,
        WARPGROUPS=tiles.warpgroups,
        TILE_O=tiles.columns,
        MORE=tiles.more,
        TILE_K=tiles.inputs,
        GROUP=tiles.group,
        IS_GATED=is_gated,
        **squares_sizes(norm),
        **register_options(tiles.is_light),
        num_warps=4,
        launch_pdl=True,  # starts before the kernel in front of it has ended
    )


def register_options(is_light: bool) -> dict[str, int]:
    """Options of a launch."""
    return FEWER_REGISTERS if is_light else {"NUM_REGISTERS": REGISTERS}


def squares_sizes(norm: Outstanding | None) -> dict[str, int]:
    """How many squares a row has, for the kernels: as they are, and rounded up to a power of two."""
    num_squares = 1 if norm is None else norm.squares_NS.shape[1]
    return {"SQUARES": num_squares, "SQUARES_PAD": max(2, next_power_of_two(num_squares))}


def tile_descriptor(matrix: torch.Tensor, tile_rows: int, tile_columns: int) -> Any:
    """Of a contiguous matrix that goes in such tiles, which lie swizzled on the chip as the matrix instructions take them."""
    layout = _layout(tile_rows, tile_columns, matrix.dtype)
    return TensorDescriptor.from_tensor(matrix, [tile_rows, tile_columns], layout)


@cache
def _layout(tile_rows: int, tile_columns: int, dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([tile_rows, tile_columns], DTYPES[dtype])
