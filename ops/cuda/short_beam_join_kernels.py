"""Joins beams' own tokens with the parts of their history's keys: few rows, one warp for each of their heads.

A beam has one to four own tokens. As a tile of keys they would be the first product of the attention kernel, and waited for; here
they are asked for together with the parts, and a few sums over a warp are done until those come. The kernel in front, which made
the parts, has itself waited for the one that wrote queries and own tokens.

The own tokens come first, then the parts in their order. A row's own values meet no other row's.

Letters: P (row, head) pairs, D head dim, G KV heads, X query heads of a KV head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .short_parts_kernels import LEAST, LOG2_E, add_parts, count_pairs, load_parts, wait_with


@gluon.jit
def _load_own(
    q_ptr, k_rows_ptr, v_rows_ptr, near_P, slot_P, num_tokens, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride,
    G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, OWN: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    """(queries [P, D], keys and values [P, D] of each of num_tokens <= OWN own tokens), volatile as `load_parts`.

    What is not there is read as the last token: behind it there may be anything.
    """
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, LINES))
    q_PD = gl.load(q_ptr + near_P[:, None] * D + d_D[None, :], volatile=True)
    slot_P = slot_P.to(gl.int64)
    g_P = near_P % (G * X) // X
    keys, values = (), ()
    for t in gl.static_range(OWN):
        token = gl.minimum(t, num_tokens - 1)
        k_at_P = slot_P * k_slot_stride + token * k_token_stride + g_P * D
        v_at_P = slot_P * v_slot_stride + token * v_token_stride + g_P * D
        key_PD = gl.load(k_rows_ptr + k_at_P[:, None] + d_D[None, :], volatile=True)
        value_PD = gl.load(v_rows_ptr + v_at_P[:, None] + d_D[None, :], volatile=True)
        keys += (key_PD,)  # type: ignore[assignment]  # they grow
        values += (value_PD,)  # type: ignore[assignment]
    return q_PD, keys, values


@gluon.jit
def _attend_own(
    q_PD, keys, values, num_tokens, scale_log2,
    D: gl.constexpr, OWN: gl.constexpr, PAIRS: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    """(largest, total, out) over the own tokens."""
    scores = ()
    largest_P = gl.full([PAIRS], LEAST, gl.float32, gl.SliceLayout(1, LINES))
    for t in gl.static_range(OWN):
        score_P = gl.sum(q_PD.to(gl.float32) * keys[t].to(gl.float32), 1) * scale_log2
        largest_P = gl.maximum(largest_P, score_P)
        scores += (score_P,)  # type: ignore[assignment]  # grows
    total_P = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, LINES))
    out_PD = gl.zeros([PAIRS, D], gl.float32, LINES)
    for t in gl.static_range(OWN):
        weight_P = gl.where(t < num_tokens, gl.exp2(scores[t] - largest_P), 0.0)
        total_P += weight_P
        out_PD += values[t].to(gl.float32) * weight_P[:, None]
    return largest_P, total_P, out_PD


@gluon.jit
def _join(
    part_ptr, lse_ptr, q_PD, keys, values, near_P, num_pairs, num_parts, num_tokens, scale_log2,
    D: gl.constexpr, PARTS: gl.constexpr, OWN: gl.constexpr, PAIRS: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    parts, lses = load_parts(part_ptr, lse_ptr, near_P, num_pairs, num_parts, D, PARTS, LINES)
    largest_P, total_P, out_PD = _attend_own(
        q_PD, keys, values, num_tokens, scale_log2, D, OWN, PAIRS, LINES
    )
    return add_parts(parts, lses, num_parts, largest_P, total_P, out_PD, PARTS)


@gluon.jit(do_not_specialize=["num_histories", "num_tokens", "scale", "is_settled"])
def join_short_beams_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    start_ptr,
    length_ptr,
    q_ptr,
    k_rows_ptr,
    v_rows_ptr,
    slot_ptr,
    num_histories,
    num_tokens,
    k_slot_stride,
    v_slot_stride,
    k_token_stride,
    v_token_stride,
    scale,
    is_settled,
    G: gl.constexpr,
    X: gl.constexpr,
    D: gl.constexpr,
    SEGMENTS: gl.constexpr,
    KEYS: gl.constexpr,
    PROGRAMS: gl.constexpr,
    MOST_PARTS: gl.constexpr,
    OWN: gl.constexpr,
):
    """out[p] of the own tokens of pair p's row, part[s, p] and lse[s, p] (base 2); rows of no history are left alone."""
    gdc_launch_dependents()
    PAIRS: gl.constexpr = gl.num_warps()
    LINES: gl.constexpr = gl.BlockedLayout([1, D // 32], [1, 32], [PAIRS, 1], [1, 0])
    if is_settled == 0:
        gdc_wait()
    num_pairs, num_parts = count_pairs(
        start_ptr, length_ptr, num_histories, G, X, SEGMENTS, KEYS, PROGRAMS, MOST_PARTS
    )
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, LINES))
    pair_P = gl.program_id(0) * PAIRS + gl.arange(0, PAIRS, layout=gl.SliceLayout(1, LINES))
    # all that depends on the lengths is in the branch, hence done before the kernel in front has ended
    if gl.program_id(0) * PAIRS < num_pairs:
        near_P = gl.minimum(pair_P, num_pairs - 1)
        slot_P = gl.load(slot_ptr + near_P // (G * X), cache_modifier=".cg")
        num_parts = wait_with(num_parts)
        slot_P = wait_with(slot_P)
        q_PD, keys, values = _load_own(
            q_ptr, k_rows_ptr, v_rows_ptr, near_P, slot_P, num_tokens, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride,
            G, X, D, OWN, LINES,
        )  # fmt: skip
        scale_log2 = scale * LOG2_E
        if num_parts <= MOST_PARTS // 4:
            out_PD = _join(
                part_ptr, lse_ptr, q_PD, keys, values, near_P, num_pairs, num_parts, num_tokens, scale_log2,
                D, MOST_PARTS // 4, OWN, PAIRS, LINES,
            )  # fmt: skip
        elif num_parts <= MOST_PARTS // 2:
            out_PD = _join(
                part_ptr, lse_ptr, q_PD, keys, values, near_P, num_pairs, num_parts, num_tokens, scale_log2,
                D, MOST_PARTS // 2, OWN, PAIRS, LINES,
            )  # fmt: skip
        else:
            out_PD = _join(
                part_ptr, lse_ptr, q_PD, keys, values, near_P, num_pairs, num_parts, num_tokens, scale_log2,
                D, MOST_PARTS, OWN, PAIRS, LINES,
            )  # fmt: skip
        gl.store(
            out_ptr + pair_P[:, None] * D + d_D[None, :],
            out_PD.to(out_ptr.dtype.element_ty),
            mask=(pair_P < num_pairs)[:, None],
        )
    else:
        gdc_wait()
