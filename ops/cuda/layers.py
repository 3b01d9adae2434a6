"""Normalisation, rotary embedding and gated activation: one Triton kernel each."""

from typing import TYPE_CHECKING

from xgr_runtime.hal.ops.activation import silu_mul
from xgr_runtime.hal.ops.norm import add_rms_norm, rms_norm
from xgr_runtime.hal.ops.rope import rotary_embedding
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.launch import why_dtype_refused
from ..triton.layer_kernels import rms_norm_kernel, rotary_embedding_kernel, silu_mul_kernel
from ..triton.layers import (
    launch_add_rms_norm,
    launch_rms_norm,
    launch_rotary_embedding,
    launch_silu_mul,
    rotary_tile_elements,
)
from .rules import LARGEST_ROW, RULES, why_row_refused

if TYPE_CHECKING:
    import torch


def _accepts_norm(spec: OpSpec) -> str | None:
    return why_row_refused(spec, "M") or why_dtype_refused(rms_norm_kernel, spec.dtype)


def _accepts_rotary(spec: OpSpec) -> str | None:
    num_heads, head_dim = spec.dims.get("Q", 1), spec.dims.get("D", 2)
    if head_dim % 2 != 0:
        return f"D must be even, got {head_dim}"
    tile = rotary_tile_elements(num_heads, head_dim)
    if tile > LARGEST_ROW:
        return (
            f"the query heads times half the head dim, each rounded up to a power of two, must be at most "
            f"{LARGEST_ROW}, got {tile}"
        )
    return why_dtype_refused(rotary_embedding_kernel, spec.dtype)


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
