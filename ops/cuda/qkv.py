"""Products of queries, keys and values that end rotated and stored: one kernel, or two where rows are few and inputs many.

T packed tokens or beam rows, M inputs, X = Q + 2 G heads: Q queries, G keys, G values; D head dim.

On one H200, us, bf16, 16 queries and 8 keys of 128, beside the library's product and the rotation and stores behind it:

| rows | 1,024 inputs | 2,048 inputs |
|---|---|---|
| 128 / 256 | 5.7 and 6.9 / 7.2 and 8.8 | 9.1 and 10.5 / 11.2 and 12.5 |
| 512 / 1,024 | 10.1 and 12.0 / 17.7 and 19.5 | 15.7 and 17.7 / 28.0 and 30.3 |
| 4,096 / 8,192 | 63.6 and 69.7 / 130 and 136 | 111 and 110 / 228 and 220 |
| 40,000 | 592 and 643 | 1,080 and 1,143 |

Of 32 and 64 rows there are figures of bare products: 5.3 and 8.4 us with tiles like these, the library's 5.7 and 7.8; behind
the library's come the rotation and stores, some 2 us.
"""

from dataclasses import dataclass

import torch

from xgr_runtime.hal.ops.fused_attention import (
    linear_rope_write_shared_kv,
    linear_rope_write_unshared_kv,
)
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.launch import check_rows_dense
from .hopper import HEAD_DIMS, NUM_CORES, REGISTERS, WARPGROUP_ROWS, why_head_refused
from .matmul_warp import (
    DTYPES,
    Outstanding,
    squares_sizes,
    tile_descriptor,
    why_warps_refused,
)
from .qkv_kernels import qkv_kernel
from .qkv_parts import is_faster_in_parts, launch_qkv_in_parts

LEAST_ROWS = 32  # fewer are without figures
# From LOST_FROM rows on and below LOST_TO, of so many inputs, the library's product and a pass over its result are faster.
LARGE_INPUTS, LOST_FROM, LOST_TO = 1536, 2048, 16384
TILE_INPUTS = 64
ROW_TILES_OF_GROUP = 8  # that share the cache
# Of a tile of 64 rows and one head: what its product costs, and what bringing its rows and its head's weight does.
PRODUCT, ROWS, HEAD = 128, 32, 64


@dataclass(frozen=True)
class HeadTiles:
    """warpgroups: 1 or 2, a tile has 64 rows for each. heads: of a tile, 1 or 2. stages: tiles of inputs on the chip."""

    warpgroups: int
    heads: int
    stages: int


OF_ONE_HEAD = (HeadTiles(1, 1, 8), HeadTiles(2, 1, 6))
OF_TWO_HEADS = HeadTiles(2, 2, 4)


def _accepts(spec: OpSpec) -> str | None:
    rows = spec.dims.get("T", spec.dims.get("N", LEAST_ROWS))
    if rows < LEAST_ROWS:
        return f"T must be at least {LEAST_ROWS}, got {rows}"
    inputs = spec.dims.get("M", 0)
    if inputs >= LARGE_INPUTS and LOST_FROM <= rows < LOST_TO:
        return f"T must be below {LOST_FROM} or at least {LOST_TO} where M is {inputs}, got {rows}"
    return why_head_refused(spec) or why_warps_refused(spec, "M")


