"""Attention of few rows over long histories, a prefill's new tokens or beams, for NVIDIA's Hopper generation.

Such a call has one or a few tiles of 64 query rows (tokens times the X query heads of a KV head) and so few programs that most
of the chip would idle while a program reads one key tile after the other. Here a program is (tile of rows, KV head, part of the
keys), and the number of parts follows from the lengths on the device: a captured graph has the grid of its bucket's most rows,
and where a batch has fewer the programs left over take keys. A part has every num_parts-th key tile, so that a program knows
its first ones early, and all parts have the same work.

What is measured in such a call is the chain of waits: lengths, page table, keys, products. There is one warpgroup and no warp of
its own for loading: a program asks for as many key tiles as there is room for before it does anything else. In a captured graph
that starts before the kernel in front has ended: lengths, tables and the cached tokens' keys and values were written by earlier
batches; the queries and the new tokens' keys and values are what that kernel writes, and are waited for. All that comes by the
copy engine, and how many bytes the barriers have to expect is told before: behind the wait there are copies, and nothing else
that takes time. So a tile of queries may have rows of other histories, or of none: they are no row's that is stored.

Keys behind a history's end may hold NaN: the last tile is read from further ahead so that it ends where the history does; what
would lie before its page the copy engine fills with zeros, and the mask keeps what belongs to other tiles out.

The parts' results (fp32) and their log-sum-exps are joined in the order of the parts by a second kernel. Where a prefill has one
part only, this one writes the result itself. Rows of no history are the second kernel's.

A row of a prefill sees the keys up to its own token, the last rows' of its history; a beam sees them all, and its own tokens in
the second kernel.

Letters: R query rows of a tile, K keys, S histories (padded), D head dim, G KV heads, X query heads of a KV head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_item_kernels import add
from .short_parts_kernels import LEAST, LOG2_E, ROWS, count_parts


@gluon.jit
def _find_item(
    start_ptr, length_ptr, num_histories,
    G: gl.constexpr, X: gl.constexpr, KEYS: gl.constexpr, SEGMENTS: gl.constexpr, PROGRAMS: gl.constexpr,
    MOST_PARTS: gl.constexpr,
):  # fmt: skip
    """The program's (history, first packed row, packed rows, length, first query row, KV head, part, parts, rows of all).

    A program that has no item has 0 packed rows and length 0.
    """
    layout: gl.constexpr = gl.BlockedLayout([SEGMENTS // 32], [32], [4], [0])
    h_S = gl.arange(0, SEGMENTS, layout=layout)
    is_one_S = h_S < num_histories
    # past the first-level cache: what lies there may be of the batch before
    first_S = gl.load(start_ptr + h_S, mask=is_one_S, other=0, cache_modifier=".cg")
    end_S = gl.load(start_ptr + h_S + 1, mask=is_one_S, other=0, cache_modifier=".cg")
    length_S = gl.load(length_ptr + h_S, mask=is_one_S, other=0, cache_modifier=".cg")
    rows_S = end_S - first_S
    tiles_S = (rows_S * X + ROWS - 1) // ROWS
    tiles_end_S = gl.associative_scan(tiles_S, 0, add)
    num_tiles = gl.sum(tiles_S, 0)
    num_parts = count_parts(num_tiles, gl.max(length_S, 0), G, KEYS, PROGRAMS, MOST_PARTS)
    program = gl.program_id(0)
    g = program % G
    part = program // G % num_parts
    tile = program // (G * num_parts)
    history = gl.sum((tiles_end_S <= tile).to(gl.int32), 0)
    is_it_S = h_S == history
    first_row = gl.sum(gl.where(is_it_S, first_S, 0), 0)
    rows = gl.sum(gl.where(is_it_S, rows_S, 0), 0)
    length = gl.sum(gl.where(is_it_S, length_S, 0), 0)
    tile -= gl.sum(gl.where(is_it_S, tiles_end_S - tiles_S, 0), 0)
    total_rows = gl.sum(rows_S, 0)
    return history, first_row, rows, length, tile * ROWS, g, part, num_parts, total_rows


@gluon.jit
def _page(pages, tile, end_tile, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr):
    """The page of a key tile. It is asked for well before the tile is: the warps need not wait for it."""
    return gl.load(
        pages + tile * KEYS // PAGE_SIZE, mask=tile < end_tile, other=0, cache_modifier=".cg"
    )


@gluon.jit
def _expect_tile(k_full, v_full, is_wanted, D: gl.constexpr, KEYS: gl.constexpr):
    mbarrier.expect(k_full, KEYS * D * 2, pred=is_wanted)
    mbarrier.expect(v_full, KEYS * D * 2, pred=is_wanted)


@gluon.jit
def _load_tile(
    k_desc, v_desc, page, tile, length, g, k_s, v_s, k_full, v_full, is_wanted,
    D: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    first = tile * KEYS
    row = gl.minimum(first, length - KEYS) - first // PAGE_SIZE * PAGE_SIZE
    tma.async_copy_global_to_shared(k_desc, [page, row, g * D], k_full, k_s, pred=is_wanted)
    tma.async_copy_global_to_shared(v_desc, [page, row, g * D], v_full, v_s, pred=is_wanted)


@gluon.jit
def _load_first(
    k_desc, v_desc, pages, part, num_parts, length, g, k_smem, v_smem, k_full, v_full, i_start, i_end,
    STAGES: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """Of the first STAGES key tiles of the part those from i_start up to i_end."""
    for i in gl.static_range(STAGES):
        _load_tile(
            k_desc, v_desc, pages[i], part + i * num_parts, length, g, k_smem.index(i), v_smem.index(i),
            k_full.index(i), v_full.index(i), (i >= i_start) & (i < i_end), D, PAGE_SIZE, KEYS,
        )  # fmt: skip


@gluon.jit
def _attend(
    q_s, k_s, v_s, k_full, v_full, phase, tile, length, least, visible_R, scale_log2, largest_R, total_R, sum_RD,
    D: gl.constexpr, KEYS: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Take in a key tile; those whose keys are not all before `least`, which every row sees, need a mask."""
    mbarrier.wait(k_full, phase)
    zero_RK = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    score_RK = warpgroup_mma(q_s, k_s.reshape([KEYS, D]).permute((1, 0)), zero_RK, use_acc=False)
    first = tile * KEYS
    if first + KEYS > least:
        base = gl.minimum(first, length - KEYS)
        key_K = base + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        is_seen_RK = (key_K[None, :] >= first) & (key_K[None, :] < visible_R[:, None])
        score_RK = gl.where(is_seen_RK, score_RK, float("-inf"))
    new_largest_R = gl.maximum(largest_R, gl.max(score_RK, 1) * scale_log2)
    weight_RK = gl.exp2(score_RK * scale_log2 - new_largest_R[:, None])
    decay_R = gl.exp2(largest_R - new_largest_R)
    total_R = total_R * decay_R + gl.sum(weight_RK, 1)
    sum_RD = sum_RD * gl.convert_layout(decay_R, gl.SliceLayout(1, SUMS))[:, None]
    weight_op = gl.convert_layout(weight_RK.to(q_s.dtype), WEIGHTS)
    mbarrier.wait(v_full, phase)
    sum_RD = warpgroup_mma(weight_op, v_s.reshape([KEYS, D]), sum_RD)
    return new_largest_R, total_R, sum_RD


