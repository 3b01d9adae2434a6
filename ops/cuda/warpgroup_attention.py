"""Launcher of the attention kernel for Hopper's warpgroups: what it takes, how the work is cut, and its descriptors.

H histories, N rows, Q query heads, G KV heads, D head dim, P pages, X = Q // G.
"""

from dataclasses import dataclass

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.history_attention import OwnTokens, combine_splits, new_lse, new_parts
from ..triton.launch import LaunchRules, check_rows_dense, next_power_of_two
from .warpgroup_attention_kernels import warpgroup_attention_kernel

ROWS = 128  # query rows of an item
LEAST_SEGMENTS = 64  # histories that one compiled kernel takes; more take the next power of two


@dataclass(frozen=True)
class WarpgroupTiles:
    """How histories are cut.

    keys: of a tile, a power of two that divides the page size. stages: key tiles on the chip. num_cores: programs at once.
    min_split_keys: what a part of the keys has at least where they are split.
    """

    keys: int
    stages: int
    num_cores: int
    min_split_keys: int

    def num_splits(self, num_items: int, max_kv: int) -> int:
        """Into how many parts the keys go where unsplit there are `num_items` items."""
        return max(1, min(self.num_cores // max(1, num_items), max_kv // self.min_split_keys))


def launch_warpgroup_attention(
    q_NQD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_HP: torch.Tensor,
    row_start_H1: torch.Tensor,
    kv_len_H: torch.Tensor,
    own: OwnTokens | None,
    scale: float,
    max_rows: int,
    max_kv: int,
    is_causal: bool,
    tiles: WarpgroupTiles,
    rules: LaunchRules,
) -> torch.Tensor:
    """[N, Q, D] as `prefill_attention` (causal, no own tokens) or `beam_attention` (own tokens) in xgr_runtime.hal.ops.

    Causal, rows of no history are 0; else they are left as they come. rules: of the kernel that joins split keys.

    Raises:
        ValueError: strides or a scale that it cannot take.
    """
    if not scale > 0.0:
        raise ValueError(f"scale must be above 0, got {scale}")
    for name, states, num_dims in (
        ("q", q_NQD, 3),
        ("k_pages", k_pages, 4),
        ("v_pages", v_pages, 4),
        ("page_table_HP", page_table_HP, 1),
    ):
        check_rows_dense(name, states, num_dims)
    num_rows, num_heads, head_dim = q_NQD.shape
    num_pages, page_size, num_kv_heads = k_pages.shape[:3]
    group = num_heads // num_kv_heads
    num_items = max(kv_len_H.shape[0], num_rows * group // ROWS) * num_kv_heads
    num_splits = 1 if is_causal else tiles.num_splits(num_items, max_kv)
    most_items = (num_rows * group // ROWS + kv_len_H.shape[0] + 1) * num_kv_heads * num_splits
    out_NQD = torch.empty_like(q_NQD)
    part_out, part_lse = out_NQD, out_NQD
    if num_splits > 1:
        part_out, part_lse = new_parts(q_NQD, num_splits), new_lse(q_NQD, num_splits)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    row_elements = num_kv_heads * head_dim
    descriptors = [
        TensorDescriptor(
            pages,
            [num_pages, page_size, row_elements],
            [page_size * row_elements, row_elements, 1],
            [1, tiles.keys, head_dim],
            layout,
        )
        for pages in (k_pages, v_pages)
    ]
    # without own tokens their places hold something that is not read
    k_rows, v_rows, slot_N = (
        (own.k_rows, own.v_rows, own.slot_N) if own else (q_NQD, q_NQD, kv_len_H)
    )
    warpgroup_attention_kernel[(min(tiles.num_cores, most_items),)](
        *descriptors,
        q_NQD,
        page_table_HP,
        row_start_H1,
        kv_len_H,
        part_out,
        part_lse,
        k_rows,
        v_rows,
        slot_N,
        num_rows,
        kv_len_H.shape[0],
        page_table_HP.stride(0),
        k_rows.stride(0),
        v_rows.stride(0),
        k_rows.stride(1),
        v_rows.stride(1),
        own.num_tokens if own else 0,
        num_splits,
        scale,
        IS_SPLIT=num_splits > 1,
        IS_CAUSAL=is_causal,
        OWN=next_power_of_two(k_rows.shape[1]) if own else 0,
        WITH_REST=is_causal,
        G=num_kv_heads,
        X=group,
        D=head_dim,
        PAGE_SIZE=page_size,
        SEGMENTS=max(LEAST_SEGMENTS, next_power_of_two(kv_len_H.shape[0] + 1)),
        KEYS=tiles.keys,
        STAGES=tiles.stages,
        num_warps=4,
    )
    if num_splits > 1:
        combine_splits(part_out, part_lse, out_NQD, None, rules)
    return out_NQD
