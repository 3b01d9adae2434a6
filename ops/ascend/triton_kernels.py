"""EXPERIMENTAL: the Triton kernels as Ascend providers. Not run on hardware.

Registered behind the stock providers, so they win only where those refuse (the README of this folder says where that can
be). They refuse chips that their kernels were not compiled for. What they save over stock ops: the unshared stage reads
each beam's own keys and values in its slot where stock attention needs them gathered, the reorder copies each moving row
once and needs no scratch, writes and merge are one kernel.

Vector cores alone work here: 48 programs on a 910B2 (two vector cores beside each of 24 cube cores); on a chip with
fewer the rest wait their turn. Tiles of 4,096 fp32 elements, 16 KiB: what the kernels hold of them, some twice so that
copies overlap work, is up to 189 KiB of a core's 192 KiB (Huawei's compiler, head shapes from 7 x 128 to 64 x 128).
"""

from typing import TYPE_CHECKING

from xgr_runtime.hal.ops.attention import merge_attention_states, unshared_attention
from xgr_runtime.hal.ops.cache import reorder_unshared_kv, write_shared_kv, write_unshared_kv
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.attention import (
    launch_merge_attention_states,
    launch_unshared_attention,
    unshared_tile_elements,
)
from ..triton.attention_kernels import merge_attention_states_kernel, unshared_attention_kernel
from ..triton.cache import launch_move_slots, launch_write_rows
from ..triton.cache_kernels import move_slots_kernel, write_rows_kernel
from ..triton.launch import LaunchRules, next_power_of_two, why_dtype_refused
from .limits import EXACT_IN_FP32, refuse_size, refuse_soc
from .reorder_plan import plan_moves

if TYPE_CHECKING:
    import torch

_COMPILED_FOR = "Triton kernels are compiled for Atlas A2 and A3 alone"
RULES = LaunchRules(num_programs=48, max_tile_elements=4096, options={"enable_fp_fusion": False})


def _refuse(kernel: object, spec: OpSpec) -> str | None:
    return why_dtype_refused(kernel, spec.dtype) or refuse_soc(spec, _COMPILED_FOR)


def _accepts_unshared(spec: OpSpec) -> str | None:
    num_heads, num_kv_heads = spec.dims.get("Q", 1), spec.dims.get("G", 1)
    if num_heads % num_kv_heads != 0:
        return f"Q must be a multiple of G, got {num_heads} and {num_kv_heads}"
    tile = unshared_tile_elements(num_heads, num_kv_heads, spec.dims.get("D", 1))
    if tile > RULES.max_tile_elements:
        return (
            f"the query heads of one KV head times the head dim, each rounded up to a power of two, must be at most "
            f"{RULES.max_tile_elements}, got {tile}"
        )
    return _refuse(unshared_attention_kernel, spec)


def _accepts_merge(spec: OpSpec) -> str | None:
    if next_power_of_two(spec.dims.get("D", 1)) > RULES.max_tile_elements:
        return f"D must be at most {RULES.max_tile_elements}, got {spec.dims['D']}"
    return _refuse(merge_attention_states_kernel, spec)


def _accepts_write(spec: OpSpec) -> str | None:
    return _refuse(write_rows_kernel, spec)


def _accepts_move(spec: OpSpec) -> str | None:
    reason = _refuse(move_slots_kernel, spec)
    return reason or refuse_size(spec, "N", EXACT_IN_FP32, "slots are sorted in fp32")


@impl(unshared_attention, provider="triton", device="npu", accepts=_accepts_unshared)
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


@impl(merge_attention_states, provider="triton", device="npu", accepts=_accepts_merge)
def merge_in_one_pass(
    out_a_NQD: "torch.Tensor",
    lse_a_NQ: "torch.Tensor",
    out_b_NQD: "torch.Tensor",
    lse_b_NQ: "torch.Tensor",
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Each partial result is read once, out and lse come out together."""
    return launch_merge_attention_states(out_a_NQD, lse_a_NQ, out_b_NQD, lse_b_NQ, RULES)


@impl(write_shared_kv, provider="triton", device="npu", accepts=_accepts_write)
def write_rows_of_pages(
    k_TGD: "torch.Tensor",
    v_TGD: "torch.Tensor",
    k_pages: "torch.Tensor",
    v_pages: "torch.Tensor",
    slot_T: "torch.Tensor",
) -> None:
    """Keys and values in one kernel."""
    launch_write_rows(k_TGD, v_TGD, k_pages.flatten(0, 1), v_pages.flatten(0, 1), slot_T, RULES)


@impl(write_unshared_kv, provider="triton", device="npu", accepts=_accepts_write)
def write_rows_of_slots(
    k_NGD: "torch.Tensor",
    v_NGD: "torch.Tensor",
    k_rows: "torch.Tensor",
    v_rows: "torch.Tensor",
    slot_N: "torch.Tensor",
    position: int,
) -> None:
    """Keys and values in one kernel, through views of the slots' `position`."""
    launch_write_rows(k_NGD, v_NGD, k_rows[:, position], v_rows[:, position], slot_N, RULES)


@impl(reorder_unshared_kv, provider="triton", device="npu", accepts=_accepts_move)
def reorder_in_slots(
    kv_rows: "torch.Tensor",
    parents_N: "torch.Tensor",
    slot_in_N: "torch.Tensor",
    search_of_row_N: "torch.Tensor",
    slot_start_S1: "torch.Tensor",
    num_tokens: int,
    slot_out_N: "torch.Tensor",
    tile: "torch.Tensor",
) -> None:
    """The stock provider's plan, then one kernel that copies the rows that move; `tile` is not needed."""
    src_N, dst_N = plan_moves(
        parents_N, slot_in_N, search_of_row_N, slot_start_S1, kv_rows.shape[1]
    )
    launch_move_slots(kv_rows, src_N, dst_N, num_tokens, RULES)
    slot_out_N.copy_(dst_N)
