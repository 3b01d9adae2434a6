"""Attention of beams over paged histories and their own tokens for NVIDIA's Hopper generation.

The attention of `warpgroup_attention_kernels`, cut for the time until the first product: a program has one item. Nothing is searched
for: each history has the same number of tiles of rows, those of a narrower one have nothing to do in the end. A program has one or
two warpgroups that compute, and 64 or 128 rows: fewer where the cores suffice, as a tile of keys takes half the time then. One warp
asks for the key tiles at once; each computing warpgroup asks for its queries and own tokens itself, all at once, and takes them as
they come. The kernel starts before the one in front of it has ended: its barriers are there when that one's results are.

The own tokens are a tile of keys as well, those of 64 rows side by side, in which each row sees its beam's. It comes first. A value
there that is not finite would reach other beams' rows through the product; only the rows that own it become NaN.

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
from triton.language.extra.cuda import gdc_wait

from .attention_item_kernels import beam_item
from .attention_load_kernels import copy_own, copy_queries, load_beam_tiles
from .attention_step_kernels import (
    LEAST,
    LOG2_E,
    ROWS,
    attend_tiles,
    keep_to_owners,
    own_weights,
    store_results,
)


@gluon.jit
def _wait_for_copies(OPEN: gl.constexpr):
    """Until at most OPEN groups of copies are on their way, and the tensor cores see the others."""
    async_copy.wait_group(OPEN)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _compute(
    q_ptr, out_ptr, lse_ptr, start_ptr, length_ptr, num_rows, tiles_each, num_splits, scale,
    k_rows_ptr, v_rows_ptr, slot_ptr, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride, num_tokens,
    q_smem, own_k_smem, own_v_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    WHICH: gl.constexpr, G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    IS_SPLIT: gl.constexpr, OWN: gl.constexpr, ITEM_ROWS: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: rows WHICH * 64 .. of the item."""
    gdc_wait()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows_of_sums: gl.constexpr = gl.SliceLayout(1, SUMS)
    _h, first_row, rows, length, first_r, g, split, begin_tile, masked_tile, end_tile = beam_item(
        start_ptr, length_ptr, tiles_each, num_splits, X, G, KEYS, ITEM_ROWS
    )
    first_r += WHICH * ROWS
    scale_log2 = scale * LOG2_E
    q_s = q_smem.index(WHICH)
    place_s = own_v_smem.index(WHICH)
    copy_queries(q_s, q_ptr, first_row, rows, first_r, g, G, X, D, ROWS, COPIES)
    async_copy.commit_group()
    largest_R = gl.full([ROWS], LEAST, gl.float32, rows_of_sums)
    total_R = gl.zeros([ROWS], gl.float32, rows_of_sums)
    sum_RD = gl.zeros([ROWS, D], gl.float32, SUMS)
    if split == 0:
        own_k_s = own_k_smem.index(WHICH)
        own_v_s = place_s.slice(0, ROWS // X * OWN)
        copy_own(
            own_k_s, k_rows_ptr, slot_ptr, k_slot_stride, k_token_stride,
            first_row, rows, first_r, g, num_tokens, X, D, OWN, COPIES,
        )  # fmt: skip
        async_copy.commit_group()
        copy_own(
            own_v_s, v_rows_ptr, slot_ptr, v_slot_stride, v_token_stride,
            first_row, rows, first_r, g, num_tokens, X, D, OWN, COPIES,
        )  # fmt: skip
        async_copy.commit_group()
        _wait_for_copies(1)
        weight_op, largest_R, total_R = own_weights(
            q_s, own_k_s, num_tokens, scale_log2, X, OWN, SUMS
        )
        _wait_for_copies(0)
        total_R = keep_to_owners(own_v_s, num_tokens, total_R, X, D, OWN, COPIES, SUMS)
        fence_async_shared()
        gl.thread_barrier()
        sum_RD = warpgroup_mma(weight_op, own_v_s, sum_RD, use_acc=False)
    _wait_for_copies(0)
    if end_tile > begin_tile:
        weight_op, sum_RD, largest_R, total_R = attend_tiles(
            q_s, k_empty.index(0), k_smem, v_smem, k_full, k_empty, v_full, v_empty, 0, rows, length, first_r,
            begin_tile, masked_tile, end_tile, scale_log2, sum_RD, largest_R, total_R,
            X, D, KEYS, STAGES, False, SUMS,
        )  # fmt: skip
        v_s = v_smem.index((end_tile - begin_tile - 1) % STAGES).reshape([KEYS, D])
        sum_RD = warpgroup_mma(weight_op, v_s, sum_RD)
    store_results(
        out_ptr, lse_ptr, place_s, sum_RD, largest_R, total_R, first_row, rows, num_rows, first_r, g, split,
        G, X, D, IS_SPLIT, SUMS,
    )  # fmt: skip


# A kernel for all batches: what differs between them is no constant of the compiler.
@gluon.jit(
    do_not_specialize=[
        "num_rows",
        "tiles_each",
        "table_stride",
        "num_tokens",
        "num_splits",
        "scale",
    ]
)
def direct_attention_kernel(
    k_desc,
    v_desc,
    q_ptr,
    table_ptr,
    start_ptr,
    length_ptr,
    out_ptr,
    lse_ptr,
    k_rows_ptr,
    v_rows_ptr,
    slot_ptr,
    num_rows,
    tiles_each,
    table_stride,
    k_slot_stride,
    v_slot_stride,
    k_token_stride,
    v_token_stride,
    num_tokens,
    num_splits,
    scale,
    IS_SPLIT: gl.constexpr,
    OWN: gl.constexpr,
    G: gl.constexpr,
    X: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):
    """out[n], or with splits out[split, n] and lse[split, n]; OWN: own tokens a beam at most; WARPGROUPS compute."""
    ITEM_ROWS: gl.constexpr = WARPGROUPS * ROWS
    dtype: gl.constexpr = k_desc.dtype
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, D], rows_layout)
    own_v_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS, D], rows_layout)
    own_k_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS // X * OWN, D], rows_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, KEYS, D], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=WARPGROUPS)
        mbarrier.init(v_empty.index(s), count=WARPGROUPS)
    fence_async_shared()

    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (
                    q_ptr, out_ptr, lse_ptr, start_ptr, length_ptr, num_rows, tiles_each, num_splits, scale,
                    k_rows_ptr, v_rows_ptr, slot_ptr, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride, num_tokens,
                    q_smem, own_k_smem, own_v_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    0, G, X, D, KEYS, STAGES, IS_SPLIT, OWN, ITEM_ROWS,
                )),
                (_compute, (
                    q_ptr, out_ptr, lse_ptr, start_ptr, length_ptr, num_rows, tiles_each, num_splits, scale,
                    k_rows_ptr, v_rows_ptr, slot_ptr, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride, num_tokens,
                    q_smem, own_k_smem, own_v_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    1, G, X, D, KEYS, STAGES, IS_SPLIT, OWN, ITEM_ROWS,
                )),
                (load_beam_tiles, (
                    k_desc, v_desc, table_ptr, start_ptr, length_ptr, tiles_each, num_splits, table_stride,
                    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    G, X, D, PAGE_SIZE, KEYS, STAGES, ITEM_ROWS,
                )),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (
                    q_ptr, out_ptr, lse_ptr, start_ptr, length_ptr, num_rows, tiles_each, num_splits, scale,
                    k_rows_ptr, v_rows_ptr, slot_ptr, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride, num_tokens,
                    q_smem, own_k_smem, own_v_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    0, G, X, D, KEYS, STAGES, IS_SPLIT, OWN, ITEM_ROWS,
                )),
                (load_beam_tiles, (
                    k_desc, v_desc, table_ptr, start_ptr, length_ptr, tiles_each, num_splits, table_stride,
                    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    G, X, D, PAGE_SIZE, KEYS, STAGES, ITEM_ROWS,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip
