"""Attention on NVIDIA's Hopper GPUs (H100, H200) with the kernels for their warpgroups, before that of tiles.

They take what models and caches for this GPU usually have: 16-bit numbers, heads of 64 or 128, whole tiles of 128 keys in a
page; a prefill with enough rows for all cores, and beams of any number, though few of few histories are taken before by
`xgr_ops.cuda.short_beam_attention`. Everything else, and the shared stage on its own, is left to `xgr_ops.cuda.attention`. So are
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
"""

from typing import TYPE_CHECKING

from xgr_runtime.hal.ops.attention import prefill_attention
from xgr_runtime.hal.ops.fused_attention import beam_attention
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.history_attention import OwnTokens
from .attention import beam_attention_in_tiles
from .attention_launch import MOST_HISTORIES, why_attention_refused
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
    """Keys behind a tile's last row are not read; the host's numbers are not either.

    Where the call has fewer rows than the sizes said, and too few for all cores, `prefill_attention_of_few_tokens` does it.
    """
    if q_TQD.shape[0] * q_TQD.shape[1] < LEAST_ROWS:
        return prefill_attention_of_few_tokens(
            q_TQD, k_pages, v_pages, page_table_HP, q_start_H1, kv_len_H, scale, max_q, max_kv, q_starts, kv_lens
        )  # fmt: skip
    return launch_prefill_attention(
        q_TQD, k_pages, v_pages, page_table_HP, q_start_H1, kv_len_H, scale, TILES
    )


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
