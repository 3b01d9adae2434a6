"""What the launchers of Hopper's attention kernels share: who may use them, what they check, and descriptors of pages.

H histories, Q query heads, G KV heads, D head dim.
"""

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction

from xgr_runtime.hal.registry import OpSpec

from ..triton.history_attention_kernels import history_attention_kernel
from ..triton.launch import check_rows_dense
from .hopper import WARPGROUP_ROWS, why_generation_refused, why_head_refused

SEGMENTS = 64  # places for the histories of a call, and one more
MOST_HISTORIES = SEGMENTS - 1
# Of tiles on the chip, as the matrix instructions take them.
LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def why_attention_refused(spec: OpSpec, keys: int) -> str | None:
    """Why attention with tiles of so many keys cannot take calls of these sizes, or None; the number of rows is no reason."""
    if refused := why_generation_refused(spec):
        return refused
    if isinstance(history_attention_kernel, InterpretedFunction):
        return "copies by barrier cannot be interpreted (TRITON_INTERPRET unset)"
    if str(spec.dtype) not in ("torch.float16", "torch.bfloat16"):
        return f"takes torch.float16 and torch.bfloat16, got {spec.dtype}"
    if refused := why_head_refused(spec):
        return refused
    page_size = spec.dims.get("page_size", keys)
    if page_size % keys:
        return f"page_size must be a multiple of {keys}, got {page_size}"
    num_heads, num_kv_heads = spec.dims.get("Q", 1), spec.dims.get("G", 1)
    group = num_heads // num_kv_heads
    if num_heads % num_kv_heads or group & (group - 1) or group > WARPGROUP_ROWS:
        return f"Q // G must be a power of two up to {WARPGROUP_ROWS}, got {num_heads} and {num_kv_heads}"
    return None


def check_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_HP: torch.Tensor,
    scale: float,
) -> None:
    """Raises ValueError: strides or a scale that the kernels cannot take."""
    if not scale > 0.0:
        raise ValueError(f"scale must be above 0, got {scale}")
    for name, states, num_dims in (
        ("q", q, 3),
        ("k_pages", k_pages, 4),
        ("v_pages", v_pages, 4),
        ("page_table_HP", page_table_HP, 1),
    ):
        check_rows_dense(name, states, num_dims)


def check_histories(kv_len_H: torch.Tensor) -> None:
    """Raises ValueError: more histories than there are places for."""
    if kv_len_H.shape[0] > MOST_HISTORIES:
        raise ValueError(f"takes {MOST_HISTORIES} histories at most, got {kv_len_H.shape[0]}")


def page_descriptor(pages: torch.Tensor, keys: int) -> TensorDescriptor:
    """Of tiles [1, keys, D] of pages, whose KV heads lie side by side."""
    num_pages, page_size, num_kv_heads, head_dim = pages.shape
    row_elements = num_kv_heads * head_dim
    return TensorDescriptor(
        pages,
        [num_pages, page_size, row_elements],
        [page_size * row_elements, row_elements, 1],
        [1, keys, head_dim],
        LAYOUT,
    )
