"""Attention on NVIDIA GPUs: both history stages on the tensor cores, the beams' own tokens where they lie, one pass to merge.

Lengths and row starts are the device's: the host's numbers are not read, so a captured graph replays with others.
Tiles are for 228 KiB of shared memory a core and keys in parts for as many cores as an H100 or H200 has: on other GPUs they are
split a little more or less than best. Smaller tiles are taken for longer heads and for fp32.
"""

from typing import TYPE_CHECKING

from xgr_runtime.hal.ops.attention import (
    merge_attention_states,
    prefill_attention,
    shared_attention,
    unshared_attention,
)
from xgr_runtime.hal.ops.fused_attention import beam_attention
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.attention import (
    launch_merge_attention_states,
    launch_unshared_attention,
    unshared_tile_elements,
)
from ..triton.attention_kernels import merge_attention_states_kernel, unshared_attention_kernel
from ..triton.history_attention import HistoryTiles, OwnTokens, launch_history_attention
from ..triton.history_attention_kernels import history_attention_kernel
from ..triton.launch import why_dtype_refused
from .hopper import NUM_CORES
from .launch_rules import LARGEST_ROW, RULES, why_row_refused

if TYPE_CHECKING:
    import torch

LARGEST_HEAD = 256


def _tiles(rows: int, keys: int, num_warps: int, num_stages: int) -> HistoryTiles:
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    return HistoryTiles(rows, keys, NUM_CORES, options=options)


# The fastest or next to it of five tilings on one H200 (triton 3.6, bf16, 16 query and 8 KV heads, D 128; 512 rows over 1,024
# tokens, 256 over 5,000, alone and eight at a time). None spills more than a few registers, as ptxas counts for sm_90.
MANY_ROWS = _tiles(128, 64, 8, 3)
FEW_ROWS = _tiles(64, 64, 4, 3)
LONG_HEADS = _tiles(64, 32, 4, 2)
FP32 = _tiles(16, 32, 8, 2)


def tiles_for(element_bytes: int, head_dim: int, num_query_rows: int) -> HistoryTiles:
    """The tiles of histories with that many query rows (packed rows times the heads of a KV head) at most."""
    if element_bytes > 2:
        return FP32
    if head_dim > 128:
        return LONG_HEADS
    return MANY_ROWS if num_query_rows > FEW_ROWS.rows else FEW_ROWS


def _accepts_history(spec: OpSpec) -> str | None:
    num_heads, num_kv_heads = spec.dims.get("Q", 1), spec.dims.get("G", 1)
    if num_heads % num_kv_heads != 0:
        return f"Q must be a multiple of G, got {num_heads} and {num_kv_heads}"
    head_dim = spec.dims.get("D", 1)
    if head_dim > LARGEST_HEAD:
        return f"D must be at most {LARGEST_HEAD}, got {head_dim}"
    return why_dtype_refused(history_attention_kernel, spec.dtype)


def _accepts_unshared(spec: OpSpec) -> str | None:
    num_heads, num_kv_heads = spec.dims.get("Q", 1), spec.dims.get("G", 1)
    if num_heads % num_kv_heads != 0:
        return f"Q must be a multiple of G, got {num_heads} and {num_kv_heads}"
    tile = unshared_tile_elements(num_heads, num_kv_heads, spec.dims.get("D", 1))
    if tile > LARGEST_ROW:
        return (
            f"the query heads of one KV head times the head dim, each rounded up to a power of two, must be at most "
            f"{LARGEST_ROW}, got {tile}"
        )
    return why_dtype_refused(unshared_attention_kernel, spec.dtype)


def _accepts_merge(spec: OpSpec) -> str | None:
    reason = why_row_refused(spec, "D")
    return reason or why_dtype_refused(merge_attention_states_kernel, spec.dtype)


