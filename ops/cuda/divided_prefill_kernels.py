"""Attention of a small prefill over paged histories for NVIDIA's Hopper generation: two warpgroups divide the keys of 64 rows.

The attention of `prefill_attention_kernels`, cut for prefills of a few items a core, as one history of 1,000 tokens is. There the
item with most keys decides, and what comes before its first product. So an item has half as many rows, and each of a program's two
warpgroups has one part of its keys, with half as many tiles one after another; what they find is joined on the chip, as beams'
attention does. A program has one item, the first programs those with most keys; the others follow as cores get free.

The kernel starts before the one in front of it has ended: its barriers, and in a captured graph which item it has, are there when
that one's queries, keys and values are.

Letters: R query rows of a warpgroup, K keys, D head dim, G KV heads, X query heads of a KV head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_item_kernels import divided_item
from .attention_load_kernels import copy_queries, load_divided_tiles, wait_for_copies
from .attention_parts_kernels import give_part, place_of_parts, take_part
from .attention_step_kernels import LEAST, LOG2_E, ROWS, attend_tiles, store_results

PART_REGISTERS = gl.constexpr(
    168
)  # a thread of the second part's warpgroup; the first gets what is left


@gluon.jit
def _attend(
    q_s, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rows, length, first_r, begin_tile, masked_tile, end_tile, scale_log2,
    X: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, PART: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """(sum, largest, total) over the keys of part PART."""
    rows_of_sums: gl.constexpr = gl.SliceLayout(1, SUMS)
    largest_R = gl.full([ROWS], LEAST, gl.float32, rows_of_sums)
    total_R = gl.zeros([ROWS], gl.float32, rows_of_sums)
    sum_RD = gl.zeros([ROWS, D], gl.float32, SUMS)
    if end_tile > begin_tile:
        weight_op, sum_RD, largest_R, total_R = attend_tiles(
            q_s, k_empty.index(0), k_smem, v_smem, k_full, k_empty, v_full, v_empty, 0, rows, length, first_r,
            begin_tile, masked_tile, end_tile, scale_log2, sum_RD, largest_R, total_R,
            X, D, KEYS, K_STAGES, V_STAGES, PART, True, False, SUMS,
        )  # fmt: skip
        last = PART * V_STAGES + (end_tile - begin_tile - 1) % V_STAGES
        sum_RD = warpgroup_mma(weight_op, v_smem.index(last).reshape([KEYS, D]), sum_RD)
    return sum_RD, largest_R, total_R


@gluon.jit
def _compute(
    q_ptr, out_ptr, start_ptr, length_ptr, num_rows, num_histories, scale, is_settled,
    q_smem, k_smem, v_smem, numbers_smem, k_full, k_empty, v_full, v_empty, is_given,
    PART: gl.constexpr, G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    SEGMENTS: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: part PART of the keys of the program's rows, if there are any."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    if is_settled == 0:
        gdc_wait()
    _h, first_row, rows, length, first_r, g, begin_tile, masked_tile, end_tile = divided_item(
        start_ptr, length_ptr, num_rows, num_histories, X, G, KEYS, ROWS, SEGMENTS, PART, 4
    )
    gdc_wait()
    gdc_launch_dependents()  # the next kernel waits for the results itself: it may take a core as soon as one is free
    if rows > 0:
        q_s = q_smem.index(PART)
        copy_queries(q_s, q_ptr, first_row, rows, first_r, g, G, X, D, ROWS, COPIES)
        async_copy.commit_group()
        wait_for_copies(0)
        sum_RD, largest_R, total_R = _attend(
            q_s, k_smem, v_smem, k_full, k_empty, v_full, v_empty, rows, length, first_r, begin_tile, masked_tile, end_tile,
            scale * LOG2_E, X, D, KEYS, K_STAGES, V_STAGES, PART, SUMS,
        )  # fmt: skip
        place_s = place_of_parts(k_smem, KEYS, K_STAGES, ROWS, D)
        if PART == 1:
            give_part(place_s, numbers_smem, is_given, sum_RD, largest_R, total_R)
        else:
            sum_RD, largest_R, total_R = take_part(
                place_s, numbers_smem, is_given, sum_RD, largest_R, total_R, SUMS
            )
            store_results(
                out_ptr, out_ptr, q_s, sum_RD, largest_R, total_R, first_row, rows, num_rows, first_r, g, 0,
                G, X, D, False, SUMS,
            )  # fmt: skip


# A kernel for all batches: what differs between them is no constant of the compiler.
@gluon.jit(do_not_specialize=["num_rows", "num_histories", "table_stride", "scale", "is_settled"])
def divided_prefill_kernel(
    k_desc,
    v_desc,
    q_ptr,
    table_ptr,
    start_ptr,
    length_ptr,
    out_ptr,
    num_rows,
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
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """out[n], 0 in rows of no history; SEGMENTS: a power of two above the number of histories. A program is (tile of rows, KV head).

    K_STAGES, V_STAGES: of each part. is_settled: whether starts and lengths are there before the kernel in front has ended.
    """
    dtype: gl.constexpr = k_desc.dtype
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    numbers_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, D], rows_layout)
    k_smem = gl.allocate_shared_memory(dtype, [2 * K_STAGES, 1, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [2 * V_STAGES, 1, KEYS, D], v_desc.layout)
    numbers_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS], numbers_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [2 * K_STAGES, 1], bar_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [2 * K_STAGES, 1], bar_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [2 * V_STAGES, 1], bar_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [2 * V_STAGES, 1], bar_layout)
    is_given = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    for s in gl.static_range(2 * K_STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=1)
    for s in gl.static_range(2 * V_STAGES):
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=1)
    mbarrier.init(is_given, count=1)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_compute, (
                q_ptr, out_ptr, start_ptr, length_ptr, num_rows, num_histories, scale, is_settled,
                q_smem, k_smem, v_smem, numbers_smem, k_full, k_empty, v_full, v_empty, is_given,
                0, G, X, D, KEYS, K_STAGES, V_STAGES, SEGMENTS,
            )),
            (_compute, (
                q_ptr, out_ptr, start_ptr, length_ptr, num_rows, num_histories, scale, is_settled,
                q_smem, k_smem, v_smem, numbers_smem, k_full, k_empty, v_full, v_empty, is_given,
                1, G, X, D, KEYS, K_STAGES, V_STAGES, SEGMENTS,
            )),
            (load_divided_tiles, (
                k_desc, v_desc, table_ptr, start_ptr, length_ptr, num_rows, num_histories, table_stride, is_settled,
                k_smem, v_smem, k_full, k_empty, v_full, v_empty, G, X, D, PAGE_SIZE, KEYS, K_STAGES, V_STAGES, SEGMENTS, 0,
            )),
            (load_divided_tiles, (
                k_desc, v_desc, table_ptr, start_ptr, length_ptr, num_rows, num_histories, table_stride, is_settled,
                k_smem, v_smem, k_full, k_empty, v_full, v_empty, G, X, D, PAGE_SIZE, KEYS, K_STAGES, V_STAGES, SEGMENTS, 1,
            )),
        ],
        [4, 1, 1],
        [PART_REGISTERS, 40, 40],
    )  # fmt: skip
