"""Launchers of the attention kernels for Hopper's warpgroups: how the work is cut.

H histories, N rows, Q query heads, G KV heads, D head dim, P pages, X = Q // G.
"""

from dataclasses import dataclass

import torch

from ..triton.history_attention import OwnTokens, new_lse, new_parts
from ..triton.launch import next_power_of_two
from .attention_launch import SEGMENTS, check_attention, check_histories, page_descriptor
from .attention_parts_kernels import join_parts_kernel
from .beam_attention_kernels import beam_attention_kernel
from .hopper import WARPGROUP_ROWS
from .prefill_attention_kernels import prefill_attention_kernel

WARPGROUPS = 2  # that compute, in a program
MOST_PARTS = 8  # of the keys
JOINED_PAIRS = 8  # (row, head) pairs of a program that joins their parts
# Of a thread when a program that divides keys starts: its warps share them out, and a core has some left for the next kernel.
PARTED_REGISTERS = 128


@dataclass(frozen=True)
class WarpgroupTiles:
    """How histories are cut.

    keys: of a tile, a power of two that divides the page size. stages: tiles on the chip, of keys and of values, for beams;
    prefill_stages: for prefills, whose queries have more room. parted_keys, parted_stages: of each warpgroup where two divide the
    keys. num_cores: programs at once. min_split_keys: what a part of the keys has at least where beams' keys are split among
    programs. most_partial: results of parts, of all (row, head) pairs, as each is written and read again.
    """

    keys: int
    stages: tuple[int, int]
    prefill_stages: tuple[int, int]
    parted_keys: int
    parted_stages: tuple[int, int]
    num_cores: int
    min_split_keys: int
    most_partial: int

    def num_splits(self, num_items: int, num_pairs: int, max_kv: int) -> int:
        """Into how many parts the keys of `num_pairs` (row, head) pairs of beams go, which unsplit are `num_items` items."""
        for_cores, for_join = self.num_cores // num_items, self.most_partial // num_pairs
        return max(1, min(for_cores, for_join, max_kv // self.min_split_keys, MOST_PARTS))

    def key_groups(self, num_items: int) -> int:
        """Parts of the keys in a program of beams, where there are `num_items` items of a warpgroup's rows."""
        return WARPGROUPS if num_items <= self.num_cores else 1


def own_places(own: OwnTokens, group: int) -> int:
    """Own tokens of a beam as the kernels count them, a power of two; they take them where there are at most `group`."""
    return max(next_power_of_two(own.k_rows.shape[1]), group // 4)


def _most_tiles(query_rows: int, group: int, num_histories: int, tile_rows: int) -> int:
    """Tiles of rows that histories may have together, however rows are shared out: the last one of each has a beam or more."""
    return max(1, (query_rows + num_histories * (tile_rows - group)) // tile_rows)


def _join_parts(
    part_out: torch.Tensor, part_lse: torch.Tensor, out_NQD: torch.Tensor, num_parts: int
) -> None:
    num_rows, num_heads, head_dim = out_NQD.shape
    join_parts_kernel[(-(-num_rows * num_heads // JOINED_PAIRS),)](
        part_out,
        part_lse,
        out_NQD,
        num_rows * num_heads,
        num_parts,
        PARTS=next_power_of_two(num_parts),
        D=head_dim,
        TILE_PAIRS=JOINED_PAIRS,
        num_warps=4,
        launch_pdl=True,
    )


def _constants(
    q_NQD: torch.Tensor, k_pages: torch.Tensor, keys: int, stages: tuple[int, int]
) -> dict[str, int]:
    page_size, num_kv_heads, head_dim = k_pages.shape[1:]
    return {
        "G": num_kv_heads,
        "X": q_NQD.shape[1] // num_kv_heads,
        "D": head_dim,
        "PAGE_SIZE": page_size,
        "KEYS": keys,
        "K_STAGES": stages[0],
        "V_STAGES": stages[1],
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
    check_attention(q_TQD, k_pages, v_pages, page_table_HP, scale)
    check_histories(kv_len_H)
    num_histories = kv_len_H.shape[0]
    constants = _constants(q_TQD, k_pages, tiles.keys, tiles.prefill_stages)
    num_tiles = q_TQD.shape[0] * constants["X"] // (WARPGROUPS * WARPGROUP_ROWS) + num_histories + 1
    out_TQD = torch.empty_like(q_TQD)
    prefill_attention_kernel[(min(tiles.num_cores, num_tiles * constants["G"]),)](
        page_descriptor(k_pages, tiles.keys),
        page_descriptor(v_pages, tiles.keys),
        q_TQD,
        page_table_HP,
        q_start_H1,
        kv_len_H,
        out_TQD,
        q_TQD.shape[0],
        num_histories,
        page_table_HP.stride(0),
        scale,
        SEGMENTS=SEGMENTS,  # the rows of no history are one more
        launch_pdl=True,
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
    max_kv: int,
    tiles: WarpgroupTiles,
) -> torch.Tensor:
    """[N, Q, D] as `beam_attention` in xgr_runtime.hal.ops; rows of no history are left as they come.

    A row is NaN all over where an own value of its beam is not finite. How many rows there may be of one history is not asked: the
    launch depends on all rows. Captured in a graph, the kernel reads everything but the queries and own tokens before the one in
    front of it has ended: neither that one nor any that it has not waited for may write pages, their table, starts, lengths or slots.

    Raises:
        ValueError: strides, a scale or more own tokens a beam than it can take.
    """
    check_attention(q_NQD, k_pages, v_pages, page_table_HP, scale)
    out_NQD = torch.empty_like(q_NQD)
    if q_NQD.shape[0] == 0:
        return out_NQD
    num_histories = kv_len_H.shape[0]
    query_rows, heads = q_NQD.shape[0] * q_NQD.shape[1] // k_pages.shape[2], k_pages.shape[2]
    key_groups = tiles.key_groups(-(-query_rows // WARPGROUP_ROWS) * heads)
    keys, stages = tiles.keys, tiles.stages
    if key_groups > 1:
        keys, stages = tiles.parted_keys, tiles.parted_stages
    constants = _constants(q_NQD, k_pages, keys, stages)
    places = own_places(own, constants["X"])
    if places > constants["X"]:
        raise ValueError(
            f"takes {constants['X']} own tokens a beam at most, got {own.k_rows.shape[1]}"
        )
    tile_rows = WARPGROUPS // key_groups * WARPGROUP_ROWS
    num_tiles = _most_tiles(query_rows, constants["X"], num_histories, tile_rows)
    num_splits = tiles.num_splits(num_tiles * heads, q_NQD.shape[0] * q_NQD.shape[1], max_kv)
    part_out, part_lse = out_NQD, out_NQD
    if num_splits > 1:
        part_out, part_lse = new_parts(q_NQD, num_splits), new_lse(q_NQD, num_splits)
    beam_attention_kernel[(num_tiles * heads * num_splits,)](
        page_descriptor(k_pages, keys),
        page_descriptor(v_pages, keys),
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
        num_histories,
        page_table_HP.stride(0),
        own.k_rows.stride(0),
        own.v_rows.stride(0),
        own.k_rows.stride(1),
        own.v_rows.stride(1),
        own.num_tokens,
        num_splits,
        scale,
        int(torch.cuda.is_current_stream_capturing()),
        IS_SPLIT=num_splits > 1,
        OWN=places,
        SEGMENTS=max(32, next_power_of_two(num_histories)),
        KEY_GROUPS=key_groups,
        launch_pdl=True,
        maxnreg=PARTED_REGISTERS if key_groups > 1 else None,
        **constants,
    )
    if num_splits > 1:
        _join_parts(part_out, part_lse, out_NQD, num_splits)
    return out_NQD
