"""Products whose tiles the copy engine brings (Hopper): descriptors, made on the host, in place of addresses.

The gated product multiplies a tile of rows with a tile of the gate and the same tile of the up weight, and writes
silu(gate) * up alone: the [N, 2F] product is neither written nor read. Tiles go in groups of rows, so that the tiles that
are worked on at once share rows and weights in the cache. N rows, M inputs, F or O outputs.
"""

import triton
import triton.language as tl


@triton.jit
def place_of_tile(tile, num_row_tiles, num_col_tiles, GROUP: tl.constexpr):
    """Row tile and column tile of the `tile`-th: down the rows of a group, then to the next column."""
    in_group = GROUP * num_col_tiles
    first = tile // in_group * GROUP
    height = tl.minimum(num_row_tiles - first, GROUP)
    return first + tile % in_group % height, tile % in_group // height


@triton.jit
def linear_silu_mul_kernel(
    x_desc,
    weight_desc,
    out_desc,
    num_rows,
    num_features,
    M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_F: tl.constexpr,
    TILE_M: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out = silu(x gate^T) * (x up^T), a tile a program; the weight holds the gate's rows, then up's."""
    num_row_tiles, num_col_tiles = tl.cdiv(num_rows, TILE_N), tl.cdiv(num_features, TILE_F)
    row_tile, col_tile = place_of_tile(tl.program_id(0), num_row_tiles, num_col_tiles, GROUP)
    n, f = row_tile * TILE_N, col_tile * TILE_F
    gate_NF = tl.zeros((TILE_N, TILE_F), tl.float32)
    up_NF = tl.zeros((TILE_N, TILE_F), tl.float32)
    for m in range(0, M, TILE_M):
        x_NM = x_desc.load([n, m])
        gate_FM = weight_desc.load([f, m])
        up_FM = weight_desc.load([num_features + f, m])
        gate_NF = tl.dot(x_NM, gate_FM.T, gate_NF)
        up_NF = tl.dot(x_NM, up_FM.T, up_NF)
    out_NF = gate_NF / (1.0 + tl.exp(-gate_NF)) * up_NF
    out_desc.store([n, f], out_NF.to(out_desc.dtype))
