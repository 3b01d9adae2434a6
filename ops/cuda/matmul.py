"""The gated product in one kernel, where that beats the product and the activation apart.

N rows, M inputs, F outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from xgr_runtime.hal.ops.activation import linear_silu_mul
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.launch import check_dtype, check_rows_dense, why_dtype_refused
from .descriptors import descriptor, why_descriptors_refused
from .matmul_kernels import linear_silu_mul_kernel

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ProductTiles:
    """rows, columns, inputs: of a tile, powers of two. group: row tiles that share the cache. options: of the compiler."""

    rows: int
    columns: int
    inputs: int
    group: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)


MANY_ROWS = ProductTiles(128, 128, 64, options={"num_warps": 8, "num_stages": 4})
FEW_ROWS = ProductTiles(128, 64, 64, options={"num_warps": 4, "num_stages": 3})


def _accepts(spec: OpSpec) -> str | None:
    if spec.dtype not in HALF:
        return f"takes {', '.join(map(str, HALF))}, got {spec.dtype}"
    refused = why_descriptors_refused(spec, "M", "F")
    return refused or why_dtype_refused(linear_silu_mul_kernel, spec.dtype)


@impl(linear_silu_mul, provider="triton-tma", device="cuda", accepts=_accepts)
def linear_silu_mul_in_one_pass(x_NM: "torch.Tensor", weight_2FM: "torch.Tensor") -> "torch.Tensor":
    """The [N, 2F] product stays on the chip."""
    tiles = MANY_ROWS if x_NM.shape[0] > 1024 else FEW_ROWS
    return launch_linear_silu_mul(x_NM, weight_2FM, tiles)


def launch_linear_silu_mul(
    x_NM: "torch.Tensor", weight_2FM: "torch.Tensor", tiles: ProductTiles
) -> "torch.Tensor":
    """See `xgr_runtime.hal.ops.activation.linear_silu_mul`; raises ValueError for a dtype or strides it cannot take."""
    check_dtype(linear_silu_mul_kernel, x_NM.dtype)
    check_rows_dense("x_NM", x_NM, 2)
    check_rows_dense("weight_2FM", weight_2FM, 2)
    (num_rows, num_inputs), num_features = x_NM.shape, weight_2FM.shape[0] // 2
    out_NF = x_NM.new_empty((num_rows, num_features))
    if num_rows == 0:
        return out_NF
    grid = (-(-num_rows // tiles.rows) * -(-num_features // tiles.columns),)
    linear_silu_mul_kernel[grid](
        descriptor(x_NM, tiles.rows, tiles.inputs),
        descriptor(weight_2FM, tiles.columns, tiles.inputs),
        descriptor(out_NF, tiles.rows, tiles.columns),
        num_rows,
        num_features,
        M=num_inputs,
        TILE_N=tiles.rows,
        TILE_F=tiles.columns,
        TILE_M=tiles.inputs,
        GROUP=tiles.group,
        **tiles.options,
    )
    return out_NF
