"""Launcher of the attention kernel for Hopper's warpgroups: what it takes, how the work is cut, and its descriptors.

H histories, N rows, Q query heads, G KV heads, D head dim, P pages, X = Q // G.
"""

from dataclasses import dataclass

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.history_attention import OwnTokens, new_lse, new_parts
from ..triton.launch import check_rows_dense, next_power_of_two
from .attention_parts_kernels import join_parts_kernel
from .direct_attention_kernels import direct_attention_kernel
from .warpgroup_attention_kernels import warpgroup_attention_kernel

ROWS = 64  # query rows of a warpgroup
MOST_WARPGROUPS = 2  # that compute, in a program
MOST_PARTS = 16  # of the keys: those of a few pairs are joined at once
PART_PAIRS = 64  # partial results of a head that a program joins
LEAST_SEGMENTS = 64  # histories that one compiled kernel takes; more take the next power of two


@dataclass(frozen=True)
class WarpgroupTiles:
    """How histories are cut.

    keys: of a tile, a power of two that divides the page size. stages: key tiles on the chip. num_cores: programs at once.
    min_split_keys: what a part of the keys has at least where they are split. direct: with how many warpgroups, tried in this order,
    a program may have one item alone.
    """

    keys: int
    stages: int
    num_cores: int
    min_split_keys: int
    direct: tuple[int, ...] = ()

    def num_splits(self, num_items: int, max_kv: int) -> int:
        """Into how many parts the keys go where unsplit there are `num_items` items."""
        return max(
            1, min(self.num_cores // max(1, num_items), max_kv // self.min_split_keys, MOST_PARTS)
        )


def own_places(own: OwnTokens, group: int) -> int:
    """Own tokens of a beam as the kernels count them, a power of two; they take them where there are at most `group`."""
    return max(next_power_of_two(own.k_rows.shape[1]), group // 4)


def _join_parts(
    part_out: torch.Tensor, part_lse: torch.Tensor, out_NQD: torch.Tensor, num_parts: int
) -> None:
    num_rows, num_heads, head_dim = out_NQD.shape
    parts = next_power_of_two(num_parts)
    tile_pairs = min(8, PART_PAIRS // parts)
    join_parts_kernel[(-(-num_rows * num_heads // tile_pairs),)](
        part_out,
        part_lse,
        out_NQD,
        num_rows * num_heads,
        num_parts,
        PARTS=parts,
        D=head_dim,
        TILE_PAIRS=tile_pairs,
        num_warps=4,
        launch_pdl=True,
    )


@dataclass(frozen=True)
class _Cut:
    """num_splits: parts of the keys. warpgroups: of a program that has one item, 0 where it has many.

    tiles_each: tiles of rows of each history, where it has one.
    """

    num_splits: int
    num_programs: int
    warpgroups: int = 0
    tiles_each: int = 0


def _cut(
    num_rows: int, num_histories: int, num_kv_heads: int, group: int, max_rows: int, max_kv: int,
    is_causal: bool, tiles: WarpgroupTiles,
) -> _Cut:  # fmt: skip
    for warpgroups in tiles.direct if num_histories == 1 or not is_causal else ():
        rows = warpgroups * ROWS
        tiles_each = -(-min(max_rows, num_rows) * group // rows)
        num_tiles = num_histories * tiles_each
        if num_tiles * num_kv_heads <= tiles.num_cores:
            num_splits = tiles.num_splits(num_tiles * num_kv_heads, max_kv)
            if is_causal:  # the history's tiles and those of the rows of none
                num_tiles = num_rows * group // rows + 2
            num_programs = num_tiles * num_kv_heads * num_splits
            return _Cut(num_splits, num_programs, warpgroups, tiles_each)
    rows = MOST_WARPGROUPS * ROWS
    num_items = max(num_histories, num_rows * group // rows) * num_kv_heads
    num_splits = tiles.num_splits(num_items, max_kv)
    most_items = (num_rows * group // rows + num_histories + 1) * num_kv_heads * num_splits
    return _Cut(num_splits, min(tiles.num_cores, most_items))


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
) -> torch.Tensor:
    """[N, Q, D] as `prefill_attention` (causal, no own tokens) or `beam_attention` (own tokens) in xgr_runtime.hal.ops.

    Causal, rows of no history are 0; else they are left as they come.

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
    num_histories = kv_len_H.shape[0]
    cut = _cut(num_rows, num_histories, num_kv_heads, group, max_rows, max_kv, is_causal, tiles)
    num_splits = cut.num_splits
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
    arrays = (
        *descriptors, q_NQD, page_table_HP, row_start_H1, kv_len_H, part_out, part_lse, k_rows, v_rows, slot_N,
    )  # fmt: skip
    numbers = (
        page_table_HP.stride(0), k_rows.stride(0), v_rows.stride(0), k_rows.stride(1), v_rows.stride(1),
        own.num_tokens if own else 0, num_splits, scale,
    )  # fmt: skip
    constants = {
        "IS_SPLIT": num_splits > 1,
        "IS_CAUSAL": is_causal,
        "OWN": own_places(own, group) if own else 0,
        "G": num_kv_heads,
        "X": group,
        "D": head_dim,
        "PAGE_SIZE": page_size,
        "KEYS": tiles.keys,
        "STAGES": tiles.stages,
        "num_warps": 4,
    }
    if cut.warpgroups > 0:
        direct_attention_kernel[(cut.num_programs,)](
            *arrays,
            num_rows,
            num_histories,
            cut.tiles_each,
            *numbers,
            **constants,
            WARPGROUPS=cut.warpgroups,
            launch_pdl=True,
        )
    else:
        warpgroup_attention_kernel[(cut.num_programs,)](
            *arrays, num_rows, num_histories, *numbers, **constants,
            WITH_REST=is_causal, SEGMENTS=max(LEAST_SEGMENTS, next_power_of_two(num_histories + 1)),
        )  # fmt: skip
    if num_splits > 1:
        _join_parts(part_out, part_lse, out_NQD, num_splits)
    return out_NQD
