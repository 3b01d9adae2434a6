"""A prefill's attention over paged histories for NVIDIA's Hopper generation: loading warps, and two warpgroups that compute.

The same attention as ops/triton's history_attention_kernels, cut for a chip whose tensor cores take their operands from
shared memory and work while the threads that started them go on. Written in Gluon, as it needs what Triton's own
language leaves to the compiler: which warp does what, and what waits for what.

A program is one core's (persistent) and takes items from a list that follows from the lengths in device memory: an item
is 128 query rows (tokens times the X query heads of a KV head) of one history and one KV head. One warp copies key tiles
with the copy engine, as far ahead as there is room, over the border of items too. Two warps, one for each warpgroup, copy
the queries of the next item as soon as there is room. Each warpgroup has 64 of the rows and takes every tile:

    scores of tile j + 1 start | weighted values of tile j start | softmax of j + 1 while the latter still run

so the tensor cores have work while the exponentials are computed, and the two warpgroups drift apart by themselves.

Keys go last tile first, so that all masks (the end of a history, the diagonal of a prefill) are in the first tiles.
Slots behind a history's end may hold NaN, which no mask keeps out of a product: the last tile is read from further ahead
so that it ends where the history does; what would lie before its page the copy engine fills with zeros.

The kernel may start before the one in front of it has ended: its barriers are there then, and nothing is read before.

Every buffer has a barrier that says it is full and one that says it is empty; both count phases, and whoever waits knows
from the number of tiles or items before which phase he waits for.

Letters: R query rows of a warpgroup, K keys, S histories (padded), D head dim, G KV heads, X query heads of a KV head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_item_kernels import NUMBERS, read_item, segments
from .attention_load_kernels import load_rows, load_tiles
from .attention_step_kernels import (
    LEAST,
    LOG2_E,
    ROWS,
    attend_tiles,
    last_values,
    store_results,
)


@gluon.jit
def _compute(
    out_ptr, start_ptr, length_ptr, num_rows, num_histories, scale,
    q_smem, place_smem, item_smem, row_bars, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    WHICH: gl.constexpr, G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    SEGMENTS: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: rows WHICH * 64 .. of every item. row_bars: as in `load_rows`."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows_of_sums: gl.constexpr = gl.SliceLayout(1, SUMS)
    gdc_wait()
    _h, _f, _r, _l, tiles_S = segments(
        start_ptr, length_ptr, num_rows, num_histories, X, SEGMENTS, 4
    )
    num_items = gl.sum(tiles_S, 0) * G
    scale_log2 = scale * LOG2_E
    q_s = q_smem.index(WHICH)
    q_empty = row_bars.index(WHICH * 2 + 1)
    count = 0
    for k in range(0, gl.cdiv(num_items, gl.num_programs(0))):
        mbarrier.wait(row_bars.index(WHICH * 2), k & 1)
        first_row, rows, length, first_r, g, masked_tile, end_tile = read_item(
            item_smem.index(WHICH)
        )
        largest_R = gl.full([ROWS], LEAST, gl.float32, rows_of_sums)
        total_R = gl.zeros([ROWS], gl.float32, rows_of_sums)
        sum_RD = gl.zeros([ROWS, D], gl.float32, SUMS)
        if end_tile > 0:
            weight_op, sum_RD, largest_R, total_R = attend_tiles(
                q_s, q_empty, k_smem, v_smem, k_full, k_empty, v_full, v_empty, count, rows, length, first_r,
                0, masked_tile, end_tile, scale_log2, sum_RD, largest_R, total_R, X, D, KEYS, K_STAGES, V_STAGES, 0, True, True, SUMS,
            )  # fmt: skip
            count += end_tile
            last = (count - 1) % V_STAGES
            v_s = v_smem.index(last).reshape([KEYS, D])
            sum_RD = last_values(v_s, v_empty.index(last), weight_op, sum_RD)
        else:
            mbarrier.arrive(q_empty, count=1)
        gdc_launch_dependents()  # a kernel that starts early waits for the results itself
        store_results(
            out_ptr, out_ptr, place_smem.index(WHICH), sum_RD, largest_R, total_R, first_row, rows, num_rows, first_r, g, 0,
            G, X, D, False, SUMS,
        )  # fmt: skip


# A kernel for all batches: what differs between them is no constant of the compiler.
@gluon.jit(do_not_specialize=["num_rows", "num_histories", "table_stride", "scale"])
def prefill_attention_kernel(
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
    G: gl.constexpr,
    X: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SEGMENTS: gl.constexpr,
    KEYS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """out[n], 0 in rows of no history; SEGMENTS: a power of two above the number of histories."""
    dtype: gl.constexpr = k_desc.dtype
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, D], rows_layout)
    place_smem = gl.allocate_shared_memory(dtype, [2, ROWS, D], rows_layout)
    k_smem = gl.allocate_shared_memory(dtype, [K_STAGES, 1, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [V_STAGES, 1, KEYS, D], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [K_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], mbarrier.MBarrierLayout())
    item_smem = gl.allocate_shared_memory(
        gl.int32, [2, NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    row_bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(K_STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2)
    for s in gl.static_range(V_STAGES):
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2)
    for s in gl.static_range(4):
        mbarrier.init(row_bars.index(s), count=1)
    fence_async_shared()

    gl.warp_specialize(
        [
            (_compute, (
                out_ptr, start_ptr, length_ptr, num_rows, num_histories, scale,
                q_smem, place_smem, item_smem, row_bars, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                0, G, X, D, KEYS, K_STAGES, V_STAGES, SEGMENTS,
            )),
            (_compute, (
                out_ptr, start_ptr, length_ptr, num_rows, num_histories, scale,
                q_smem, place_smem, item_smem, row_bars, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                1, G, X, D, KEYS, K_STAGES, V_STAGES, SEGMENTS,
            )),
            (load_tiles, (
                k_desc, v_desc, table_ptr, start_ptr, length_ptr, num_rows, num_histories, table_stride,
                k_smem, v_smem, k_full, k_empty, v_full, v_empty, G, X, D, PAGE_SIZE, KEYS, K_STAGES, V_STAGES, SEGMENTS,
            )),
            (load_rows, (
                q_ptr, start_ptr, length_ptr, num_rows, num_histories, q_smem, item_smem, row_bars,
                0, G, X, D, KEYS, SEGMENTS,
            )),
            (load_rows, (
                q_ptr, start_ptr, length_ptr, num_rows, num_histories, q_smem, item_smem, row_bars,
                1, G, X, D, KEYS, SEGMENTS,
            )),
        ],
        [4, 1, 1, 1],
        [232, 40, 40, 40],
    )  # fmt: skip
