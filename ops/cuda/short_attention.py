"""Launchers of the attention of few rows on NVIDIA's Hopper generation: a prefill's new tokens, and beams.

H histories, N rows, Q query heads, G KV heads, D head dim, X = Q // G.
"""

from dataclasses import dataclass

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton.history_attention import OwnTokens
from .attention_launch import (
    LAYOUT,
    SEGMENTS,
    check_attention,
    check_histories,
    page_descriptor,
)
from .hopper import NUM_CORES, WARPGROUP_ROWS
from .short_attention_kernels import short_attention_kernel
from .short_beam_join_kernels import join_short_beams_kernel
from .short_prefill_join_kernels import join_short_prefill_kernel

ROWS = WARPGROUP_ROWS  # query rows of a tile
STAGES = 2  # key tiles on the chip
JOINED_PAIRS = 4  # (row, head) pairs of a program that joins, one a warp


@dataclass(frozen=True)
class ShortTiles:
    """How a call is cut.

    keys: of a tile, a power of two that divides the page size. programs: how many parts of keys are made for, one a core or two.
    most_parts: of a history's keys, a multiple of 4.
    """

    keys: int = 64
    programs: int = 2 * NUM_CORES
    most_parts: int = 16


@dataclass(frozen=True)
class _Parts:
    """Results of parts of the keys, and what the kernel that joins them has to know.

    out: fp32 [pairs, D], lse: fp32 [pairs]: memory of this call from torch's allocator; in a captured graph it is the graph's
    pool, and whoever gets it next on the stream writes it behind the kernel that reads it here.
    """

    out: torch.Tensor
    lse: torch.Tensor
    constants: dict[str, int]
    is_settled: int


def launch_short_prefill_attention(
    q_TQD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_HP: torch.Tensor,
    q_start_H1: torch.Tensor,
    kv_len_H: torch.Tensor,
    scale: float,
    max_q: int,
    max_kv: int,
    tiles: ShortTiles,
) -> torch.Tensor:
    """[T, Q, D] as `prefill_attention` in xgr_runtime.hal.ops; rows of no history are 0.

    Captured in a graph, the kernels read all but the queries and the new tokens' keys and values before the one in front has
    ended: that one must not write starts, lengths, the page table or cached tokens.

    Raises:
        ValueError: strides, a scale or a number of histories that it cannot take.
    """
    out_TQD = torch.empty_like(q_TQD)
    if q_TQD.shape[0] == 0:
        return out_TQD
    arrays = (q_TQD, k_pages, v_pages, page_table_HP, q_start_H1, kv_len_H)
    parts = _launch_parts(*arrays, out_TQD, scale, max_q, max_kv, True, tiles)
    join_short_prefill_kernel[(-(-q_TQD.shape[0] * q_TQD.shape[1] // JOINED_PAIRS),)](
        parts.out,
        parts.lse,
        out_TQD,
        q_start_H1,
        kv_len_H,
        q_TQD.shape[0],
        kv_len_H.shape[0],
        parts.is_settled,
        num_warps=JOINED_PAIRS,
        launch_pdl=True,
        **parts.constants,
    )
    return out_TQD


def launch_short_beam_attention(
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
    tiles: ShortTiles,
) -> torch.Tensor:
    """[N, Q, D] as `beam_attention` in xgr_runtime.hal.ops; rows of no history are left as they come.

    Captured in a graph, the kernels read all but the queries and the own tokens before the one in front has ended: that one must
    not write starts, lengths, slots, the page table or pages.

    Raises:
        ValueError: strides, a scale or a number of histories that it cannot take.
    """
    out_NQD = torch.empty_like(q_NQD)
    if q_NQD.shape[0] == 0:
        return out_NQD
    arrays = (q_NQD, k_pages, v_pages, page_table_HP, row_start_H1, kv_len_H)
    parts = _launch_parts(*arrays, out_NQD, scale, max_rows, max_kv, False, tiles)
    join_short_beams_kernel[(-(-q_NQD.shape[0] * q_NQD.shape[1] // JOINED_PAIRS),)](
        parts.out,
        parts.lse,
        out_NQD,
        row_start_H1,
        kv_len_H,
        q_NQD,
        own.k_rows,
        own.v_rows,
        own.slot_N,
        kv_len_H.shape[0],
        own.num_tokens,
        own.k_rows.stride(0),
        own.v_rows.stride(0),
        own.k_rows.stride(1),
        own.v_rows.stride(1),
        scale,
        parts.is_settled,
        OWN=own.k_rows.shape[1],
        num_warps=JOINED_PAIRS,
        launch_pdl=True,
        **parts.constants,
    )
    return out_NQD


def _launch_parts(
    q_NQD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_HP: torch.Tensor,
    row_start_H1: torch.Tensor,
    kv_len_H: torch.Tensor,
    out_NQD: torch.Tensor,
    scale: float,
    max_rows: int,
    max_kv: int,
    is_causal: bool,
    tiles: ShortTiles,
) -> _Parts:
    check_attention(q_NQD, k_pages, v_pages, page_table_HP, scale)
    check_histories(kv_len_H)
    num_rows, num_heads, head_dim = q_NQD.shape
    num_histories, num_kv_heads = kv_len_H.shape[0], k_pages.shape[2]
    group = num_heads // num_kv_heads
    # each history may end in a tile that is not full
    num_tiles = min(
        num_rows * group // ROWS + num_histories, num_histories * -(-max_rows * group // ROWS)
    )
    most_parts = min(tiles.most_parts, -(-max_kv // tiles.keys))
    num_programs = num_tiles * num_kv_heads
    most_pairs = min(most_parts * num_rows * num_heads, tiles.programs * ROWS)
    num_pairs = max(num_rows * num_heads, most_pairs)
    constants = {
        "G": num_kv_heads,
        "X": group,
        "D": head_dim,
        "SEGMENTS": SEGMENTS,
        "KEYS": tiles.keys,
        "PROGRAMS": tiles.programs,
        "MOST_PARTS": tiles.most_parts,
    }
    parts = _Parts(
        q_NQD.new_empty((num_pairs, head_dim), dtype=torch.float32),
        q_NQD.new_empty(num_pairs, dtype=torch.float32),
        constants,
        int(torch.cuda.is_current_stream_capturing()),
    )
    grid = min(num_programs * most_parts, max(num_programs, tiles.programs))
    short_attention_kernel[(grid,)](
        TensorDescriptor(
            q_NQD,
            [num_rows, num_heads, head_dim],
            [num_heads * head_dim, head_dim, 1],
            [ROWS // group, group, head_dim],
            LAYOUT,
        ),
        page_descriptor(k_pages, tiles.keys),
        page_descriptor(v_pages, tiles.keys),
        page_table_HP,
        row_start_H1,
        kv_len_H,
        out_NQD,
        parts.out,
        parts.lse,
        num_histories,
        page_table_HP.stride(0),
        scale,
        parts.is_settled,
        PAGE_SIZE=k_pages.shape[1],
        STAGES=STAGES,
        CAUSAL=is_causal,
        num_warps=4,
        launch_pdl=True,  # starts before the kernel in front of it has ended
        **constants,
    )
    return parts