def head_tiles(num_rows: int, num_heads: int, num_kv_heads: int) -> HeadTiles:
    """Those that the cores are through with first: waves of tiles times what a tile takes."""
    choice: tuple[HeadTiles, ...] = OF_ONE_HEAD
    if num_heads % 2 == 0 and num_kv_heads % 2 == 0:
        choice = (*OF_ONE_HEAD, OF_TWO_HEADS)

    def time(tiles: HeadTiles) -> int:
        row_tiles = -(-num_rows // (tiles.warpgroups * WARPGROUP_ROWS))
        col_tiles = (num_heads + 2 * num_kv_heads) // tiles.heads
        waves = -(-row_tiles * col_tiles // NUM_CORES)
        product = PRODUCT * tiles.warpgroups * tiles.heads
        return waves * (product + ROWS * tiles.warpgroups + HEAD * tiles.heads)

    return min(choice, key=time)


@impl(linear_rope_write_shared_kv, provider="gluon", device="cuda", accepts=_accepts)
def linear_rope_write_pages_by_warps(
    x_TM: torch.Tensor,
    weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    """The kernel in front on the stream must not write weight or norms."""
    slots = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    norms = q_norm_D, k_norm_D, eps
    return launch_qkv(x_TM, weight_OM, *norms, cos_TD, sin_TD, *slots, slot_T)


@impl(linear_rope_write_unshared_kv, provider="gluon", device="cuda", accepts=_accepts)
def linear_rope_write_rows_by_warps(
    x_NM: torch.Tensor,
    weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_ND: torch.Tensor,
    sin_ND: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    position: int,
) -> torch.Tensor:
    """Likewise, to `position` of the row's slot."""
    slots = k_rows[:, position], v_rows[:, position]
    norms = q_norm_D, k_norm_D, eps
    return launch_qkv(x_NM, weight_OM, *norms, cos_ND, sin_ND, *slots, slot_N)


def launch_qkv(
    x_TM: torch.Tensor,
    weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    k_slots: torch.Tensor,
    v_slots: torch.Tensor,
    slot_T: torch.Tensor,
    tiles: HeadTiles | None = None,
    norm: Outstanding | None = None,
) -> torch.Tensor:
    """Normalised and rotated queries; keys likewise and values go to slot slot_T[t].

    Args:
        x_TM: [T, M], contiguous, 16-bit.
        weight_OM: [X D, M], contiguous, dtype of x.
        q_norm_D: [D], dtype of x, or None where heads are not normalised.
        k_norm_D: likewise; None exactly where q_norm_D is.
        eps: of the norms.
        cos_TD: fp32 [T, D], both halves alike, any stride over rows.
        sin_TD: likewise.
        k_slots: [slots, G, D], any stride over slots, dtype of x; MUTATED.
        v_slots: like k_slots; MUTATED.
        slot_T: int32 or int64 [T]. Rows that name the same slot overwrite each other, in any order.
        tiles: of the one kernel; None chooses, the two of `qkv_parts` where nothing is outstanding too.
        norm: what the rows of x lack, with the same eps; M is then a multiple of 64.

    Returns:
        [T, Q, D], dtype of x, new memory.

    Raises:
        ValueError: a dtype, head dim or strides it cannot take, or one norm without the other.
    """
    _check(x_TM, weight_OM, q_norm_D, k_norm_D, cos_TD, sin_TD, k_slots, v_slots, slot_T)
    num_rows, num_inputs = x_TM.shape
    num_kv_heads, head_dim = k_slots.shape[1:]
    num_heads = weight_OM.shape[0] // head_dim - 2 * num_kv_heads
    if num_rows == 0:
        return x_TM.new_empty((num_rows, num_heads, head_dim))
    is_own_choice = tiles is None and norm is None
    if is_own_choice and is_faster_in_parts(num_rows, num_inputs, weight_OM.shape[0]):
        norms, angles = (q_norm_D, k_norm_D, eps), (cos_TD, sin_TD)
        return launch_qkv_in_parts(x_TM, weight_OM, *norms, *angles, k_slots, v_slots, slot_T)
    q_TQD = x_TM.new_empty((num_rows, num_heads, head_dim))
    tiles = tiles or head_tiles(num_rows, num_heads, num_kv_heads)
    tile_rows, tile_columns = tiles.warpgroups * WARPGROUP_ROWS, tiles.heads * head_dim
    num_tiles = -(-num_rows // tile_rows) * (weight_OM.shape[0] // tile_columns)
    qkv_kernel[(min(NUM_CORES, num_tiles),)](
        tile_descriptor(x_TM, tile_rows, TILE_INPUTS),
        tile_descriptor(weight_OM, tile_columns, TILE_INPUTS),
        q_norm_D,
        k_norm_D,
        cos_TD,
        sin_TD,
        q_TQD,
        k_slots,
        v_slots,
        slot_T,
        None if norm is None else norm.squares_NS,
        num_rows,
        eps,
        cos_TD.stride(0),
        sin_TD.stride(0),
        k_slots.stride(0),
        v_slots.stride(0),
        STEPS=-(-num_inputs // TILE_INPUTS),
        STAGES=tiles.stages,
        WARPGROUPS=tiles.warpgroups,
        HEADS=tiles.heads,
        TILE_K=TILE_INPUTS,
        GROUP=ROW_TILES_OF_GROUP,
        Q=num_heads,
        G=num_kv_heads,
        HALF=head_dim // 2,
        **squares_sizes(norm),
        NUM_REGISTERS=REGISTERS,
        num_warps=4,
        launch_pdl=True,  # starts before the kernel in front of it has ended
    )
    return q_TQD


def _check(
    x_TM: torch.Tensor,
    weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    k_slots: torch.Tensor,
    v_slots: torch.Tensor,
    slot_T: torch.Tensor,
) -> None:
    if (q_norm_D is None) != (k_norm_D is None):
        raise ValueError("queries and keys are normalised both or neither")
    norms = [norm for norm in (q_norm_D, k_norm_D) if norm is not None]
    alike = {tensor.dtype for tensor in (x_TM, weight_OM, k_slots, v_slots, *norms)}
    if len(alike) > 1 or x_TM.dtype not in DTYPES:
        raise ValueError(f"dtypes must be 16-bit and alike, got {', '.join(map(str, alike))}")
    if k_slots.shape[2] not in HEAD_DIMS or weight_OM.shape[0] % k_slots.shape[2]:
        raise ValueError(f"no heads: {weight_OM.shape[0]} columns, head dim {k_slots.shape[2]}")
    rows = [("x_TM", x_TM, 2), ("weight_OM", weight_OM, 2), ("slot_T", slot_T, 1)]
    rows += [("cos_TD", cos_TD, 1), ("sin_TD", sin_TD, 1)]
    rows += [("key slots", k_slots, 2), ("value slots", v_slots, 2)]
    rows += [("norm weight", norm, 1) for norm in norms]
    for name, tensor, num_dims in rows:
        check_rows_dense(name, tensor, num_dims)
