"""Products of few rows."""

import torch

from xgr_runtime.hal.ops.activation import linear_silu_mul
from xgr_runtime.hal.ops.linear import linear_add_rms_norm
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.launch import check_rows_dense, next_power_of_two
from . import matmul_warp
from .linear_kernels import add_parts_kernel, add_parts_rms_norm_kernel
from .matmul_warp import (
    NUM_CORES,
    WARPGROUP_ROWS,
    WarpTiles,
    launch_warp_parts,
    launch_warp_product,
    why_warps_refused,
)
from .rules import why_row_refused


def launch_linear_in_parts(
    x_NK: torch.Tensor,
    weight_OK: torch.Tensor,
    tiles: WarpTiles,
    tile: int = 1024,
    num_warps: int = 4,
) -> torch.Tensor:
    """See `xgr_runtime.hal.ops.linear.linear`; raises ValueError for a dtype or strides it cannot take."""
    out_NO = x_NK.new_empty((x_NK.shape[0], weight_OK.shape[0]))
    if out_NO.numel() == 0:
        return out_NO
    parts_SNO = launch_warp_parts(x_NK, weight_OK, tiles)
    add_parts_kernel[(-(-out_NO.numel() // tile),)](
        parts_SNO,
        out_NO,
        out_NO.numel(),
        S=tiles.parts,
        TILE=tile,
        IS_DEPENDENT=matmul_warp.IS_DEPENDENT,
        num_warps=num_warps,
        launch_pdl=matmul_warp.IS_DEPENDENT,
    )
    return out_NO


def launch_linear_add_rms_norm(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    tiles: WarpTiles,
    num_warps: int = 4,
) -> torch.Tensor:
    """See `xgr_runtime.hal.ops.linear.linear_add_rms_norm`; raises ValueError for a dtype or strides it cannot take."""
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
        IS_DEPENDENT=matmul_warp.IS_DEPENDENT,
        num_warps=num_warps,
        launch_pdl=matmul_warp.IS_DEPENDENT,
    )
    return out_NM


MOST_ROWS = 1024


def tiles_for(num_rows: int, num_outputs: int, num_inputs: int) -> WarpTiles:
    warpgroups = 1 if num_rows <= WARPGROUP_ROWS else 2
    columns = 64 if num_rows <= 256 else 128
    num_tiles = -(-num_rows // (warpgroups * WARPGROUP_ROWS)) * -(-num_outputs // columns)
    num_steps = -(-num_inputs // 64)
    parts = max(1, min(NUM_CORES // num_tiles, num_steps // 4))
    stage_bytes = (warpgroups * WARPGROUP_ROWS + columns) * 128
    return WarpTiles(warpgroups, columns, 64, min(12, 200_000 // stage_bytes), 8, parts)


def _accepts(spec: OpSpec) -> str | None:
    if spec.dims.get("T", 1) > MOST_ROWS:
        return f"T must be at most {MOST_ROWS}, got {spec.dims['T']}"
    return why_row_refused(spec, "M") or why_warps_refused(spec, "F")


@impl(linear_add_rms_norm, provider="gluon", device="cuda", accepts=_accepts)
def linear_add_rms_norm_in_parts(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    tiles = tiles_for(x_NK.shape[0], weight_MK.shape[0], x_NK.shape[1])
    return launch_linear_add_rms_norm(x_NK, weight_MK, residual_NM, norm_weight_M, eps, tiles)


FEW = WarpTiles(2, 64, 64, 6)
MANY = WarpTiles(2, 128, 64, 4)


def _accepts_warps(spec: OpSpec) -> str | None:
    return why_warps_refused(spec, "M", "F")


@impl(linear_silu_mul, provider="gluon", device="cuda", accepts=_accepts_warps)
def linear_silu_mul_by_warps(x_NM: "torch.Tensor", weight_2FM: "torch.Tensor") -> "torch.Tensor":
    """The [N, 2F] product stays on the chip."""
    tiles = MANY if x_NM.shape[0] > 1024 else FEW
    return launch_warp_product(x_NM, weight_2FM, tiles, is_gated=True)
