"""The beginning of a pass, with a product behind it that starts early.

The kernel itself is started when all in front of it has ended: what kernels behind it read early (pages, tables, lengths, slots)
has been written by then. So they may be put onto the chip at once, and wait for its results where they need them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ..triton.embedding_kernels import begin_rows


@triton.jit(do_not_specialize=["num_rows", "num_items"])
def embedding_before_product_kernel(
    embedding_ptr,
    id_ptr,
    token_of_ptr,
    norm_weight_ptr,
    position_ptr,
    frequency_ptr,
    residual_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    num_rows,
    num_items,
    eps,
    HAS_TABLE: tl.constexpr,
    M: tl.constexpr,
    M_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """See `begin_rows`."""
    gdc_launch_dependents()
    begin_rows(
        embedding_ptr, id_ptr, token_of_ptr, norm_weight_ptr, position_ptr, frequency_ptr, residual_ptr, out_ptr,
        cos_ptr, sin_ptr, num_rows, num_items, eps, HAS_TABLE, M, M_PAD, D, D_PAD, TILE_ROWS,
    )  # fmt: skip