@impl(prefill_attention, provider="triton", device="cuda", accepts=_accepts_history)
def prefill_attention_in_tiles(
    q_TQD: "torch.Tensor",
    k_pages: "torch.Tensor",
    v_pages: "torch.Tensor",
    page_table_HP: "torch.Tensor",
    q_start_H1: "torch.Tensor",
    kv_len_H: "torch.Tensor",
    scale: float,
    max_q: int,
    max_kv: int,
    q_starts: tuple[int, ...],
    kv_lens: tuple[int, ...],
) -> "torch.Tensor":
    """Keys behind a tile's last row are not read."""
    group = q_TQD.shape[1] // k_pages.shape[2]
    out_TQD, _ = launch_history_attention(
        q_TQD,
        k_pages,
        v_pages,
        page_table_HP,
        q_start_H1,
        kv_len_H,
        None,
        scale,
        max_q,
        max_kv,
        True,
        False,
        tiles_for(q_TQD.element_size(), q_TQD.shape[2], max_q * group),
        RULES,
    )
    return out_TQD


@impl(shared_attention, provider="triton", device="cuda", accepts=_accepts_history)
def shared_attention_in_tiles(
    q_NQD: "torch.Tensor",
    k_pages: "torch.Tensor",
    v_pages: "torch.Tensor",
    page_table_HP: "torch.Tensor",
    row_start_H1: "torch.Tensor",
    kv_len_H: "torch.Tensor",
    scale: float,
    max_rows: int,
    max_kv: int,
    kv_lens: tuple[int, ...],
) -> "tuple[torch.Tensor, torch.Tensor]":
    """The beams of a history and the heads of a KV head share every key tile."""
    group = q_NQD.shape[1] // k_pages.shape[2]
    out_NQD, lse_NQ = launch_history_attention(
        q_NQD,
        k_pages,
        v_pages,
        page_table_HP,
        row_start_H1,
        kv_len_H,
        None,
        scale,
        max_rows,
        max_kv,
        False,
        True,
        tiles_for(q_NQD.element_size(), q_NQD.shape[2], max_rows * group),
        RULES,
    )
    assert lse_NQ is not None
    return out_NQD, lse_NQ


@impl(beam_attention, provider="triton", device="cuda", accepts=_accepts_history)
def beam_attention_in_tiles(
    q_NQD: "torch.Tensor",
    k_pages: "torch.Tensor",
    v_pages: "torch.Tensor",
    page_table_HP: "torch.Tensor",
    row_start_H1: "torch.Tensor",
    kv_len_H: "torch.Tensor",
    k_rows: "torch.Tensor",
    v_rows: "torch.Tensor",
    slot_N: "torch.Tensor",
    num_tokens: int,
    scale: float,
    max_rows: int,
    max_kv: int,
    kv_lens: tuple[int, ...],
) -> "torch.Tensor":
    """One pass: a row's own tokens come first, then the pages."""
    group = q_NQD.shape[1] // k_pages.shape[2]
    out_NQD, _ = launch_history_attention(
        q_NQD,
        k_pages,
        v_pages,
        page_table_HP,
        row_start_H1,
        kv_len_H,
        OwnTokens(k_rows, v_rows, slot_N, num_tokens),
        scale,
        max_rows,
        max_kv,
        False,
        False,
        tiles_for(q_NQD.element_size(), q_NQD.shape[2], max_rows * group),
        RULES,
    )
    return out_NQD


@impl(unshared_attention, provider="triton", device="cuda", accepts=_accepts_unshared)
def unshared_attention_in_slots(
    q_NQD: "torch.Tensor",
    k_rows: "torch.Tensor",
    v_rows: "torch.Tensor",
    slot_N: "torch.Tensor",
    num_tokens: int,
    scale: float,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Keys and values are read where they lie."""
    return launch_unshared_attention(q_NQD, k_rows, v_rows, slot_N, num_tokens, scale, RULES)


@impl(merge_attention_states, provider="triton", device="cuda", accepts=_accepts_merge)
def merge_in_one_pass(
    out_a_NQD: "torch.Tensor",
    lse_a_NQ: "torch.Tensor",
    out_b_NQD: "torch.Tensor",
    lse_b_NQ: "torch.Tensor",
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Each partial result is read once, out and lse come out together."""
    return launch_merge_attention_states(out_a_NQD, lse_a_NQ, out_b_NQD, lse_b_NQ, RULES)
