"""Pairs of products around the residual stream, of few rows: by clusters of programs. N rows, T packed tokens, K inputs.

M hidden size, F feed-forward size, O outputs of queries, keys and values. The first product leaves the norm of the new rows to
the second one, as in `stream.py`, but for up to 128 rows, whose time is that of the weights' bytes.
"""

import torch

from xgr_runtime.hal.ops.stream import (
    stream_linear_rope_write_shared_kv,
    stream_linear_rope_write_unshared_kv,
    stream_linear_silu_mul,
)
from xgr_runtime.hal.registry import OpSpec, impl

from .cluster import HALF_ROWS, launch_cluster_add, launch_cluster_gated
from .cluster_source import TILE_INPUTS, TILE_ROWS
from .matmul_warp import why_warps_refused
from .qkv import HEAD_DIMS, OF_ONE_HEAD, HeadTiles, launch_qkv

# What has no figures is bound nowhere: the ops' parts have.
IS_GATED_MEASURED, ARE_HEADS_MEASURED = False, False
LARGEST_HIDDEN = 2048
# Programs of a cluster: of an added product with up to so many inputs and with more, and of a gated one.
FEW_INPUTS, ADD_PROGRAMS_FEW, ADD_PROGRAMS_MANY = 2048, 4, 4
GATED_PROGRAMS = 2


def add_programs(num_inputs: int) -> int:
    """Programs that divide the inputs of a product that is added."""
    return ADD_PROGRAMS_FEW if num_inputs <= FEW_INPUTS else ADD_PROGRAMS_MANY


def heads_of_a_tile(num_rows: int) -> HeadTiles:
    """Two heads and the sums of squares are more than a thread's registers hold."""
    return OF_ONE_HEAD[0 if num_rows <= HALF_ROWS else 1]


def why_refused(spec: OpSpec, num_inputs: int | None) -> str | None:
    """Why a product of so many inputs (None: not known) into the stream, with another behind it, cannot go this way, or None."""
    if spec.dtype != torch.bfloat16:
        return f"takes torch.bfloat16, as rows that are not normalised overflow others, got {spec.dtype}"
    rows = spec.dims.get("T", spec.dims.get("N", 1))
    if rows > TILE_ROWS:
        return f"T must be at most {TILE_ROWS}, got {rows}"
    hidden = spec.dims.get("M", TILE_INPUTS)
    if hidden > LARGEST_HIDDEN or hidden % TILE_INPUTS:
        return f"M must be a multiple of {TILE_INPUTS} up to {LARGEST_HIDDEN}, got {hidden}"
    if num_inputs is not None:
        divisor = TILE_INPUTS * add_programs(num_inputs)
        if num_inputs % divisor:
            return f"inputs must be a multiple of {divisor}, got {num_inputs}"
    return why_warps_refused(spec, "F")


def why_gated_refused(spec: OpSpec) -> str | None:
    """Why an attention's output and the gated product behind it cannot go this way, or None."""
    heads, dim = spec.dims.get("Q"), spec.dims.get("D")
    return why_refused(spec, None if heads is None or dim is None else heads * dim)


def why_heads_refused(spec: OpSpec) -> str | None:
    """Likewise a feed-forward layer's output and the next layer's queries, keys and values."""
    head_dim = spec.dims.get("D", HEAD_DIMS[0])
    if head_dim not in HEAD_DIMS:
        return f"D must be one of {', '.join(map(str, HEAD_DIMS))}, got {head_dim}"
    return why_refused(spec, spec.dims.get("F"))


def _accepts_gated(spec: OpSpec) -> str | None:
    return why_gated_refused(spec) if IS_GATED_MEASURED else "has no figures"


def _accepts_heads(spec: OpSpec) -> str | None:
    return why_heads_refused(spec) if ARE_HEADS_MEASURED else "has no figures"


@impl(stream_linear_silu_mul, provider="nvrtc", device="cuda", accepts=_accepts_gated)
def stream_linear_silu_mul_by_clusters(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    gate_up_2FM: torch.Tensor,
) -> torch.Tensor:
    """Two kernels. The kernel in front on the stream must write no weight."""
    stream = (residual_NM, norm_weight_M, eps)
    rows_NM, norm = launch_cluster_add(x_NK, weight_MK, *stream, add_programs(x_NK.shape[1]))
    return launch_cluster_gated(rows_NM, gate_up_2FM, GATED_PROGRAMS, norm)


@impl(stream_linear_rope_write_shared_kv, provider="nvrtc", device="cuda", accepts=_accepts_heads)
def stream_linear_rope_write_pages_by_clusters(
    x_TK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_TM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    qkv_weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    """Two kernels, the second one that of `qkv.py`. Likewise."""
    stream = (residual_TM, norm_weight_M, eps)
    rows_TM, norm = launch_cluster_add(x_TK, weight_MK, *stream, add_programs(x_TK.shape[1]))
    slots = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    heads = (qkv_weight_OM, q_norm_D, k_norm_D, eps, cos_TD, sin_TD)
    return launch_qkv(rows_TM, *heads, *slots, slot_T, heads_of_a_tile(rows_TM.shape[0]), norm)


@impl(stream_linear_rope_write_unshared_kv, provider="nvrtc", device="cuda", accepts=_accepts_heads)
def stream_linear_rope_write_rows_by_clusters(
    x_NK: torch.Tensor,
    weight_MK: torch.Tensor,
    residual_NM: torch.Tensor,
    norm_weight_M: torch.Tensor,
    eps: float,
    qkv_weight_OM: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    cos_ND: torch.Tensor,
    sin_ND: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    position: int,
) -> torch.Tensor:
    """Likewise, to `position` of the row's slot."""
    stream = (residual_NM, norm_weight_M, eps)
    rows_NM, norm = launch_cluster_add(x_NK, weight_MK, *stream, add_programs(x_NK.shape[1]))
    slots = k_rows[:, position], v_rows[:, position]
    heads = (qkv_weight_OM, q_norm_D, k_norm_D, eps, cos_ND, sin_ND)
    return launch_qkv(rows_NM, *heads, *slots, slot_N, heads_of_a_tile(rows_NM.shape[0]), norm)
