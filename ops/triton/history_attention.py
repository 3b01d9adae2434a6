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
LEAST_SEGMENTS = 64  # histories that one compiled kernel takes; more take the next power of two


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


@dataclass(frozen=True)
class OwnTokens:
    """The beams' own tokens, as in `unshared_attention`.

    k_rows, v_rows: [slots, R - 1, G, D]. slot_N: int32 [N]. num_tokens: how many of a slot count, at least 1.
    """

    k_rows: torch.Tensor
    v_rows: torch.Tensor
    slot_N: torch.Tensor
    num_tokens: int


def launch_history_attention(
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
    has_lse: bool,
    tiles: HistoryTiles,
    rules: LaunchRules,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out [N, Q, D], lse fp32 [N, Q] where has_lse) as `shared_attention`, `beam_attention` (own tokens), or causal as
    `prefill_attention`, in xgr_runtime.hal.ops.

    rules: of the kernel that joins split keys.

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
    out_NQD = torch.empty_like(q_NQD)
    lse_NQ = new_lse(q_NQD, 1) if has_lse else None
    part_out, part_lse = out_NQD, lse_NQ
    if num_splits > 1:
        part_out, part_lse = new_parts(q_NQD, num_splits), new_lse(q_NQD, num_splits)
    # without own tokens their places hold something that is not read
    k_rows, v_rows = (own.k_rows, own.v_rows) if own else (k_pages, v_pages)
    history_attention_kernel[(num_tiles * num_kv_heads * num_splits,)](
        q_NQD,
        k_pages,
        v_pages,
        page_table_HP,
        row_start_H1,
        kv_len_H,
        part_out,
        part_out if part_lse is None else part_lse,
        k_rows,
        v_rows,
        own.slot_N if own else kv_len_H,
        num_rows,
        num_histories,
        num_tiles,
        scale,
        page_table_HP.stride(0),
        k_rows.stride(0),
        v_rows.stride(0),
        k_rows.stride(1),
        v_rows.stride(1),
        own.num_tokens if own else 0,
        num_splits,
        IS_CAUSAL=is_causal,
        HAS_OWN=own is not None,
        HAS_LSE=part_lse is not None,
        G=num_kv_heads,
        X=group,
        D=head_dim,
        D_PAD=max(LEAST_TILE, next_power_of_two(head_dim)),
        PAGE_SIZE=page_size,
        SEGMENTS=max(LEAST_SEGMENTS, next_power_of_two(num_histories + 1)),
        TILE_ROWS=tile_rows,
        TILE_KEYS=tile_keys,
        **tiles.options,
    )
    if part_lse is not None and num_splits > 1:
        combine_splits(part_out, part_lse, out_NQD, lse_NQ, rules)
    return out_NQD, lse_NQ


def new_parts(q_NQD: torch.Tensor, num_splits: int) -> torch.Tensor:
    """Memory for a partial result of each part of the keys, fp32 [splits * N, Q, D]."""
    num_rows, num_heads, head_dim = q_NQD.shape
    shape = (num_splits * num_rows, num_heads, head_dim)
    return torch.empty(shape, dtype=torch.float32, device=q_NQD.device)


def new_lse(q_NQD: torch.Tensor, num_splits: int) -> torch.Tensor:
    """Memory for the log-sum-exp of each, fp32 [splits * N, Q]."""
    shape = (num_splits * q_NQD.shape[0], q_NQD.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=q_NQD.device)


def combine_splits(
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    out_NQD: torch.Tensor,
    lse_NQ: torch.Tensor | None,
    rules: LaunchRules,
) -> None:
    """Write the result over all keys, and its lse where asked for, from those over parts of them."""
    num_rows, num_heads, head_dim = out_NQD.shape
    num_pairs = num_rows * num_heads
    tile_pairs = max(1, rules.max_tile_elements // row_elements(head_dim))
    num_items = -(-num_pairs // tile_pairs)
    combine_splits_kernel[rules.grid(num_items)](
        part_out,
        part_lse,
        out_NQD,
        part_lse if lse_NQ is None else lse_NQ,
        num_pairs,
        num_items,
        part_out.shape[0] // num_rows,
        HAS_LSE=lse_NQ is not None,
        D=head_dim,
        TILE_PAIRS=tile_pairs,
        D_PAD=next_power_of_two(head_dim),
        **rules.options,
    )
