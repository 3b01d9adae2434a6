"""Launcher of a small prefill's attention, whose keys two warpgroups of a program divide.

H histories, T packed tokens, Q query heads, G KV heads, D head dim, P pages, X = Q // G.
"""

from dataclasses import dataclass

import torch

from ..triton.launch import next_power_of_two
from .attention_launch import check_attention, check_histories, page_descriptor
from .divided_prefill_kernels import divided_prefill_kernel
from .hopper import WARPGROUP_ROWS

LEAST_SEGMENTS = 32  # a warp's lanes
# Of a thread when a program starts: its warps share them out, and a core has some left for the next kernel.
REGISTERS = 128


@dataclass(frozen=True)
class DividedTiles:
    """keys: of a tile, a power of two that divides the page size. stages: tiles on the chip, of keys and of values, of each part."""

    keys: int = 64
    stages: tuple[int, int] = (2, 2)


def most_items(num_tokens: int, num_heads: int, num_kv_heads: int, num_histories: int) -> int:
    """Items that a prefill may have at most, however tokens are shared out among histories and padding."""
    group = num_heads // num_kv_heads
    partly = (num_histories + 1) * (WARPGROUP_ROWS - group)
    return num_kv_heads * ((num_tokens * group + partly) // WARPGROUP_ROWS)


def launch_divided_prefill_attention(
    q_TQD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_HP: torch.Tensor,
    q_start_H1: torch.Tensor,
    kv_len_H: torch.Tensor,
    scale: float,
    tiles: DividedTiles,
) -> torch.Tensor:
    """[T, Q, D] as `prefill_attention` in xgr_runtime.hal.ops; rows of no history are 0.

    Captured in a graph, the kernel reads lengths and starts before the one in front of it has ended: neither that one nor any that it
    has not waited for may write them.

    Raises:
        ValueError: strides, a scale or a number of histories that it cannot take.
    """
    check_attention(q_TQD, k_pages, v_pages, page_table_HP, scale)
    check_histories(kv_len_H)
    out_TQD = torch.empty_like(q_TQD)
    num_tokens, num_heads, head_dim = q_TQD.shape
    num_histories, page_size, num_kv_heads = kv_len_H.shape[0], *k_pages.shape[1:3]
    if num_tokens == 0:
        return out_TQD
    num_items = most_items(num_tokens, num_heads, num_kv_heads, num_histories)
    divided_prefill_kernel[(num_items,)](
        page_descriptor(k_pages, tiles.keys),
        page_descriptor(v_pages, tiles.keys),
        q_TQD,
        page_table_HP,
        q_start_H1,
        kv_len_H,
        out_TQD,
        num_tokens,
        num_histories,
        page_table_HP.stride(0),
        scale,
        int(torch.cuda.is_current_stream_capturing()),
        G=num_kv_heads,
        X=num_heads // num_kv_heads,
        D=head_dim,
        PAGE_SIZE=page_size,
        SEGMENTS=max(LEAST_SEGMENTS, next_power_of_two(num_histories + 1)),
        KEYS=tiles.keys,
        K_STAGES=tiles.stages[0],
        V_STAGES=tiles.stages[1],
        num_warps=4,
        launch_pdl=True,
        maxnreg=REGISTERS,
    )
    return out_TQD
