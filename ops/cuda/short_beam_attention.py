"""Beams' attention of few rows on NVIDIA's Hopper GPUs: parts of the history's keys for every core, own tokens at the join.

Measured on one H200 (triton 3.6, bf16, 16 query and 8 KV heads, D 128, pages of 128, two own tokens; in a captured graph, keys
and values not in the second-level cache), medians in us, `beam_attention_by_warpgroups` beside it:

    histories x beams x cached   128 keys, 8 parts   16 parts   64 keys, 8 parts   by warpgroups
    1 x 16 x 1,024                5.4                 4.9        6.4                9.0
    1 x 32 x 1,024                6.2                 5.6        6.3                9.9
    1 x 64 x 1,024                7.7                 7.7        7.9               10.3
    1 x 128 x 400                 7.7                 7.4        8.8                7.3
    1 x 128 x 1,024               9.6                 9.8       11.1               11.3
    1 x 16 x 5,000               13.0                11.7       15.6               14.3
    1 x 128 x 5,000              22.6                23.1       21.3               40.4
    2 x 64 x 1,000               10.9                11.0       12.6               11.8
    4 x 32 x 1,024               12.3                12.2       14.0               13.0
    8 x 16 x 1,000               17.2                17.7       17.7               16.1
    1 x 192 x 1,024              11.9                13.2       12.3               12.2
    1 x 256 x 1,024              13.1                14.1       13.7               13.0

With the product in front (q, k, v of hidden size 1,024, and the cache's rows) and the one behind (residual and norm):

    1 x 32 x 1,024               15.6                16.0       16.4               21.0
    1 x 128 x 1,024              22.2                22.7       23.3               24.5
    4 x 32 x 1,024               24.9                24.8       26.3               26.6
    1 x 256 x 1,024              28.0                29.1       28.4               27.1

More parts gain a little where there are few rows and nothing beside them, and nothing between products. Of the 9.6 us of
1 x 128 x 1,024 the parts take 7.2 and joining them 2.6.

H histories, N rows, Q query heads, G KV heads, D head dim, X = Q // G.
"""

from typing import TYPE_CHECKING

from xgr_runtime.hal.ops.fused_attention import beam_attention
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.history_attention import OwnTokens
from .attention import beam_attention_in_tiles
from .attention_launch import why_attention_refused
from .hopper import NUM_CORES
from .short_attention import ShortTiles, launch_short_beam_attention
from .warpgroup_attention_providers import TILES as WARPGROUP_TILES
from .warpgroup_attention_providers import beam_attention_by_warpgroups

if TYPE_CHECKING:
    import torch

TILES = ShortTiles(keys=128, programs=NUM_CORES, most_parts=8)
SMALL_PAGE_TILES = ShortTiles(most_parts=8)
MOST_PAIRS = 128 * 16  # rows times query heads; with more of them the key tiles are read too often
MOST_HISTORIES = 4  # likewise: with more of them the keys themselves have work for every core
MOST_OWN = 4  # own tokens of a beam, which a join has in registers


def tiles_for(page_size: int) -> ShortTiles:
    """The tiles of a call over pages of that size."""
    return TILES if page_size % TILES.keys == 0 else SMALL_PAGE_TILES


def _accepts(spec: OpSpec) -> str | None:
    num_rows, num_heads = spec.dims.get("N", 1), spec.dims.get("Q", 1)
    if num_rows * num_heads > MOST_PAIRS:
        return f"rows times Q must be at most {MOST_PAIRS}, got {num_rows} and {num_heads}"
    num_histories = spec.dims.get("H", 1)
    if num_histories > MOST_HISTORIES:
        return f"H must be at most {MOST_HISTORIES}, got {num_histories}"
    return why_attention_refused(spec, SMALL_PAGE_TILES.keys)


@impl(beam_attention, provider="gluon-short", device="cuda", accepts=_accepts)
def beam_attention_of_few_rows(
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
    """Two kernels; the host's numbers are not read.

    Where a beam may have more own tokens than `MOST_OWN`, which no size tells beforehand, the kernels for more rows do it.
    """
    arrays = (q_NQD, k_pages, v_pages, page_table_HP, row_start_H1, kv_len_H)
    page_size = k_pages.shape[1]
    if k_rows.shape[1] > MOST_OWN:
        takes_pages = page_size % WARPGROUP_TILES.keys == 0
        others = beam_attention_by_warpgroups if takes_pages else beam_attention_in_tiles
        return others(*arrays, k_rows, v_rows, slot_N, num_tokens, scale, max_rows, max_kv, kv_lens)
    own = OwnTokens(k_rows, v_rows, slot_N, num_tokens)
    return launch_short_beam_attention(*arrays, own, scale, max_rows, max_kv, tiles_for(page_size))
