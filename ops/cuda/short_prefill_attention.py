"""A prefill's attention of few new tokens on NVIDIA's Hopper GPUs: a prefix hit, and the last layer's one token a history.

Measured on one H200 (triton 3.6, bf16, 16 query and 8 KV heads, D 128, pages of 128; in a captured graph, keys and values not in
the second-level cache), medians in us, the kernels for tiles of rows beside it:

    histories x new tokens (rows of the bucket), cached    64 keys, 8 parts   128 keys, 16 parts   in tiles
    1 x 24 (32), 1,000                                      5.5                5.2                15.4
    1 x 60 (64), 964                                        7.0                6.8                19.5
    1 x 100 (128), 900                                      9.8                8.4                20.7
    1 x 192, 808                                           11.2               12.9                17.5
    1 x 256, 744                                           11.6               13.5                19.8
    1 x 384, 616                                           17.0               17.7                20.9
    1 x 24 (32), 4,976                                     14.2               12.2                23.5
    4 x 24 (128), 976                                      11.3               10.0                24.4
    8 x 24 (256), 976                                      18.2               18.6                31.0
    1 x 1, 999                                              4.5                4.2                12.7
    32 x 1, 999                                            36.2               39.1                41.6

H histories, T new tokens, Q query heads, G KV heads, D head dim, X = Q // G.
"""

from typing import TYPE_CHECKING

from xgr_runtime.hal.ops.attention import prefill_attention
from xgr_runtime.hal.registry import OpSpec, impl

from .attention import prefill_attention_in_tiles
from .attention_launch import MOST_HISTORIES, why_attention_refused
from .hopper import NUM_CORES
from .short_attention import ShortTiles, launch_short_prefill_attention

if TYPE_CHECKING:
    import torch

# New tokens times query heads: with more of them each tile of keys is read for too many tiles of rows.
MOST_PAIRS = 384 * 16
TILES = ShortTiles(most_parts=8)
# Half as many waits in a row, and half as many parts to join. Up to so many pairs of so many histories.
LONG_TILES = ShortTiles(keys=128, programs=NUM_CORES)
LONG_TILES_PAIRS, LONG_TILES_HISTORIES = 128 * 16, 8


def tiles_for(num_pairs: int, num_histories: int, page_size: int) -> ShortTiles:
    """The tiles of a call with so many new tokens times query heads."""
    is_small = num_pairs <= LONG_TILES_PAIRS and num_histories <= LONG_TILES_HISTORIES
    return LONG_TILES if is_small and page_size % LONG_TILES.keys == 0 else TILES


def _accepts(spec: OpSpec) -> str | None:
    num_histories = spec.dims.get("H", 1)
    if num_histories > MOST_HISTORIES:
        return f"H must be at most {MOST_HISTORIES}, got {num_histories}"
    return why_attention_refused(spec, TILES.keys)


@impl(prefill_attention, provider="gluon-short", device="cuda", accepts=_accepts)
def prefill_attention_of_few_tokens(
    q_TQD: "torch.Tensor",
    k_pages: "torch.Tensor",
    v_pages: "torch.Tensor",
    page_table_HP: "torch.Tensor",
    q_start_H1: "torch.Tensor",
    kv_len_H: "torch.Tensor",
    scale: float,
    max_q: int,
    max_kv: int,
    q_starts: tuple[int, ...],
    kv_lens: tuple[int, ...],
) -> "torch.Tensor":
    """Two kernels; the host's numbers are not read. A call of more rows is left to `prefill_attention_in_tiles`.

    Sizes do not refuse it: the last layer of every bucket asks for a few rows. The kernel in front on the stream may write the
    queries and the new tokens' keys and values; starts, lengths, the page table and the cached tokens have to be there before it.
    """
    arrays = (q_TQD, k_pages, v_pages, page_table_HP, q_start_H1, kv_len_H)
    num_pairs = q_TQD.shape[0] * q_TQD.shape[1]
    if num_pairs > MOST_PAIRS or kv_len_H.shape[0] > MOST_HISTORIES:
        return prefill_attention_in_tiles(*arrays, scale, max_q, max_kv, q_starts, kv_lens)
    tiles = tiles_for(num_pairs, kv_len_H.shape[0], k_pages.shape[1])
    return launch_short_prefill_attention(*arrays, scale, max_q, max_kv, tiles)
