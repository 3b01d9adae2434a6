"""What the loading warps of the Hopper attention do, and copies that a computing warpgroup asks for itself."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.language.extra.cuda import gdc_wait

from .attention_item_kernels import beam_item, find_item, first_level, segments, write_item
from .attention_step_kernels import ROWS

CHUNK = gl.constexpr(16)  # rows that a loading warp copies at once: few, as it has few registers


@gluon.jit
def _copy_tiles(
    k_desc, v_desc, pages, length, g, begin_tile, end_tile, count,
    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    D: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The key tiles of an item, the last first; count: tiles before."""
    for i in range(0, end_tile - begin_tile):
        first = (end_tile - 1 - i) * KEYS
        place = first // PAGE_SIZE
        page = gl.load(pages + place)
        row = gl.minimum(first, length - KEYS) - place * PAGE_SIZE
        stage = (count + i) % STAGES
        phase = ((count + i) // STAGES & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), KEYS * D * 2)
        tma.async_copy_global_to_shared(
            k_desc, [page, row, g * D], k_full.index(stage), k_smem.index(stage)
        )
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), KEYS * D * 2)
        tma.async_copy_global_to_shared(
            v_desc, [page, row, g * D], v_full.index(stage), v_smem.index(stage)
        )


@gluon.jit
def load_tiles(
    k_desc, v_desc, table_ptr, start_ptr, length_ptr, num_rows, num_histories, table_stride,
    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    SEGMENTS: gl.constexpr,
):  # fmt: skip
    """The warp that loads keys and values of a prefill: every tile of every item, in the order in which they are used."""
    h_S, first_S, rows_S, length_S, tiles_S = segments(
        start_ptr, length_ptr, num_rows, num_histories, X, SEGMENTS, 1
    )
    num_items = gl.sum(tiles_S, 0) * G
    level = first_level(length_S, KEYS)
    count = 0
    for k in range(0, gl.cdiv(num_items, gl.num_programs(0))):
        level, history, _f, _r, length, _q, g, _m, end_tile = find_item(
            k, level, num_items, h_S, first_S, rows_S, length_S, tiles_S, X, G, KEYS
        )
        _copy_tiles(
            k_desc, v_desc, table_ptr + history.to(gl.int64) * table_stride, length, g, 0, end_tile, count,
            k_smem, v_smem, k_full, k_empty, v_full, v_empty, D, PAGE_SIZE, KEYS, STAGES,
        )  # fmt: skip
        count += end_tile


@gluon.jit
def load_beam_tiles(
    k_desc, v_desc, table_ptr, start_ptr, length_ptr, tiles_each, num_splits, table_stride,
    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    ITEM_ROWS: gl.constexpr,
):  # fmt: skip
    """The same for the one item of a program of beams; it may start before the kernel in front of it has ended."""
    gdc_wait()
    history, _f, _r, length, _q, g, _s, begin_tile, _m, end_tile = beam_item(
        start_ptr, length_ptr, tiles_each, num_splits, X, G, KEYS, ITEM_ROWS
    )
    _copy_tiles(
        k_desc, v_desc, table_ptr + history.to(gl.int64) * table_stride, length, g, begin_tile, end_tile, 0,
        k_smem, v_smem, k_full, k_empty, v_full, v_empty, D, PAGE_SIZE, KEYS, STAGES,
    )  # fmt: skip


@gluon.jit
def copy_own(
    own_s, own_ptr, slot_ptr, slot_stride, token_stride, first_row, rows, first_r, g, num_tokens,
    X: gl.constexpr, D: gl.constexpr, OWN: gl.constexpr, COPIES: gl.constexpr,
):  # fmt: skip
    """Own keys or values of the beams of 64 query rows into own_s [64 // X * OWN, D]; zeros where there are none."""
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, COPIES))
    key_K = gl.arange(0, ROWS // X * OWN, layout=gl.SliceLayout(1, COPIES))
    n_K = first_r // X + key_K // OWN
    token_K = key_K % OWN
    is_key_K = (n_K < rows) & (token_K < num_tokens)
    slot_K = gl.load(slot_ptr + first_row + n_K, mask=is_key_K, other=0).to(gl.int64)
    offset_K = slot_K * slot_stride + token_K * token_stride + g * D
    async_copy.async_copy_global_to_shared(
        own_s, own_ptr + offset_K[:, None] + d_D[None, :], mask=is_key_K[:, None]
    )


@gluon.jit
def copy_queries(
    q_s, q_ptr, first_row, rows, first_r, g,
    G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, CHUNK: gl.constexpr, COPIES: gl.constexpr,
):  # fmt: skip
    """The 64 query rows from first_r on into q_s [64, D]."""
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, COPIES))
    for c in gl.static_range(ROWS // CHUNK):
        r_C = first_r + c * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, COPIES))
        pair_C = (first_row + r_C // X).to(gl.int64) * (G * X) + g * X + r_C % X
        async_copy.async_copy_global_to_shared(
            q_s.slice(c * CHUNK, CHUNK),
            q_ptr + pair_C[:, None] * D + d_D[None, :],
            mask=(r_C < rows * X)[:, None],
        )


@gluon.jit
def load_rows(
    q_ptr, start_ptr, length_ptr, num_rows, num_histories, q_smem, item_smem, row_bars,
    WHICH: gl.constexpr, G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, SEGMENTS: gl.constexpr,
):  # fmt: skip
    """The warp that loads a warpgroup's queries of a prefill, those of the next item as soon as there is room.

    row_bars: queries full, queries empty, of each warpgroup.
    """
    COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [1, 1], [1, 0])
    h_S, first_S, rows_S, length_S, tiles_S = segments(
        start_ptr, length_ptr, num_rows, num_histories, X, SEGMENTS, 1
    )
    num_items = gl.sum(tiles_S, 0) * G
    level = first_level(length_S, KEYS)
    q_s = q_smem.index(WHICH)
    for k in range(0, gl.cdiv(num_items, gl.num_programs(0))):
        level, _h, first_row, rows, length, first_r, g, masked_tile, end_tile = find_item(
            k, level, num_items, h_S, first_S, rows_S, length_S, tiles_S, X, G, KEYS
        )
        first_r += WHICH * ROWS
        mbarrier.wait(row_bars.index(WHICH * 2 + 1), (k & 1) ^ 1)
        write_item(
            item_smem.index(WHICH), first_row, rows, length, first_r, g, masked_tile, end_tile
        )
        copy_queries(q_s, q_ptr, first_row, rows, first_r, g, G, X, D, CHUNK, COPIES)
        # full when the copies are done and the tensor cores can see them
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.arrive(row_bars.index(WHICH * 2), count=1)
