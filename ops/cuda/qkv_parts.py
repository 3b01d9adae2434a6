"""Products of queries, keys and values of few rows: more cores read the weight than there are heads.

A head's weight takes one core longer to bring than all heads' take all cores. So tiles are narrower than heads, their inner dim is
cut, and a second kernel adds the parts up and ends the heads. In one of 28 layers in a graph, on one H200, with the short
attention behind it, us, bf16, 16 queries and 8 keys of 128, beside the one kernel of `qkv`:

| rows | 1,024 inputs | 2,048 inputs |
|---|---|---|
| 32 | 27.7 and 26.9 | 44.7 and 45.8 |
| 128 | 34.8 and 32.9 | 55.2 and 55.7 |

T packed tokens or beam rows, M inputs, X = Q + 2 G heads: Q queries, G keys, G values; D head dim, S parts.
"""

from collections.abc import Mapping
from math import gcd

import torch

from .hopper import BYTES_ON_CHIP, NUM_CORES, WARPGROUP_ROWS
from .matmul_warp import WarpTiles, launch_warp_parts
from .qkv_parts_kernels import rope_write_parts_kernel

MOST_ROWS, LEAST_INPUTS = 2 * WARPGROUP_ROWS, 1536
COLUMNS, INPUTS = 64, 64  # of a tile
PARTS = 2
MOST_HEADS = 8  # of a program that adds up
# Rotations round step by step, as the references do.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
EARLY = {"IS_DEPENDENT": True, "launch_pdl": True}  # before the kernel in front of it has ended


def is_faster_in_parts(num_rows: int, num_inputs: int, num_outputs: int) -> bool:
    """Whether it pays, and there is a core for every tile."""
    is_large = num_rows <= MOST_ROWS and num_inputs >= LEAST_INPUTS
    num_programs = PARTS * -(-num_outputs // COLUMNS)
    return is_large and -(-num_inputs // INPUTS) % PARTS == 0 and num_programs <= NUM_CORES


def launch_qkv_in_parts(
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
) -> torch.Tensor:
    """See `qkv.launch_qkv`, which has checked them. There is a row at least.

    The parts are memory of this call, as those of `linear.launch_linear_add_rms_norm`.
    """
    warpgroups = 2 if x_TM.shape[0] > WARPGROUP_ROWS else 1
    stages = BYTES_ON_CHIP // ((warpgroups * WARPGROUP_ROWS + COLUMNS) * INPUTS * 2)
    tiles = WarpTiles(warpgroups, COLUMNS, INPUTS, stages, parts=PARTS, is_light=True)
    parts_STO = launch_warp_parts(x_TM, weight_OM, tiles)
    norms = q_norm_D, k_norm_D, eps
    return launch_parts_rope_write(parts_STO, *norms, cos_TD, sin_TD, k_slots, v_slots, slot_T)


def launch_parts_rope_write(
    parts_STO: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    k_slots: torch.Tensor,
    v_slots: torch.Tensor,
    slot_T: torch.Tensor,
    start: Mapping[str, bool] = EARLY,
) -> torch.Tensor:
    """The second kernel; parts are fp32, contiguous. start: an interpreter knows no early one."""
    num_parts, num_rows, num_outputs = parts_STO.shape
    num_kv_heads, head_dim = k_slots.shape[1:]
    num_all = num_outputs // head_dim
    num_heads = num_all - 2 * num_kv_heads
    q_TQD = k_slots.new_empty((num_rows, num_heads, head_dim))
    heads = gcd(num_heads, num_kv_heads, MOST_HEADS)
    rope_write_parts_kernel[(num_rows, num_all // heads)](
        parts_STO,
        q_TQD if q_norm_D is None else q_norm_D,
        q_TQD if k_norm_D is None else k_norm_D,
        cos_TD,
        sin_TD,
        q_TQD,
        k_slots,
        v_slots,
        slot_T,
        num_rows,
        eps,
        cos_TD.stride(0),
        sin_TD.stride(0),
        k_slots.stride(0),
        v_slots.stride(0),
        S=num_parts,
        IS_NORMALISED=q_norm_D is not None,
        Q=num_heads,
        G=num_kv_heads,
        HALF=head_dim // 2,
        HEADS=heads,
        **start,
        **OPTIONS,
    )
    return q_TQD
