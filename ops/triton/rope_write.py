"""Launcher of the kernel that normalises, rotates and stores a layer's fused projections.

T packed tokens or beam rows, X = Q + 2 G heads: Q queries, G keys, G values; D head dim.
"""

import torch

from .launch import LaunchRules, check_dtype, check_rows_dense, next_power_of_two
from .rope_write_kernels import rope_write_kernel


def launch_rope_write(
    qkv_TXD: torch.Tensor,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    k_slots: torch.Tensor,
    v_slots: torch.Tensor,
    slot_T: torch.Tensor,
    rules: LaunchRules,
) -> torch.Tensor:
    """Normalised and rotated queries; keys likewise and values go to slot slot_T[t].

    Args:
        qkv_TXD: [T, Q + 2 G, D], contiguous, D even.
        q_norm_D: [D], dtype of qkv, or None where heads are not normalised.
        k_norm_D: likewise; None exactly where q_norm_D is.
        eps: of the norms.
        cos_TD: fp32 [T, D], both halves alike, any stride over tokens.
        sin_TD: likewise.
        k_slots: [slots, G, D], any stride over slots, dtype of qkv; MUTATED.
        v_slots: like k_slots; MUTATED.
        slot_T: int32 or int64 [T]. Tokens that name the same slot overwrite each other, in any order.
        rules: of the device.

    Returns:
        [T, Q, D], dtype of qkv, new memory.

    Raises:
        ValueError: a dtype or strides it cannot take, or one norm without the other.
    """
    check_dtype(rope_write_kernel, qkv_TXD.dtype)
    if (q_norm_D is None) != (k_norm_D is None):
        raise ValueError("queries and keys are normalised both or neither")
    rows = [("qkv_TXD", qkv_TXD, 3), ("cos_TD", cos_TD, 1), ("sin_TD", sin_TD, 1)]
    rows += [("key slots", k_slots, 2), ("value slots", v_slots, 2), ("slot_T", slot_T, 1)]
    rows += [
        (name, norm, 1)
        for name, norm in (("q_norm_D", q_norm_D), ("k_norm_D", k_norm_D))
        if norm is not None
    ]
    for name, tensor, num_dims in rows:
        check_rows_dense(name, tensor, num_dims)
    num_tokens, num_all, head_dim = qkv_TXD.shape
    num_kv_heads = k_slots.shape[1]
    num_heads = num_all - 2 * num_kv_heads
    q_out = torch.empty(
        (num_tokens, num_heads, head_dim), dtype=qkv_TXD.dtype, device=qkv_TXD.device
    )
    rope_write_kernel[rules.grid(num_tokens)](
        qkv_TXD,
        qkv_TXD if q_norm_D is None else q_norm_D,
        qkv_TXD if k_norm_D is None else k_norm_D,
        cos_TD,
        sin_TD,
        q_out,
        k_slots,
        v_slots,
        slot_T,
        num_tokens,
        eps,
        cos_TD.stride(0),
        sin_TD.stride(0),
        k_slots.stride(0),
        v_slots.stride(0),
        IS_NORMALISED=q_norm_D is not None,
        Q=num_heads,
        G=num_kv_heads,
        HALF=head_dim // 2,
        Q_PAD=next_power_of_two(num_heads),
        G_PAD=next_power_of_two(num_kv_heads),
        HALF_PAD=next_power_of_two(head_dim // 2),
        **rules.options,
    )
    return q_out
