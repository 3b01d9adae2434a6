"""The normaliser over a vocabulary, without logits of that size.

A program holds the running maximum and the running sum of a tile of rows while it walks a run of the vocabulary: a tile of
logits exists in registers alone. Neighbouring programs have the same run and other rows, so that the head's rows come from
memory once and from the cache for the rest. What the runs give is joined by a second kernel in a fixed order. The maximum
keeps the exponents small and does nothing else: NaN and +inf come through by the sum, whatever a device's maximum makes of
them, and are no part of what is subtracted. N rows, V rows of the head, M hidden size, S runs of the vocabulary.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite_or_zero(values):
    """What may be taken out of an exponent."""
    return tl.where(tl.abs(values) < float("inf"), values, 0.0)


@triton.jit
def take_in_logits(logit_NV, largest_N, total_N):
    """The running maximum and sum with another tile of logits. The difference is rounded once: 1e30 - 1e30 is 0."""
    new_largest_N = tl.maximum(largest_N, tl.max(logit_NV, axis=1))
    peak_N = finite_or_zero(new_largest_N)
    total_N = total_N * tl.exp2((largest_N - peak_N) * LOG2_E)
    total_N += tl.sum(tl.exp2((logit_NV - peak_N[:, None]) * LOG2_E), axis=1)
    return new_largest_N, total_N


@triton.jit
def head_logsumexp_kernel(
    hidden_ptr,
    weight_ptr,
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
    """largest[s, n], total[s, n] of the rows n of a tile over the vocabulary's s-th run of `tiles_each` tiles.

    Rows behind the last one are read as the last one: no load needs a mask for them.
    """
    num_row_tiles = tl.cdiv(num_rows, TILE_N)
    row_tile, run = tl.program_id(0) % num_row_tiles, tl.program_id(0) // num_row_tiles
    n_N = row_tile * TILE_N + tl.arange(0, TILE_N)
    m_M = tl.arange(0, TILE_M)
    hidden_N = hidden_ptr + tl.minimum(n_N, num_rows - 1).to(tl.int64) * M
    largest_N = tl.full((TILE_N,), float("-inf"), tl.float32)
    total_N = tl.zeros((TILE_N,), tl.float32)
    end = tl.minimum((run + 1) * tiles_each, tl.cdiv(num_vocab, TILE_V))
    for tile in range(run * tiles_each, end):
        v_V = tile * TILE_V + tl.arange(0, TILE_V)
        weight_V = weight_ptr + tl.minimum(v_V, num_vocab - 1).to(tl.int64) * M
        logit_NV = tl.zeros((TILE_N, TILE_V), tl.float32)
        for first in range(0, M, TILE_M):
            if M % TILE_M == 0:
                hidden_NM = tl.load(hidden_N[:, None] + (first + m_M)[None, :])
                weight_VM = tl.load(weight_V[:, None] + (first + m_M)[None, :])
            else:
                is_used_M = first + m_M < M
                hidden_NM = tl.load(
                    hidden_N[:, None] + (first + m_M)[None, :], mask=is_used_M[None, :], other=0.0
                )
                weight_VM = tl.load(
                    weight_V[:, None] + (first + m_M)[None, :], mask=is_used_M[None, :], other=0.0
                )
            logit_NV = tl.dot(hidden_NM, tl.trans(weight_VM), logit_NV, input_precision="ieee")
        if HAS_SCALE:
            logit_NV *= scale
        if (tile + 1) * TILE_V > num_vocab:
            logit_NV = tl.where(v_V[None, :] < num_vocab, logit_NV, float("-inf"))
        largest_N, total_N = take_in_logits(logit_NV, largest_N, total_N)
    is_row_N = n_N < num_rows
    offset_N = run.to(tl.int64) * num_rows + n_N
    tl.store(largest_ptr + offset_N, largest_N, mask=is_row_N)
    tl.store(total_ptr + offset_N, total_N, mask=is_row_N)


@triton.jit
def join_runs_kernel(
    largest_ptr,
    total_ptr,
    out_ptr,
    num_rows,
    num_runs,
    S_PAD: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """out[n] = log of the sum over s of total[s, n] exp(largest[s, n])."""
    n_N = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    s_S = tl.arange(0, S_PAD)
    offset_SN = s_S[:, None].to(tl.int64) * num_rows + n_N[None, :]
    is_used_SN = (s_S[:, None] < num_runs) & (n_N[None, :] < num_rows)
    largest_SN = tl.load(largest_ptr + offset_SN, mask=is_used_SN, other=float("-inf"))
    total_SN = tl.load(total_ptr + offset_SN, mask=is_used_SN, other=0.0)
    peak_N = finite_or_zero(tl.max(largest_SN, axis=0))
    # a run's total is of exponents without its own peak: 0 where that is not finite
    own_peak_SN = tl.where(total_SN > 0.0, finite_or_zero(largest_SN), float("-inf"))
    weight_SN = tl.exp2((own_peak_SN - peak_N[None, :]) * LOG2_E)
    sum_N = tl.sum(total_SN * weight_SN, axis=0)
    tl.store(out_ptr + n_N, peak_N + tl.log(sum_N), mask=n_N < num_rows)
