"""What a pass begins with on NVIDIA GPUs: one kernel. T tokens or rows, V vocabulary, C codes, M hidden size, D head dim."""

from typing import TYPE_CHECKING

from triton.runtime.interpreter import InterpretedFunction

from xgr_runtime.hal.ops.embedding import embedding_rms_norm_cos_sin
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.embedding import launch_embedding_rms_norm_cos_sin
from ..triton.embedding_kernels import embedding_rms_norm_cos_sin_kernel
from ..triton.launch import why_dtype_refused
from .embedding_kernels import embedding_before_product_kernel
from .hopper import why_generation_refused
from .launch_rules import RULES, why_row_refused

if TYPE_CHECKING:
    import torch


def _accepts(spec: OpSpec) -> str | None:
    refused = why_row_refused(spec, "M") or why_row_refused(spec, "D")
    return refused or why_dtype_refused(embedding_rms_norm_cos_sin_kernel, spec.dtype)


def _accepts_hopper(spec: OpSpec) -> str | None:
    if isinstance(embedding_before_product_kernel, InterpretedFunction):
        return "interpreted kernels start one after the other"
    return why_generation_refused(spec) or _accepts(spec)


@impl(embedding_rms_norm_cos_sin, provider="triton-pdl", device="cuda", accepts=_accepts_hopper)
def begin_before_product(
    embedding_VM: "torch.Tensor",
    id_T: "torch.Tensor",
    token_of_C: "torch.Tensor | None",
    norm_weight_M: "torch.Tensor",
    eps: float,
    position_T: "torch.Tensor",
    frequency_D: "torch.Tensor",
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]":
    """The kernel behind it may start while it runs."""
    rows = (embedding_VM, id_T, token_of_C, norm_weight_M, eps, position_T, frequency_D)
    return launch_embedding_rms_norm_cos_sin(*rows, RULES, embedding_before_product_kernel)


@impl(embedding_rms_norm_cos_sin, provider="triton", device="cuda", accepts=_accepts)
def begin_in_one_pass(
    embedding_VM: "torch.Tensor",
    id_T: "torch.Tensor",
    token_of_C: "torch.Tensor | None",
    norm_weight_M: "torch.Tensor",
    eps: float,
    position_T: "torch.Tensor",
    frequency_D: "torch.Tensor",
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]":
    """Each row is read and written once."""
    rows = (embedding_VM, id_T, token_of_C, norm_weight_M, eps, position_T, frequency_D)
    return launch_embedding_rms_norm_cos_sin(*rows, RULES)
