"""Launchers of the attention kernels: the ops' parameters and the device's launch rules, new tensors back.

N rows, Q query heads, G KV heads, D head dim, X = Q // G.
"""

import torch

from .attention_kernels import merge_attention_states_kernel, unshared_attention_kernel
from .launch import LaunchRules, check_dtype, check_rows_dense, next_power_of_two, row_elements


def unshared_tile_elements(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """What the smallest tile of the unshared stage, one KV head's queries, counts for in `max_tile_elements`."""
    return next_power_of_two(num_heads // num_kv_heads) * row_elements(head_dim)


def launch_unshared_attention(
    q_NQD: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slot_N: torch.Tensor,
    num_tokens: int,
    scale: float,
    rules: LaunchRules,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `xgr_runtime.hal.ops.attention.unshared_attention`; raises ValueError for a dtype or strides it cannot take."""
    check_dtype(unshared_attention_kernel, q_NQD.dtype)
    for name, rows in (("q_NQD", q_NQD), ("k_rows", k_rows), ("v_rows", v_rows)):
        check_rows_dense(name, rows, 2)
    num_rows, num_heads, head_dim = q_NQD.shape
    num_kv_heads = k_rows.shape[2]
    tile_head = unshared_tile_elements(num_heads, num_kv_heads, head_dim)
    tile_heads = min(next_power_of_two(num_kv_heads), max(1, rules.max_tile_elements // tile_head))
    num_tiles = -(-num_kv_heads // tile_heads)
    out_NQD = torch.empty((num_rows, num_heads, head_dim), dtype=q_NQD.dtype, device=q_NQD.device)
    lse_NQ = torch.empty((num_rows, num_heads), dtype=torch.float32, device=q_NQD.device)
    unshared_attention_kernel[rules.grid(num_rows * num_tiles)](
        q_NQD,
        k_rows,
        v_rows,
        slot_N,
        out_NQD,
        lse_NQ,
        num_rows * num_tiles,
        scale,
        q_NQD.stride(0),
        k_rows.stride(0),
        v_rows.stride(0),
        k_rows.stride(1),
        v_rows.stride(1),
        NUM_TOKENS=num_tokens,
        NUM_TILES=num_tiles,
        G=num_kv_heads,
        X=num_heads // num_kv_heads,
        D=head_dim,
        TILE_HEADS=tile_heads,
        X_PAD=next_power_of_two(num_heads // num_kv_heads),
        D_PAD=next_power_of_two(head_dim),
        **rules.options,
    )
    return out_NQD, lse_NQ


def launch_merge_attention_states(
    out_a_NQD: torch.Tensor,
    lse_a_NQ: torch.Tensor,
    out_b_NQD: torch.Tensor,
    lse_b_NQ: torch.Tensor,
    rules: LaunchRules,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `xgr_runtime.hal.ops.attention.merge_attention_states`; raises ValueError as above."""
    check_dtype(merge_attention_states_kernel, out_a_NQD.dtype)
    for name, states, num_dims in (
        ("out_a_NQD", out_a_NQD, 3),
        ("lse_a_NQ", lse_a_NQ, 2),
        ("out_b_NQD", out_b_NQD, 3),
        ("lse_b_NQ", lse_b_NQ, 2),
    ):
        check_rows_dense(name, states, num_dims)
    num_rows, num_heads, head_dim = out_a_NQD.shape
    num_pairs = num_rows * num_heads
    tile_pairs = max(1, rules.max_tile_elements // row_elements(head_dim))
    num_items = -(-num_pairs // tile_pairs)
    out_NQD, lse_NQ = torch.empty_like(out_a_NQD), torch.empty_like(lse_a_NQ)
    merge_attention_states_kernel[rules.grid(num_items)](
        out_a_NQD,
        lse_a_NQ,
        out_b_NQD,
        lse_b_NQ,
        out_NQD,
        lse_NQ,
        num_pairs,
        num_items,
        D=head_dim,
        TILE_PAIRS=tile_pairs,
        D_PAD=next_power_of_two(head_dim),
        **rules.options,
    )
    return out_NQD, lse_NQ
