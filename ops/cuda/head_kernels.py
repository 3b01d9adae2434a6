"""`head_logsumexp_kernel` with tiles that the copy engine brings (Hopper): descriptors, made on the host, in place of addresses.

Rows behind the last one, of hidden states as of the vocabulary, come as zeros. N rows, V rows of the head, M hidden size.
"""

import triton
import triton.language as tl

from ..triton.head_kernels import take_in_logits


@triton.jit
def head_logsumexp_by_descriptor_kernel(
    hidden_desc,
    weight_desc,
    largest_ptr,
    total_ptr,
    num_rows,
    num_vocab,
    scale,
    tiles_each,
    M: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """largest[s, n], total[s, n] of the rows n of a tile over the vocabulary's s-th run of `tiles_each` tiles."""
    num_row_tiles = tl.cdiv(num_rows, TILE_N)
    row_tile, run = tl.program_id(0) % num_row_tiles, tl.program_id(0) // num_row_tiles
    n_N = row_tile * TILE_N + tl.arange(0, TILE_N)
    v_V = tl.arange(0, TILE_V)
    largest_N = tl.full((TILE_N,), float("-inf"), tl.float32)
    total_N = tl.zeros((TILE_N,), tl.float32)
    end = tl.minimum((run + 1) * tiles_each, tl.cdiv(num_vocab, TILE_V))
    for tile in range(run * tiles_each, end):
        logit_NV = tl.zeros((TILE_N, TILE_V), tl.float32)
        for first in range(0, M, TILE_M):
            hidden_NM = hidden_desc.load([row_tile * TILE_N, first])
            weight_VM = weight_desc.load([tile * TILE_V, first])
            logit_NV = tl.dot(hidden_NM, weight_VM.T, logit_NV, input_precision="ieee")
        if HAS_SCALE:
            logit_NV *= scale
        if (tile + 1) * TILE_V > num_vocab:
            is_used_V = tile * TILE_V + v_V < num_vocab
            logit_NV = tl.where(is_used_V[None, :], logit_NV, float("-inf"))
        largest_N, total_N = take_in_logits(logit_NV, largest_N, total_N)
    is_row_N = n_N < num_rows
    offset_N = run.to(tl.int64) * num_rows + n_N
    tl.store(largest_ptr + offset_N, largest_N, mask=is_row_N)
    tl.store(total_ptr + offset_N, total_N, mask=is_row_N)