@gluon.jit
def _store_lines(
    out_ptr, place_s, out_RD, first_row, rows, first_r, g,
    G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    """The result in whole lines by way of place_s [64, D]."""
    gl.thread_barrier()  # other warps may still read what was there
    place_s.store(out_RD.to(place_s.dtype))
    gl.thread_barrier()
    r_R = first_r + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES))
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, LINES))
    pair_R = (first_row + r_R // X).to(gl.int64) * (G * X) + g * X + r_R % X
    gl.store(
        out_ptr + pair_R[:, None] * D + d_D[None, :],
        place_s.load(LINES),
        mask=(r_R < rows * X)[:, None],
    )


@gluon.jit
def _store_part(
    part_ptr, lse_ptr, out_RD, lse_R, first_row, rows, first_r, g, part, total_rows,
    G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """A part's fp32 results and their log-sum-exps to the base 2."""
    r_R = first_r + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
    is_row_R = r_R < rows * X
    row_R = (part * total_rows + first_row + r_R // X).to(gl.int64)
    pair_R = row_R * (G * X) + g * X + r_R % X
    gl.store(part_ptr + pair_R[:, None] * D + d_D[None, :], out_RD, mask=is_row_R[:, None])
    gl.store(lse_ptr + pair_R, lse_R, mask=is_row_R)


@gluon.jit
def _store_results(
    out_ptr, part_ptr, lse_ptr, place_s, out_RD, lse_R, first_row, rows, first_r, g, part, num_parts, total_rows,
    G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, SUMS: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    """A part's, or the result itself: beams always have their own tokens to join."""
    is_part = True
    if CAUSAL:
        is_part = num_parts > 1
        if num_parts == 1:
            _store_lines(out_ptr, place_s, out_RD, first_row, rows, first_r, g, G, X, D, LINES)
    if is_part:
        _store_part(
            part_ptr, lse_ptr, out_RD, lse_R, first_row, rows, first_r, g, part, total_rows, G, X, D, SUMS
        )  # fmt: skip


# A kernel for all batches: what differs between them is no constant of the compiler.
@gluon.jit(do_not_specialize=["num_histories", "table_stride", "scale", "is_settled"])
def short_attention_kernel(
    q_desc,
    k_desc,
    v_desc,
    table_ptr,
    start_ptr,
    length_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    num_histories,
    table_stride,
    scale,
    is_settled,
    G: gl.constexpr,
    X: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SEGMENTS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
    MOST_PARTS: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """part[p * rows + n] and lse of it for all rows of histories; CAUSAL, where there is one part: out[n].

    is_settled: whether the kernel in front writes nothing but queries and new tokens' keys and values. SEGMENTS: a power of two
    above the number of histories. PROGRAMS: how many parts are made for.
    """
    gdc_launch_dependents()
    dtype: gl.constexpr = k_desc.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [ROWS // X, X, D], q_desc.layout)
    q_s = q_smem.reshape([ROWS, D])
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, D], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    mbarrier.init(q_full, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if is_settled == 0:
        gdc_wait()
    history, first_row, rows, length, first_r, g, part, num_parts, total_rows = _find_item(
        start_ptr, length_ptr, num_histories, G, X, KEYS, SEGMENTS, PROGRAMS, MOST_PARTS
    )
    pages = table_ptr + history.to(gl.int64) * table_stride
    before = length - rows if CAUSAL else length
    end = gl.maximum(gl.minimum(length, before + (first_r + ROWS) // X), 0)
    least = gl.minimum(before + first_r // X + 1, length)
    # key tiles part, part + num_parts, ..: how many of them, how many without new tokens
    reach = num_parts - 1 - part
    end_tile = (end + KEYS - 1) // KEYS
    num_tiles = (end_tile + reach) // num_parts
    num_old = num_tiles
    if CAUSAL:
        num_old = gl.minimum(num_tiles, (gl.maximum(before, 0) // KEYS + reach) // num_parts)
    first_pages = ()
    for i in gl.static_range(STAGES):
        page = _page(pages, part + i * num_parts, end_tile, PAGE_SIZE, KEYS)
        first_pages += (page,)  # type: ignore[assignment]  # grows
    next_page = _page(pages, part + STAGES * num_parts, end_tile, PAGE_SIZE, KEYS)
    is_item = first_r < rows * X
    mbarrier.expect(q_full, ROWS * D * 2, pred=is_item)
    for i in gl.static_range(STAGES):
        _expect_tile(k_full.index(i), v_full.index(i), i < num_tiles, D, KEYS)
    _load_first(
        k_desc, v_desc, first_pages, part, num_parts, length, g, k_smem, v_smem, k_full, v_full, 0, num_old,
        STAGES, D, PAGE_SIZE, KEYS,
    )  # fmt: skip
    gdc_wait()
    tma.async_copy_global_to_shared(
        q_desc, [first_row + first_r // X, g * X, 0], q_full, q_smem, pred=is_item
    )
    if CAUSAL:
        _load_first(
            k_desc, v_desc, first_pages, part, num_parts, length, g, k_smem, v_smem, k_full, v_full, num_old, num_tiles,
            STAGES, D, PAGE_SIZE, KEYS,
        )  # fmt: skip
    scale_log2 = scale * LOG2_E
    r_R = first_r + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    visible_R = gl.minimum(before + r_R // X + 1, length)
    largest_R = gl.full([ROWS], LEAST, gl.float32, gl.SliceLayout(1, SCORES))
    total_R = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    sum_RD = gl.zeros([ROWS, D], gl.float32, SUMS)
    mbarrier.wait(q_full, 0, pred=is_item)
    for i in range(0, num_tiles):
        stage = i % STAGES
        largest_R, total_R, sum_RD = _attend(
            q_s, k_smem.index(stage), v_smem.index(stage), k_full.index(stage), v_full.index(stage), i // STAGES & 1,
            part + i * num_parts, length, least, visible_R, scale_log2, largest_R, total_R, sum_RD,
            D, KEYS, SCORES, SUMS, WEIGHTS,
        )  # fmt: skip
        if i + STAGES < num_tiles:
            gl.thread_barrier()  # all warps have read the tile
            _expect_tile(k_full.index(stage), v_full.index(stage), True, D, KEYS)
            _load_tile(
                k_desc, v_desc, next_page, part + (i + STAGES) * num_parts, length, g, k_smem.index(stage), v_smem.index(stage),
                k_full.index(stage), v_full.index(stage), True, D, PAGE_SIZE, KEYS,
            )  # fmt: skip
            next_page = _page(pages, part + (i + STAGES + 1) * num_parts, end_tile, PAGE_SIZE, KEYS)
    largest_R = gl.convert_layout(largest_R, gl.SliceLayout(1, SUMS))
    total_R = gl.convert_layout(total_R, gl.SliceLayout(1, SUMS))
    out_RD = sum_RD * (1.0 / gl.where(total_R == 0.0, 1.0, total_R))[:, None]
    _store_results(
        out_ptr, part_ptr, lse_ptr, q_s, out_RD, largest_R + gl.log2(total_R), first_row, rows, first_r, g, part, num_parts,
        total_rows, G, X, D, CAUSAL, SUMS, LINES,
    )  # fmt: skip
