"""Launchers of the attention kernels for Hopper's warpgroups: how the work is cut, and descriptors of pages.

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
SEGMENTS = 64  # places for the histories of a prefill and the rows of none
MOST_HISTORIES = SEGMENTS - 1  # of a prefill


@dataclass(frozen=True)
class WarpgroupTiles:
    """How histories are cut.

    keys: of a tile, a power of two that divides the page size. stages: key tiles on the chip. num_cores: programs at once.
    min_split_keys: what a part of the keys has at least where beams' keys are split. most_split_items: items above which they
    are not, though cores are idle.
    """

    keys: int
    stages: int
    num_cores: int
    min_split_keys: int
    most_split_items: int

    def num_splits(self, num_items: int, max_kv: int) -> int:
        """Into how many parts beams' keys go where unsplit there are `num_items` items."""
        if num_items > self.most_split_items:
            return 1
        return max(1, min(self.num_cores // num_items, max_kv // self.min_split_keys, MOST_PARTS))

    def warpgroups(self, num_items: int) -> int:
        """That compute in a program of beams, where there are `num_items` items of one each."""
        return 1 if num_items <= self.num_cores else MOST_WARPGROUPS


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


def _check(scale: float, *arrays: tuple[str, torch.Tensor, int]) -> None:
    if not scale > 0.0:
        raise ValueError(f"scale must be above 0, got {scale}")
    for name, states, num_dims in arrays:
        check_rows_dense(name, states, num_dims)


def _descriptor(pages: torch.Tensor, keys: int) -> TensorDescriptor:
    """Of tiles [1, keys, D] of pages, whose KV heads lie side by side."""
    num_pages, page_size, num_kv_heads, head_dim = pages.shape
    row_elements = num_kv_heads * head_dim
    return TensorDescriptor(
        pages,
        [num_pages, page_size, row_elements],
        [page_size * row_elements, row_elements, 1],
        [1, keys, head_dim],
        NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3),
    )


def _constants(q_NQD: torch.Tensor, k_pages: torch.Tensor, tiles: WarpgroupTiles) -> dict[str, int]:
    page_size, num_kv_heads, head_dim = k_pages.shape[1:]
    return {
        "G": num_kv_heads,
        "X": q_NQD.shape[1] // num_kv_heads,
        "D": head_dim,
        "PAGE_SIZE": page_size,
        "KEYS": tiles.keys,
        "STAGES": tiles.stages,
        "num_warps": 4,
    }


def launch_prefill_attention(
    q_TQD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_HP: torch.Tensor,
    q_start_H1: torch.Tensor,
    kv_len_H: torch.Tensor,
    scale: float,
    tiles: WarpgroupTiles,
) -> torch.Tensor:
    """[T, Q, D] as `prefill_attention` in xgr_runtime.hal.ops; rows of no history are 0.

    Raises:
        ValueError: strides, a scale or a number of histories that it cannot take.
    """
    _check(
        scale,
        ("q", q_TQD, 3),
        ("k_pages", k_pages, 4),
        ("v_pages", v_pages, 4),
        ("page_table_HP", page_table_HP, 1),
    )
    num_histories = kv_len_H.shape[0]
    if num_histories > MOST_HISTORIES:
        raise ValueError(f"takes {MOST_HISTORIES} histories at most, got {num_histories}")
    constants = _constants(q_TQD, k_pages, tiles)
    num_tiles = q_TQD.shape[0] * constants["X"] // (MOST_WARPGROUPS * ROWS) + num_histories + 1
    out_TQD = torch.empty_like(q_TQD)
    warpgroup_attention_kernel[(min(tiles.num_cores, num_tiles * constants["G"]),)](
        _descriptor(k_pages, tiles.keys),
        _descriptor(v_pages, tiles.keys),
        q_TQD,
        page_table_HP,
        q_start_H1,
        kv_len_H,
        out_TQD,
        q_TQD.shape[0],
        num_histories,
        page_table_HP.stride(0),
        scale,
        SEGMENTS=SEGMENTS,
        **constants,
    )
    return out_TQD


def launch_beam_attention(
    q_NQD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_HP: torch.Tensor,
    row_start_H1: torch.Tensor,
    kv_len_H: torch.Tensor,
    own: OwnTokens,
    scale: float,
    max_rows: int,
    max_kv: int,
    tiles: WarpgroupTiles,
) -> torch.Tensor:
    """[N, Q, D] as `beam_attention` in xgr_runtime.hal.ops; rows of no history are left as they come.

    A row is NaN all over where an own value of its beam is not finite.

    Raises:
        ValueError: strides, a scale or more own tokens a beam than it can take.
    """
    _check(
        scale,
        ("q", q_NQD, 3),
        ("k_pages", k_pages, 4),
        ("v_pages", v_pages, 4),
        ("page_table_HP", page_table_HP, 1),
    )
    constants = _constants(q_NQD, k_pages, tiles)
    places = own_places(own, constants["X"])
    if places > constants["X"]:
        raise ValueError(
            f"takes {constants['X']} own tokens a beam at most, got {own.k_rows.shape[1]}"
        )
    query_rows = max(1, min(max_rows, q_NQD.shape[0])) * constants["X"]  # of a history at most
    heads = kv_len_H.shape[0] * constants["G"]
    warpgroups = tiles.warpgroups(-(-query_rows // ROWS) * heads)
    tiles_each = -(-query_rows // (warpgroups * ROWS))
    num_splits = tiles.num_splits(tiles_each * heads, max_kv)
    out_NQD = torch.empty_like(q_NQD)
    part_out, part_lse = out_NQD, out_NQD
    if num_splits > 1:
        part_out, part_lse = new_parts(q_NQD, num_splits), new_lse(q_NQD, num_splits)
    direct_attention_kernel[(tiles_each * heads * num_splits,)](
        _descriptor(k_pages, tiles.keys),
        _descriptor(v_pages, tiles.keys),
        q_NQD,
        page_table_HP,
        row_start_H1,
        kv_len_H,
        part_out,
        part_lse,
        own.k_rows,
        own.v_rows,
        own.slot_N,
        q_NQD.shape[0],
        tiles_each,
        page_table_HP.stride(0),
        own.k_rows.stride(0),
        own.v_rows.stride(0),
        own.k_rows.stride(1),
        own.v_rows.stride(1),
        own.num_tokens,
        num_splits,
        scale,
        IS_SPLIT=num_splits > 1,
        OWN=places,
        WARPGROUPS=warpgroups,
        launch_pdl=True,
        **constants,
    )
    if num_splits > 1:
        _join_parts(part_out, part_lse, out_NQD, num_splits)
    return out_NQD
