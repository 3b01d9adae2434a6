"""The gated product in one kernel, where that beats the product and the activation apart.

N rows, M inputs, F outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .descriptors import descriptor
from .matmul_kernels import linear_silu_mul_kernel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ProductTiles:
    """rows, columns, inputs: of a tile, powers of two. group: row tiles that share the cache. options: of the compiler."""

    rows: int
    columns: int
    inputs: int
    group: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)


def launch_linear_silu_mul(
    x_NM: "torch.Tensor", weight_2FM: "torch.Tensor", tiles: ProductTiles
) -> "torch.Tensor":
    """See `xgr_runtime.hal.ops.activation.linear_silu_mul`."""
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
