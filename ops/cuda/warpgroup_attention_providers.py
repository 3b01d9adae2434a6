"""Attention on NVIDIA's Hopper GPUs (H100, H200) with the kernels for their warpgroups, before that of tiles.

They take what models and caches for this GPU usually have: 16-bit numbers, heads of 64 or 128, whole tiles of 128 keys in a
page; a prefill with enough rows for all cores, and beams of any number, though few of few histories are taken before by
`xgr_ops.cuda.short_beam_attention`. A prefill has 128 rows an item and programs that go from item to item, or, where items are few,
64 rows whose keys two warpgroups divide. Everything else, and the shared stage on its own, is left to `xgr_ops.cuda.attention`. So are
single calls that no size tells beforehand: beams that may have more own tokens than Q // G, for which a tile has no room, and a
prefill of fewer rows than its bucket's, as the last layer asks for.

Measured on one H200 (triton 3.6, bf16, 16 query and 8 KV heads, D 128, pages of 128, two own tokens; in a captured graph, keys
and values not in the second-level cache), medians in us:

    histories x beams x cached   two warpgroups divide keys   they share keys
    1 x 128 x 128                  5.0
    1 x 128 x 1,024               11.5                        16.3
    1 x 256 x 1,000               12.6
    1 x 512 x 1,024               13.6                        20.0
    4 x 128 x 1,024               14.6                        21.0
    1 x 512 x 5,000               43.1                        69.6
    8 x 128 x 1,024                                           25.3
    8 x 512 x 1,024                                           87.0
    8 x 256 x 5,000                                          146.7

Keys split among programs (keys of a part), whose parts are joined by a second kernel:

    1 x 16 x 1,024    whole 11.0    512: 9.9    256: 9.5    128: 9.0
    1 x 16 x 5,000          39.3    500: 13.2
    1 x 64 x 1,024          11.3    512: 10.9   256: 12.9
    1 x 128 x 1,024         11.5    512: 12.3   256: 29.0
    1 x 256 x 1,000         12.6    500: 17.9
    1 x 256 x 5,000         40.9    2,500: 33.5

What joins them costs by rows times parts, and how long histories really are a graph's launch cannot tell: rows are split as far as
histories of 1,024 tokens gain, though longer ones would gain with more rows.

A prefill of one history, from item to item and divided; and one of 28 layers in a graph, its product of queries, keys and values,
attention and output product, of hidden size 1,024 and 2,048 (of 2,048 tokens and more dividing loses, of 1,280 it is all the same):

    tokens (rows of the bucket)   attention         a layer, 1,024    a layer, 2,048
    600 (640)                     16.2 and 10.8     44.3 and 37.4
    1,000 (1,024)                 23.0 and 17.1                        78.2 and 70.8
    1,024                         21.7 and 17.0     52.8 and 46.8
    1,280                         26.4 and 25.0                        98.7 and 97.6
    1,500 (1,536)                 29.3 and 29.7     78.2 and 73.7     101.7 and 101.1
    2,048                         40.4 and 46.3                       132.4 and 143.7
    3,000 (3,072)                 75.7 and 87.4                       222.0 and 236.4
"""

from typing import TYPE_CHECKING

from xgr_runtime.hal.ops.attention import prefill_attention
from xgr_runtime.hal.ops.fused_attention import beam_attention
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.history_attention import OwnTokens
from .attention import beam_attention_in_tiles
from .attention_launch import MOST_HISTORIES, why_attention_refused
from .divided_prefill import DividedTiles, launch_divided_prefill_attention, most_items
from .hopper import NUM_CORES
from .short_prefill_attention import prefill_attention_of_few_tokens
from .warpgroup_attention import (
    WarpgroupTiles,
    launch_beam_attention,
    launch_prefill_attention,
    own_places,
)

if TYPE_CHECKING:
    import torch

TILES = WarpgroupTiles(
    keys=128,
    stages=(3, 3),
    prefill_stages=(2, 3),
    parted_keys=64,
    parted_stages=(2, 2),
    num_cores=NUM_CORES,
    min_split_keys=128,
    most_partial=128 * 16,
)
DIVIDED_TILES = DividedTiles()  # with more stages: 17.3 to 17.5 us, where these take 17.0
# Of a prefill, up to which keys are divided: 392 are 1,536 tokens of one history.
MOST_DIVIDED_ITEMS = 3 * NUM_CORES
# Rows of a prefill times query heads below which most cores have nothing to do, and tiles with more programs a core are faster.
LEAST_ROWS = 64 * 128


def _accepts(spec: OpSpec) -> str | None:
    return why_attention_refused(spec, TILES.keys)


def _accepts_prefill(spec: OpSpec) -> str | None:
    num_histories = spec.dims.get("H", 1)
    if num_histories > MOST_HISTORIES:
        return f"H must be at most {MOST_HISTORIES}, got {num_histories}"
    num_rows, num_heads = spec.dims.get("T", LEAST_ROWS), spec.dims.get("Q", 1)
    if num_rows * num_heads < LEAST_ROWS:
        return f"rows times Q must be at least {LEAST_ROWS}, got {num_rows} and {num_heads}"
    return _accepts(spec)


@impl(prefill_attention, provider="gluon", device="cuda", accepts=_accepts_prefill)
def prefill_attention_by_warpgroups(
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
    """Keys behind a tile's last row are not read; the host's numbers are not either. Starts and lengths have to be there before
    the kernel in front.

    Where the call has fewer rows than the sizes said, and too few for all cores, `prefill_attention_of_few_tokens` does it.
    """
    if q_TQD.shape[0] * q_TQD.shape[1] < LEAST_ROWS:
        return prefill_attention_of_few_tokens(
            q_TQD, k_pages, v_pages, page_table_HP, q_start_H1, kv_len_H, scale, max_q, max_kv, q_starts, kv_lens
        )  # fmt: skip
    arrays = (q_TQD, k_pages, v_pages, page_table_HP, q_start_H1, kv_len_H)
    num_tokens, num_heads, _ = q_TQD.shape
    if most_items(num_tokens, num_heads, k_pages.shape[2], kv_len_H.shape[0]) <= MOST_DIVIDED_ITEMS:
        return launch_divided_prefill_attention(*arrays, scale, DIVIDED_TILES)
    return launch_prefill_attention(*arrays, scale, TILES)


@impl(beam_attention, provider="gluon", device="cuda", accepts=_accepts)
def beam_attention_by_warpgroups(
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
    """One pass: a row's own tokens come first, then the pages.

    Where a beam may have more own tokens than Q // G, rounded up to a power of two, `beam_attention_in_tiles` does it.
    """
    own = OwnTokens(k_rows, v_rows, slot_N, num_tokens)
    group = q_NQD.shape[1] // k_pages.shape[2]
    arrays = (q_NQD, k_pages, v_pages, page_table_HP, row_start_H1, kv_len_H)
    if own_places(own, group) > group:
        return beam_attention_in_tiles(
            *arrays, k_rows, v_rows, slot_N, num_tokens, scale, max_rows, max_kv, kv_lens
        )
    return launch_beam_attention(*arrays, own, scale, max_kv, TILES)
