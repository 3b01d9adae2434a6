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

from .attention_item_kernels import (
    beam_item,
    divided_item,
    find_item,
    first_level,
    segments,
    write_item,
)
from .attention_step_kernels import ROWS

CHUNK = gl.constexpr(16)  # rows that a loading warp copies at once: few, as it has few registers


@gluon.jit
def _copy_tiles(
    k_desc, v_desc, pages, length, g, begin_tile, end_tile, count,
    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    D: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PART: gl.constexpr, IS_LENT: gl.constexpr,
):  # fmt: skip
    """The key tiles of an item, the last first, into the stages of part PART; count: tiles before.

    IS_LENT: the last stages of keys and of values are used by others first, and free when these have given them back.
    """
    for i in range(0, end_tile - begin_tile):
        first = (end_tile - 1 - i) * KEYS
        place = first // PAGE_SIZE
        page = gl.load(pages + place)
        row = gl.minimum(first, length - KEYS) - place * PAGE_SIZE
        k_stage = (count + i) % K_STAGES
        v_stage = (count + i) % V_STAGES
        k_phase = ((count + i) // K_STAGES & 1) ^ 1
        v_phase = ((count + i) // V_STAGES & 1) ^ 1
        if IS_LENT:
            k_phase = gl.where(k_stage == K_STAGES - 1, k_phase ^ 1, k_phase)
            v_phase = gl.where(v_stage == V_STAGES - 1, v_phase ^ 1, v_phase)
        k_stage += PART * K_STAGES
        v_stage += PART * V_STAGES
        mbarrier.wait(k_empty.index(k_stage), k_phase)
        mbarrier.expect(k_full.index(k_stage), KEYS * D * 2)
        tma.async_copy_global_to_shared(
            k_desc, [page, row, g * D], k_full.index(k_stage), k_smem.index(k_stage)
        )
        mbarrier.wait(v_empty.index(v_stage), v_phase)
        mbarrier.expect(v_full.index(v_stage), KEYS * D * 2)
        tma.async_copy_global_to_shared(
            v_desc, [page, row, g * D], v_full.index(v_stage), v_smem.index(v_stage)
        )


@gluon.jit
def load_tiles(
    k_desc, v_desc, table_ptr, start_ptr, length_ptr, num_rows, num_histories, table_stride,
    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    SEGMENTS: gl.constexpr,
):  # fmt: skip
    """The warp that loads keys and values of a prefill: every tile of every item, in the order in which they are used."""
    gdc_wait()
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
            k_smem, v_smem, k_full, k_empty, v_full, v_empty, D, PAGE_SIZE, KEYS, K_STAGES, V_STAGES, 0, False,
        )  # fmt: skip
        count += end_tile


@gluon.jit
def load_beam_tiles(
    k_desc, v_desc, table_ptr, start_ptr, length_ptr, num_histories, num_splits, table_stride, is_settled,
    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    ITEM_ROWS: gl.constexpr, SEGMENTS: gl.constexpr, PART: gl.constexpr, KEY_GROUPS: gl.constexpr,
):  # fmt: skip
    """The same for the one item of a program of beams, or its part PART.

    The last stage of part 0 has the own tokens first. is_settled: the kernel in front writes nothing of what is read here, so
    that keys are on their way, or here, when it ends.
    """
    if is_settled == 0:
        gdc_wait()
    history, _f, _r, length, _q, g, _s, begin_tile, _m, end_tile = beam_item(
        start_ptr,
        length_ptr,
        num_histories,
        num_splits,
        X,
        G,
        KEYS,
        ITEM_ROWS,
        SEGMENTS,
        PART,
        KEY_GROUPS,
        1,
    )
    _copy_tiles(
        k_desc, v_desc, table_ptr + history.to(gl.int64) * table_stride, length, g, begin_tile, end_tile, 0,
        k_smem, v_smem, k_full, k_empty, v_full, v_empty, D, PAGE_SIZE, KEYS, K_STAGES, V_STAGES, PART, PART == 0,
    )  # fmt: skip


@gluon.jit
def load_divided_tiles(
    k_desc, v_desc, table_ptr, start_ptr, length_ptr, num_rows, num_histories, table_stride, is_settled,
    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    SEGMENTS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """The same for part PART of the one item of a program of a prefill: the kernel in front may write keys and values.

    is_settled: but not lengths and starts, from which the item follows before that one has ended.
    """
    if is_settled == 0:
        gdc_wait()
    history, _f, _r, length, _q, g, begin_tile, _m, end_tile = divided_item(
        start_ptr, length_ptr, num_rows, num_histories, X, G, KEYS, ROWS, SEGMENTS, PART, 1
    )
    gdc_wait()
    _copy_tiles(
        k_desc, v_desc, table_ptr + history.to(gl.int64) * table_stride, length, g, begin_tile, end_tile, 0,
        k_smem, v_smem, k_full, k_empty, v_full, v_empty, D, PAGE_SIZE, KEYS, K_STAGES, V_STAGES, PART, False,
    )  # fmt: skip


@gluon.jit
def own_slots(
    slot_ptr, first_row, rows, first_r, num_tokens,
    X: gl.constexpr, OWN: gl.constexpr, COPIES: gl.constexpr,
):  # fmt: skip
    """The slots of the own tokens of 64 query rows [64 // X * OWN], -1 where there is none."""
    key_K = gl.arange(0, ROWS // X * OWN, layout=gl.SliceLayout(1, COPIES))
    n_K = first_r // X + key_K // OWN
    is_key_K = (n_K < rows) & (key_K % OWN < num_tokens)
    return gl.load(slot_ptr + first_row + n_K, mask=is_key_K, other=-1)


@gluon.jit
def copy_own(
    own_s, own_ptr, slot_K, slot_stride, token_stride, g,
    X: gl.constexpr, D: gl.constexpr, OWN: gl.constexpr, COPIES: gl.constexpr,
):  # fmt: skip
    """Own keys or values in slots, from `own_slots`, into own_s [64 // X * OWN, D]; zeros where there are none."""
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, COPIES))
    token_K = gl.arange(0, ROWS // X * OWN, layout=gl.SliceLayout(1, COPIES)) % OWN
    offset_K = slot_K.to(gl.int64) * slot_stride + token_K * token_stride + g * D
    async_copy.async_copy_global_to_shared(
        own_s, own_ptr + offset_K[:, None] + d_D[None, :], mask=(slot_K >= 0)[:, None]
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
def wait_for_copies(OPEN: gl.constexpr):
    """Until at most OPEN groups of a warpgroup's own copies are on their way, and the tensor cores see the others."""
    async_copy.wait_group(OPEN)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def load_rows(
    q_ptr, start_ptr, length_ptr, num_rows, num_histories, q_smem, item_smem, row_bars,
    WHICH: gl.constexpr, G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, SEGMENTS: gl.constexpr,
):  # fmt: skip
    """The warp that loads a warpgroup's queries of a prefill, those of the next item as soon as there is room.

    row_bars: queries full, queries empty, of each warpgroup.
    """
    COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [1, 1], [1, 0])
    gdc_wait()
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
