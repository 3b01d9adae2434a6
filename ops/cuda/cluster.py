"""Products of up to 128 rows by clusters of programs. N rows, K inputs, M columns of the stream, F feed-forward size.

Few rows are bound by bytes of the weight, and by what every program reads beside its part of it: the rows. A cluster reads
them once, or gives each of its programs another part of the inner dim and adds up on the chip, so that the norm's squares and
the new stream leave in the same kernel. The kernels and what holds in them: `cluster_tiles.cu`.
"""

import ctypes
from functools import cache, partial

import torch

from ..triton.launch import check_rows_dense
from .cluster_source import (
    NUM_THREADS,
    TILE_INPUTS,
    TILE_ROWS,
    ClusterTiles,
    cluster_tiles,
    source,
)
from .cpp_kernel import CppKernel, pointer
from .driver import tensor_map
from .matmul_warp import Outstanding
from .nvrtc import compiled

HALF_ROWS = TILE_ROWS // 2  # so few bring half the tile


def launch_cluster_add(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    programs: int,
) -> tuple[torch.Tensor, Outstanding]:
    """The new residual times the norm's weight, rounded, and what it still lacks; residual_NM is MUTATED.

    programs: of a cluster, 2, 4 or 8. Raises ValueError for dtypes, sizes or strides it cannot take. The kernel in front on the
    stream must not write the weight.
    """
    alike = (("weight_MK", weight_MK), ("residual_NM", residual_NM))
    _check(x_NK, *alike, ("norm_weight_M", norm_weight_M))
    num_rows, num_inputs = x_NK.shape
    num_columns = weight_MK.shape[0]
    if num_inputs % (TILE_INPUTS * programs):
        raise ValueError(f"{programs} programs cannot divide {num_inputs} inputs")
    tiles = cluster_tiles("add", programs, num_columns)
    num_tiles = -(-num_columns // tiles.columns)
    rows_NM = torch.empty_like(residual_NM)
    squares_NS = x_NK.new_empty((num_rows, num_tiles), dtype=torch.float32)
    if num_rows:
        tile_rows = HALF_ROWS if num_rows <= HALF_ROWS else TILE_ROWS
        kernel(tiles, x_NK.device.index).start(
            num_tiles * programs,
            tensor_map(x_NK.data_ptr(), num_rows, num_inputs, tile_rows),
            tensor_map(weight_MK.data_ptr(), num_columns, num_inputs, tiles.columns),
            *map(pointer, (residual_NM, norm_weight_M, rows_NM, squares_NS)),
            *map(ctypes.c_int, (num_rows, num_inputs, num_columns, tile_rows)),
        )
    return rows_NM, Outstanding(squares_NS, eps)


def launch_cluster_gated(
    x_NM: torch.Tensor, weight_2FM: torch.Tensor, programs: int, norm: Outstanding | None = None
) -> torch.Tensor:
    """silu(x gate^T) * (x up^T), [N, F]. programs: of a cluster, 1, 2 or 4. norm: what the rows lack. Else as above."""
    _check(x_NM, ("weight_2FM", weight_2FM))
    num_rows, num_inputs = x_NM.shape
    num_columns = weight_2FM.shape[0] // 2
    if num_inputs % TILE_INPUTS:
        raise ValueError(f"inputs must be a multiple of {TILE_INPUTS}, got {num_inputs}")
    tiles = cluster_tiles("gated", programs, num_columns)
    num_clusters = -(-num_columns // (tiles.columns * programs))
    out_NF = x_NM.new_empty((num_rows, num_columns))
    squares_NS = None if norm is None else norm.squares_NS
    if num_rows:
        slice_rows = (HALF_ROWS if num_rows <= HALF_ROWS else TILE_ROWS) // programs
        kernel(tiles, x_NM.device.index).start(
            num_clusters * programs,
            tensor_map(x_NM.data_ptr(), num_rows, num_inputs, slice_rows),
            tensor_map(weight_2FM.data_ptr(), 2 * num_columns, num_inputs, tiles.columns),
            *map(pointer, (out_NF, squares_NS)),
            ctypes.c_int(0 if squares_NS is None else squares_NS.shape[1]),
            ctypes.c_float(0.0 if norm is None else norm.eps),
            *map(ctypes.c_int, (num_rows, num_inputs, num_columns, slice_rows)),
        )
    return out_NF


def _check(x_NK: torch.Tensor, *alike: tuple[str, torch.Tensor]) -> None:
    num_rows = x_NK.shape[0]
    if num_rows > TILE_ROWS:
        raise ValueError(f"takes {TILE_ROWS} rows at most, got {num_rows}")
    for name, tensor in (("x", x_NK), *alike):
        if tensor.dtype != torch.bfloat16:
            raise ValueError(f"{name} must be torch.bfloat16, got {tensor.dtype}")
        check_rows_dense(name, tensor, tensor.ndim)


@cache
def kernel(tiles: ClusterTiles, device_index: int) -> CppKernel:
    """The one of a device."""
    machine_code = partial(compiled, tiles.name, source(tiles))
    return CppKernel(tiles.name, machine_code, NUM_THREADS, tiles.shared_bytes, device_index)
