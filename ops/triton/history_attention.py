"""Launcher of the attention over paged histories: beams' shared stage, and a prefill's causal one.

H histories, N rows, Q query heads, G KV heads, D head dim, P pages, X = Q // G.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .history_attention_kernels import combine_splits_kernel, history_attention_kernel
from .launch import LaunchRules, check_dtype, check_rows_dense, next_power_of_two, row_elements

LEAST_TILE = 16  # rows, keys or head dim of a product


@dataclass(frozen=True)
class HistoryTiles:
    """How a history is cut for one program.

    rows, keys: of a tile, powers of two, at least 16. num_programs: what the device works on at once; keys are split
    where the rows give fewer. min_split_keys: what a part of the keys has at least. options: of the compiler.
    """

    rows: int
    keys: int
    num_programs: int
    min_split_keys: int = 256
    options: Mapping[str, Any] = field(default_factory=dict)

    def num_splits(self, num_programs: int, max_kv: int) -> int:
        """Into how many parts the keys go where unsplit there are `num_programs` programs."""
        return max(1, min(self.num_programs // max(1, num_programs), max_kv // self.min_split_keys))


def launch_history_attention(
    q_NQD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_HP: torch.Tensor,
    row_start_H1: torch.Tensor,
    kv_len_H: torch.Tensor,
    scale: float,
    max_rows: int,
    max_kv: int,
    is_causal: bool,
    tiles: HistoryTiles,
    rules: LaunchRules,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [N, Q, D], lse fp32 [N, Q]) as `shared_attention`, or causal as `prefill_attention`, in xgr_runtime.hal.ops.attention.

    The lse is computed in either case and costs a store of a number a row. rules: of the kernel that joins split keys.

    Raises:
        ValueError: a dtype, strides or a scale that it cannot take.
    """
    check_dtype(history_attention_kernel, q_NQD.dtype)
    if not scale > 0.0:
        raise ValueError(f"scale must be above 0, got {scale}")
    for name, states, num_dims in (
        ("q", q_NQD, 3),
        ("k_pages", k_pages, 4),
        ("v_pages", v_pages, 4),
        ("row starts", row_start_H1, 1),
        ("kv_len_H", kv_len_H, 1),
        ("page_table_HP", page_table_HP, 1),
    ):
        check_rows_dense(name, states, num_dims)
    num_rows, num_heads, head_dim = q_NQD.shape
    page_size, num_kv_heads = k_pages.shape[1:3]
    num_histories, group = kv_len_H.shape[0], num_heads // num_kv_heads
    tile_rows = min(tiles.rows, max(LEAST_TILE, next_power_of_two(max_rows * group)))
    tile_keys = min(tiles.keys, max(LEAST_TILE, next_power_of_two(max_kv)))
    # each of the histories and the rows of none may end in a tile that is not full
    num_tiles = num_rows * group // tile_rows + num_histories + 1
    num_busy = max(num_histories, num_rows * group // tile_rows)
    num_splits = tiles.num_splits(num_busy * num_kv_heads, max_kv)
    out_NQD, lse_NQ = _new_states(q_NQD, 1, q_NQD.dtype)
    part_out, part_lse = out_NQD, lse_NQ
    if num_splits > 1:
        part_out, part_lse = _new_states(q_NQD, num_splits, torch.float32)
    history_attention_kernel[(num_tiles * num_kv_heads * num_splits,)](
        q_NQD,
        k_pages,
        v_pages,
        page_table_HP,
        row_start_H1,
        kv_len_H,
        part_out,
        part_lse,
        num_rows,
        num_tiles,
        scale,
        page_table_HP.stride(0),
        NUM_HISTORIES=num_histories,
        NUM_SPLITS=num_splits,
        IS_CAUSAL=is_causal,
        G=num_kv_heads,
        X=group,
        D=head_dim,
        D_PAD=max(LEAST_TILE, next_power_of_two(head_dim)),
        PAGE_SIZE=page_size,
        SEGMENTS=next_power_of_two(num_histories + 1),
        TILE_ROWS=tile_rows,
        TILE_KEYS=tile_keys,
        **tiles.options,
    )
    if num_splits > 1:
        _combine(part_out, part_lse, out_NQD, lse_NQ, rules)
    return out_NQD, lse_NQ


def _new_states(
    q_NQD: torch.Tensor, num_splits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_heads, head_dim = q_NQD.shape
    out = torch.empty(
        (num_splits * num_rows, num_heads, head_dim), dtype=dtype, device=q_NQD.device
    )
    lse = torch.empty((num_splits * num_rows, num_heads), dtype=torch.float32, device=q_NQD.device)
    return out, lse


def _combine(
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    out_NQD: torch.Tensor,
    lse_NQ: torch.Tensor,
    rules: LaunchRules,
) -> None:
    num_pairs, head_dim = lse_NQ.numel(), out_NQD.shape[2]
    tile_pairs = max(1, rules.max_tile_elements // row_elements(head_dim))
    num_items = -(-num_pairs // tile_pairs)
    combine_splits_kernel[rules.grid(num_items)](
        part_out,
        part_lse,
        out_NQD,
        lse_NQ,
        num_pairs,
        num_items,
        NUM_SPLITS=part_out.shape[0] // out_NQD.shape[0],
        D=head_dim,
        TILE_PAIRS=tile_pairs,
        D_PAD=next_power_of_two(head_dim),
        **rules.options,
    )
