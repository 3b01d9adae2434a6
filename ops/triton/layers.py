"""Launchers of the kernels of a layer beside attention.

N rows, T tokens, M size of a row, Q query heads, G KV heads, D head dim, F feed-forward size.
"""

import torch

from .launch import LaunchRules, check_dtype, check_rows_dense, next_power_of_two, row_elements
from .layer_kernels import (
    add_rms_norm_kernel,
    rms_norm_kernel,
    rotary_embedding_kernel,
    silu_mul_kernel,
)


def rotary_tile_elements(num_heads: int, head_dim: int) -> int:
    """What half of all query heads of a token counts for in `max_tile_elements`."""
    return next_power_of_two(num_heads) * next_power_of_two(head_dim // 2)


def launch_rms_norm(
    x_NM: torch.Tensor, weight_M: torch.Tensor, eps: float, rules: LaunchRules
) -> torch.Tensor:
    """See `xgr_runtime.hal.ops.norm.rms_norm`; raises ValueError for a dtype or strides it cannot take."""
    check_dtype(rms_norm_kernel, x_NM.dtype)
    check_rows_dense("x_NM", x_NM, 1)
    check_rows_dense("weight_M", weight_M, 1)
    size = x_NM.shape[-1]
    # A view, or with more than two leading dims that cannot be joined a copy. Rows of a matrix are outer ones: inner ones are
    # counted by the kernel's code, which would differ with every number of rows.
    x_OIM = x_NM.reshape(-1, x_NM.shape[-2] if x_NM.dim() > 2 else 1, size)
    num_rows = x_OIM.shape[0] * x_OIM.shape[1]
    out_NM = torch.empty(x_NM.shape, dtype=x_NM.dtype, device=x_NM.device)
    tile_rows = _tile_rows(size, rules)
    num_items = -(-num_rows // tile_rows)
    rms_norm_kernel[rules.grid(num_items)](
        x_OIM,
        weight_M,
        out_NM,
        num_rows,
        num_items,
        eps,
        x_OIM.stride(0),
        x_OIM.stride(1),
        INNER=x_OIM.shape[1],
        M=size,
        M_PAD=next_power_of_two(size),
        TILE_ROWS=tile_rows,
        **rules.options,
    )
    return out_NM


def launch_add_rms_norm(
    x_NM: torch.Tensor,
    residual_NM: torch.Tensor,
    weight_M: torch.Tensor,
    eps: float,
    rules: LaunchRules,
) -> torch.Tensor:
    """See `xgr_runtime.hal.ops.norm.add_rms_norm`; raises ValueError as above."""
    check_dtype(add_rms_norm_kernel, x_NM.dtype)
    for name, rows in (("x_NM", x_NM), ("residual_NM", residual_NM), ("weight_M", weight_M)):
        check_rows_dense(name, rows, 1)
    num_rows, size = x_NM.shape
    out_NM = torch.empty((num_rows, size), dtype=x_NM.dtype, device=x_NM.device)
    tile_rows = _tile_rows(size, rules)
    num_items = -(-num_rows // tile_rows)
    add_rms_norm_kernel[rules.grid(num_items)](
        x_NM,
        residual_NM,
        weight_M,
        out_NM,
        num_rows,
        num_items,
        eps,
        x_NM.stride(0),
        residual_NM.stride(0),
        M=size,
        M_PAD=next_power_of_two(size),
        TILE_ROWS=tile_rows,
        **rules.options,
    )
    return out_NM


def _tile_rows(size: int, rules: LaunchRules) -> int:
    return max(1, rules.max_tile_elements // row_elements(size))


def launch_rotary_embedding(
    q_TQD: torch.Tensor,
    k_TGD: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    rules: LaunchRules,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `xgr_runtime.hal.ops.rope.rotary_embedding`; raises ValueError as above."""
    check_dtype(rotary_embedding_kernel, q_TQD.dtype)
    for name, rows, num_dims in (
        ("q_TQD", q_TQD, 2),
        ("k_TGD", k_TGD, 2),
        ("cos_TD", cos_TD, 1),
        ("sin_TD", sin_TD, 1),
    ):
        check_rows_dense(name, rows, num_dims)
    num_tokens, num_heads, head_dim = q_TQD.shape
    num_kv_heads = k_TGD.shape[1]
    q_out = torch.empty(q_TQD.shape, dtype=q_TQD.dtype, device=q_TQD.device)
    k_out = torch.empty(k_TGD.shape, dtype=k_TGD.dtype, device=k_TGD.device)
    rotary_embedding_kernel[rules.grid(num_tokens)](
        q_TQD,
        k_TGD,
        cos_TD,
        sin_TD,
        q_out,
        k_out,
        num_tokens,
        q_TQD.stride(0),
        k_TGD.stride(0),
        cos_TD.stride(0),
        sin_TD.stride(0),
        Q=num_heads,
        G=num_kv_heads,
        HALF=head_dim // 2,
        Q_PAD=next_power_of_two(num_heads),
        G_PAD=next_power_of_two(num_kv_heads),
        HALF_PAD=next_power_of_two(head_dim // 2),
        **rules.options,
    )
    return q_out, k_out


def launch_silu_mul(gate_up_N2F: torch.Tensor, rules: LaunchRules) -> torch.Tensor:
    """See `xgr_runtime.hal.ops.activation.silu_mul`; raises ValueError as above."""
    check_dtype(silu_mul_kernel, gate_up_N2F.dtype)
    check_rows_dense("gate_up_N2F", gate_up_N2F, 1)
    num_rows, size = gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2
    out_NF = torch.empty((num_rows, size), dtype=gate_up_N2F.dtype, device=gate_up_N2F.device)
    tile = min(next_power_of_two(size), rules.max_tile_elements)
    num_tiles = -(-size // tile)
    silu_mul_kernel[rules.grid(num_rows * num_tiles)](
        gate_up_N2F,
        out_NF,
        num_rows * num_tiles,
        gate_up_N2F.stride(0),
        F=size,
        NUM_TILES=num_tiles,
        TILE=tile,
        **rules.options,
    )
    return out_NF
