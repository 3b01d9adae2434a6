"""The gated product in one kernel. N rows, M inputs, F outputs.

On one H200, us, bf16, beside the library's product and the activation behind it:

| rows | hidden 1,024, F 3,072 | hidden 2,048, F 6,144 |
|---|---|---|
| 32 / 64 | 6.2 and 7.5 / 6.3 and 8.6 | 17.6 and 19.1 / 16.8 and 19.4 |
| 128 / 256 | 6.9 and 8.6 / 9.2 and 10.6 | 18.2 and 20.6 / 22.6 and 25.0 |
| 512 / 1,024 | 12.6 and 15.3 / 20.7 and 25.3 | 38.7 and 42.5 / 69.8 and 79.8 |
| 4,096 / 8,192 | 73.0 and 91.8 / 143 and 188 | 272 and 296 / 590 and 643 |
| 40,000 | 673 and 836 | 2,972 and 3,222 |

Of hidden size 2,048, tiles of 48 columns take a layer of 128 rows from 55.2 us to 54.6, of 32 rows from 44.7 to 44.3; of hidden
size 1,024, one of 256 rows, which are two row tiles, from 44.4 to 44.0.
"""

from typing import TYPE_CHECKING

from xgr_runtime.hal.ops.activation import linear_silu_mul
from xgr_runtime.hal.registry import OpSpec, impl

from .hopper import MOST_CORES, NUM_CORES, WARPGROUP_ROWS
from .matmul_warp import WarpTiles, launch_warp_product, why_warps_refused

if TYPE_CHECKING:
    import torch

FEW_ROWS = WarpTiles(1, 64, 64, 8)
# Of few rows, the weight's time counts: these where they are one for nearly every core, by warpgroups of a tile. Their threads
# leave registers for the small kernel behind.
FEW_WARPGROUPS = 4
A_TILE_A_CORE = {
    1: WarpTiles(1, 32, 64, 10, more=16, is_light=True),
    2: WarpTiles(2, 32, 64, 7, more=16, is_light=True),
}
COLUMNS_OF_ROWS = (
    16  # what bringing the rows of a tile costs, in columns; orders all tiles as measured
)
OF_TWO_WARPGROUPS = (
    WarpTiles(2, 32, 64, 8),
    WarpTiles(2, 64, 64, 6),
    WarpTiles(2, 64, 64, 5, more=32),
    WarpTiles(2, 128, 64, 4),
)


def _accepts(spec: OpSpec) -> str | None:
    return why_warps_refused(spec, "M", "F")


def gated_tiles(num_rows: int, num_features: int) -> WarpTiles:
    """Those that the cores are through with first: of many rows, by waves of tiles times what a tile takes."""
    warpgroups = -(-num_rows // WARPGROUP_ROWS)
    if 1 <= warpgroups <= FEW_WARPGROUPS:
        tiles = A_TILE_A_CORE[min(warpgroups, 2)]
        row_tiles = -(-warpgroups // tiles.warpgroups)
        num_tiles = row_tiles * -(-num_features // (tiles.columns + tiles.more))
        if MOST_CORES <= num_tiles <= NUM_CORES:
            return tiles
    if warpgroups == 1:
        return FEW_ROWS

    def time(tiles: WarpTiles) -> int:
        width = tiles.columns + tiles.more
        row_tiles = -(-num_rows // (tiles.warpgroups * WARPGROUP_ROWS))
        waves = -(-row_tiles * -(-num_features // width) // NUM_CORES)
        return waves * (width + COLUMNS_OF_ROWS)

    return min(OF_TWO_WARPGROUPS, key=time)


@impl(linear_silu_mul, provider="gluon", device="cuda", accepts=_accepts)
def linear_silu_mul_by_warps(x_NM: "torch.Tensor", weight_2FM: "torch.Tensor") -> "torch.Tensor":
    """The [N, 2F] product stays on the chip. The kernel in front on the stream must not write the weight."""
    tiles = gated_tiles(x_NM.shape[0], weight_2FM.shape[0] // 2)
    return launch_warp_product(x_NM, weight_2FM, tiles, is_gated=True)
