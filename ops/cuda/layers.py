"""Normalisation, rotary embedding, gated activation, and projections rotated and stored: one Triton kernel each."""

from typing import TYPE_CHECKING

from xgr_runtime.hal.ops.activation import silu_mul
from xgr_runtime.hal.ops.fused_attention import rope_write_shared_kv, rope_write_unshared_kv
from xgr_runtime.hal.ops.norm import add_rms_norm, rms_norm
from xgr_runtime.hal.ops.rope import rotary_embedding
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.launch import LaunchRules, why_dtype_refused
from ..triton.layer_kernels import rms_norm_kernel, rotary_embedding_kernel, silu_mul_kernel
from ..triton.layers import (
    launch_add_rms_norm,
    launch_rms_norm,
    launch_rotary_embedding,
    launch_silu_mul,
    rotary_tile_elements,
)
from ..triton.rope_write import launch_rope_write
from ..triton.rope_write_kernels import rope_write_kernel
from .launch_rules import LARGEST_ROW, MOST_PROGRAMS, RULES, why_row_refused

if TYPE_CHECKING:
    import torch

# A token's 16 query heads of 128 are 32 registers a thread of 2 warps, and small programs keep many tokens in flight. Few
# tokens do not fill the chip whatever their programs are: there a token's own time counts, least with many warps. On an
# H200 with 16 + 2 * 8 heads of 128: 512 tokens 4.4 us with 8 warps and 5.1 with 2, 1,024 tokens 7.4 and 7.1.
MANY_TOKENS = 768
ROPE_WRITE_FEW = LaunchRules(MOST_PROGRAMS, 2048, {"num_warps": 8, "enable_fp_fusion": False})
ROPE_WRITE_MANY = LaunchRules(MOST_PROGRAMS, 2048, {"num_warps": 2, "enable_fp_fusion": False})


def _accepts_norm(spec: OpSpec) -> str | None:
    return why_row_refused(spec, "M") or why_dtype_refused(rms_norm_kernel, spec.dtype)


def _accepts_rotary(spec: OpSpec) -> str | None:
    return _why_heads_refused(spec) or why_dtype_refused(rotary_embedding_kernel, spec.dtype)


def _accepts_rope_write(spec: OpSpec) -> str | None:
    return _why_heads_refused(spec) or why_dtype_refused(rope_write_kernel, spec.dtype)


def _why_heads_refused(spec: OpSpec) -> str | None:
    num_heads = max(spec.dims.get("Q", 1), spec.dims.get("G", 1))
    head_dim = spec.dims.get("D", 2)
    if head_dim % 2 != 0:
        return f"D must be even, got {head_dim}"
    tile = rotary_tile_elements(num_heads, head_dim)
    if tile > LARGEST_ROW:
        return (
            f"the query heads times half the head dim, each rounded up to a power of two, must be at most "
            f"{LARGEST_ROW}, got {tile}"
        )
    return None


def rope_write_rules(num_tokens: int) -> LaunchRules:
    """How the kernel is started for that many tokens or rows, padding included."""
    return ROPE_WRITE_MANY if num_tokens >= MANY_TOKENS else ROPE_WRITE_FEW


def _accepts_silu(spec: OpSpec) -> str | None:
    return why_dtype_refused(silu_mul_kernel, spec.dtype)


@impl(rms_norm, provider="triton", device="cuda", accepts=_accepts_norm)
def rms_norm_in_one_pass(
    x_NM: "torch.Tensor", weight_M: "torch.Tensor", eps: float
) -> "torch.Tensor":
    """Each element is read and written once."""
    return launch_rms_norm(x_NM, weight_M, eps, RULES)


@impl(add_rms_norm, provider="triton", device="cuda", accepts=_accepts_norm)
def add_rms_norm_in_one_pass(
    x_NM: "torch.Tensor", residual_NM: "torch.Tensor", weight_M: "torch.Tensor", eps: float
) -> "torch.Tensor":
    """The sum is normalised while it is on the chip."""
    return launch_add_rms_norm(x_NM, residual_NM, weight_M, eps, RULES)


@impl(rotary_embedding, provider="triton", device="cuda", accepts=_accepts_rotary)
def rotary_embedding_in_one_pass(
    q_TQD: "torch.Tensor", k_TGD: "torch.Tensor", cos_TD: "torch.Tensor", sin_TD: "torch.Tensor"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Queries and keys of a token together."""
    return launch_rotary_embedding(q_TQD, k_TGD, cos_TD, sin_TD, RULES)


@impl(silu_mul, provider="triton", device="cuda", accepts=_accepts_silu)
def silu_mul_in_one_pass(gate_up_N2F: "torch.Tensor") -> "torch.Tensor":
    """Each element is read and written once."""
    return launch_silu_mul(gate_up_N2F, RULES)


@impl(rope_write_shared_kv, provider="triton", device="cuda", accepts=_accepts_rope_write)
def rope_write_pages_in_one_pass(
    qkv_TXD: "torch.Tensor",
    q_norm_D: "torch.Tensor | None",
    k_norm_D: "torch.Tensor | None",
    eps: float,
    cos_TD: "torch.Tensor",
    sin_TD: "torch.Tensor",
    k_pages: "torch.Tensor",
    v_pages: "torch.Tensor",
    slot_T: "torch.Tensor",
) -> "torch.Tensor":
    """A token's heads are read once; keys and values go straight to their page."""
    slots = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    norms, rules = (q_norm_D, k_norm_D, eps), rope_write_rules(qkv_TXD.shape[0])
    return launch_rope_write(qkv_TXD, *norms, cos_TD, sin_TD, *slots, slot_T, rules)


@impl(rope_write_unshared_kv, provider="triton", device="cuda", accepts=_accepts_rope_write)
def rope_write_rows_in_one_pass(
    qkv_NXD: "torch.Tensor",
    q_norm_D: "torch.Tensor | None",
    k_norm_D: "torch.Tensor | None",
    eps: float,
    cos_ND: "torch.Tensor",
    sin_ND: "torch.Tensor",
    k_rows: "torch.Tensor",
    v_rows: "torch.Tensor",
    slot_N: "torch.Tensor",
    position: int,
) -> "torch.Tensor":
    """Likewise, to `position` of the row's slot."""
    slots = k_rows[:, position], v_rows[:, position]
    norms, rules = (q_norm_D, k_norm_D, eps), rope_write_rules(qkv_NXD.shape[0])
    return launch_rope_write(qkv_NXD, *norms, cos_ND, sin_ND, *slots, slot_N, rules)
