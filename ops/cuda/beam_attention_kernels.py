"""Attention of beams over paged histories and their own tokens for NVIDIA's Hopper generation.

The attention of `prefill_attention_kernels`, cut for the time until the first product: a program has one item. A program
has two warpgroups that compute. Where there are many rows each has 64 of them, and both use the same tiles of keys. Where the cores
suffice they have the same 64 rows and one part of the keys each, with half as many tiles one after another; what they find is
joined on the chip. One warp asks for the key tiles of each part; each computing warpgroup asks for its queries and own tokens
itself, all at once, and takes them as they come. The kernel starts before the one in front of it has ended: its barriers, and in a
captured graph its first keys, are there when that one's results are.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_item_kernels import beam_item
from .attention_load_kernels import (
    copy_own,
    copy_queries,
    load_beam_tiles,
    own_slots,
    wait_for_copies,
)
from .attention_parts_kernels import give_part, place_of_parts, take_part
from .attention_step_kernels import (
    LEAST,
    LOG2_E,
    ROWS,
    attend_tiles,
    keep_to_owners,
    own_weights,
    store_results,
)

# Of a thread of the warpgroup with the second part of the keys; the first one has as many, or a few more.
PART_REGISTERS = gl.constexpr(168)


@gluon.jit
def _attend_own(
    q_s, k_smem, v_smem, k_rows_ptr, v_rows_ptr, slot_K, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride,
    num_tokens, scale_log2, sum_RD, g,
    ROW_GROUP: gl.constexpr, X: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    OWN: gl.constexpr, COPIES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """(sum, largest, total) over the own tokens, which lie in the last stages. The queries are on their way into q_s."""
    own_k_s = k_smem.index(K_STAGES - 1).reshape([KEYS, D])
    own_k_s = own_k_s.slice(ROW_GROUP * ROWS, ROWS // X * OWN)
    own_v_s = v_smem.index(V_STAGES - 1).reshape([KEYS, D])
    own_v_s = own_v_s.slice(ROW_GROUP * ROWS, ROWS // X * OWN)
    copy_own(own_k_s, k_rows_ptr, slot_K, k_slot_stride, k_token_stride, g, X, D, OWN, COPIES)
    async_copy.commit_group()
    copy_own(own_v_s, v_rows_ptr, slot_K, v_slot_stride, v_token_stride, g, X, D, OWN, COPIES)
    async_copy.commit_group()
    wait_for_copies(1)
    weight_op, largest_R, total_R = own_weights(q_s, own_k_s, num_tokens, scale_log2, X, OWN, SUMS)
    wait_for_copies(0)
    total_R = keep_to_owners(own_v_s, num_tokens, total_R, X, D, OWN, COPIES, SUMS)
    sum_RD = warpgroup_mma(weight_op, own_v_s, sum_RD, use_acc=False)
    return sum_RD, largest_R, total_R


@gluon.jit
def _attend(
    q_ptr, out_ptr, lse_ptr, num_rows, scale, k_rows_ptr, v_rows_ptr, slot_K, k_slot_stride, v_slot_stride, k_token_stride,
    v_token_stride, num_tokens, q_smem, k_smem, v_smem, numbers_smem, k_full, k_empty, v_full, v_empty, is_given,
    first_row, rows, length, first_r, g, split, begin_tile, masked_tile, end_tile,
    WHICH: gl.constexpr, G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    IS_SPLIT: gl.constexpr, OWN: gl.constexpr, KEY_GROUPS: gl.constexpr,
):  # fmt: skip
    """The 64 query rows from first_r on, or the keys of part WHICH for them."""
    PART: gl.constexpr = WHICH if KEY_GROUPS == 2 else 0
    ROW_GROUP: gl.constexpr = 0 if KEY_GROUPS == 2 else WHICH
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows_of_sums: gl.constexpr = gl.SliceLayout(1, SUMS)
    scale_log2 = scale * LOG2_E
    q_s = q_smem.index(WHICH)
    copy_queries(q_s, q_ptr, first_row, rows, first_r, g, G, X, D, ROWS, COPIES)
    async_copy.commit_group()
    largest_R = gl.full([ROWS], LEAST, gl.float32, rows_of_sums)
    total_R = gl.zeros([ROWS], gl.float32, rows_of_sums)
    sum_RD = gl.zeros([ROWS, D], gl.float32, SUMS)
    if PART == 0:  # noqa: SIM102 - the compiler decides this one
        if split == 0:
            sum_RD, largest_R, total_R = _attend_own(
                q_s, k_smem, v_smem, k_rows_ptr, v_rows_ptr, slot_K, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride,
                num_tokens, scale_log2, sum_RD, g, ROW_GROUP, X, D, KEYS, K_STAGES, V_STAGES, OWN, COPIES, SUMS,
            )  # fmt: skip
    wait_for_copies(0)
    if PART == 0:
        mbarrier.arrive(k_empty.index(K_STAGES - 1), count=1)
        mbarrier.arrive(v_empty.index(V_STAGES - 1), count=1)
    if end_tile > begin_tile:
        weight_op, sum_RD, largest_R, total_R = attend_tiles(
            q_s, k_empty.index(0), k_smem, v_smem, k_full, k_empty, v_full, v_empty, 0, rows, length, first_r,
            begin_tile, masked_tile, end_tile, scale_log2, sum_RD, largest_R, total_R,
            X, D, KEYS, K_STAGES, V_STAGES, PART, False, False, SUMS,
        )  # fmt: skip
        last = PART * V_STAGES + (end_tile - begin_tile - 1) % V_STAGES
        sum_RD = warpgroup_mma(weight_op, v_smem.index(last).reshape([KEYS, D]), sum_RD)
    if KEY_GROUPS == 2:
        place_s = place_of_parts(k_smem, KEYS, K_STAGES, ROWS, D)
        if PART == 1:
            give_part(place_s, numbers_smem, is_given, sum_RD, largest_R, total_R)
        else:
            sum_RD, largest_R, total_R = take_part(
                place_s, numbers_smem, is_given, sum_RD, largest_R, total_R, SUMS
            )
    if PART == 0:
        store_results(
            out_ptr, lse_ptr, q_s, sum_RD, largest_R, total_R, first_row, rows, num_rows, first_r, g, split,
            G, X, D, IS_SPLIT, SUMS,
        )  # fmt: skip


@gluon.jit
def _compute(
    q_ptr, out_ptr, lse_ptr, start_ptr, length_ptr, num_rows, num_histories, num_splits, scale, is_settled,
    k_rows_ptr, v_rows_ptr, slot_ptr, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride, num_tokens,
    q_smem, k_smem, v_smem, numbers_smem, k_full, k_empty, v_full, v_empty, is_given,
    WHICH: gl.constexpr, G: gl.constexpr, X: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    IS_SPLIT: gl.constexpr, OWN: gl.constexpr, ITEM_ROWS: gl.constexpr, SEGMENTS: gl.constexpr, KEY_GROUPS: gl.constexpr,
):  # fmt: skip
    """A computing warpgroup: rows WHICH * 64 .. of the item, or part WHICH of its keys, if there is one."""
    PART: gl.constexpr = WHICH if KEY_GROUPS == 2 else 0
    ROW_GROUP: gl.constexpr = 0 if KEY_GROUPS == 2 else WHICH
    COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    if is_settled == 0:
        gdc_wait()
    _h, first_row, rows, length, first_r, g, split, begin_tile, masked_tile, end_tile = beam_item(
        start_ptr, length_ptr, num_histories, num_splits, X, G, KEYS, ITEM_ROWS, SEGMENTS, PART, KEY_GROUPS, 4
    )  # fmt: skip
    first_r += ROW_GROUP * ROWS
    slot_K = None
    if PART == 0:
        slot_K = own_slots(slot_ptr, first_row, rows, first_r, num_tokens, X, OWN, COPIES)
    gdc_wait()
    gdc_launch_dependents()  # the next kernel waits for the results itself: it may take a core as soon as one is free
    if rows > 0:
        _attend(
            q_ptr, out_ptr, lse_ptr, num_rows, scale, k_rows_ptr, v_rows_ptr, slot_K, k_slot_stride, v_slot_stride, k_token_stride,
            v_token_stride, num_tokens, q_smem, k_smem, v_smem, numbers_smem, k_full, k_empty, v_full, v_empty, is_given,
            first_row, rows, length, first_r, g, split, begin_tile, masked_tile, end_tile,
            WHICH, G, X, D, KEYS, K_STAGES, V_STAGES, IS_SPLIT, OWN, KEY_GROUPS,
        )  # fmt: skip


# A kernel for all batches: what differs between them is no constant of the compiler.
@gluon.jit(
    do_not_specialize=[
        "num_rows",
        "num_histories",
        "table_stride",
        "num_tokens",
        "num_splits",
        "scale",
        "is_settled",
    ]
)
def beam_attention_kernel(
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
    num_histories,
    table_stride,
    k_slot_stride,
    v_slot_stride,
    k_token_stride,
    v_token_stride,
    num_tokens,
    num_splits,
    scale,
    is_settled,
    IS_SPLIT: gl.constexpr,
    OWN: gl.constexpr,
    G: gl.constexpr,
    X: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    SEGMENTS: gl.constexpr,
    KEY_GROUPS: gl.constexpr,
):
    """out[n], or with splits out[split, n] and lse[split, n]; OWN: own tokens a beam at most.

    Two warpgroups compute: with 2 KEY_GROUPS they share rows and divide the keys, else they share keys. is_settled: whether
    only queries and own tokens may come from the kernel in front.
    """
    ITEM_ROWS: gl.constexpr = 2 // KEY_GROUPS * ROWS
    dtype: gl.constexpr = k_desc.dtype
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    numbers_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    ALL_K: gl.constexpr = KEY_GROUPS * K_STAGES
    ALL_V: gl.constexpr = KEY_GROUPS * V_STAGES
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, D], rows_layout)
    k_smem = gl.allocate_shared_memory(dtype, [ALL_K, 1, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [ALL_V, 1, KEYS, D], v_desc.layout)
    numbers_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS], numbers_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [ALL_K, 1], bar_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [ALL_K, 1], bar_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [ALL_V, 1], bar_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [ALL_V, 1], bar_layout)
    is_given = gl.allocate_shared_memory(gl.int64, [1], bar_layout)
    for s in gl.static_range(ALL_K):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=2 // KEY_GROUPS)
    for s in gl.static_range(ALL_V):
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=2 // KEY_GROUPS)
    mbarrier.init(is_given, count=1)
    fence_async_shared()

    if KEY_GROUPS == 1:
        gl.warp_specialize(
            [
                (_compute, (
                    q_ptr, out_ptr, lse_ptr, start_ptr, length_ptr, num_rows, num_histories, num_splits, scale, is_settled,
                    k_rows_ptr, v_rows_ptr, slot_ptr, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride, num_tokens,
                    q_smem, k_smem, v_smem, numbers_smem, k_full, k_empty, v_full, v_empty, is_given,
                    0, G, X, D, KEYS, K_STAGES, V_STAGES, IS_SPLIT, OWN, ITEM_ROWS, SEGMENTS, KEY_GROUPS,
                )),
                (_compute, (
                    q_ptr, out_ptr, lse_ptr, start_ptr, length_ptr, num_rows, num_histories, num_splits, scale, is_settled,
                    k_rows_ptr, v_rows_ptr, slot_ptr, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride, num_tokens,
                    q_smem, k_smem, v_smem, numbers_smem, k_full, k_empty, v_full, v_empty, is_given,
                    1, G, X, D, KEYS, K_STAGES, V_STAGES, IS_SPLIT, OWN, ITEM_ROWS, SEGMENTS, KEY_GROUPS,
                )),
                (load_beam_tiles, (
                    k_desc, v_desc, table_ptr, start_ptr, length_ptr, num_histories, num_splits, table_stride, is_settled,
                    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    G, X, D, PAGE_SIZE, KEYS, K_STAGES, V_STAGES, ITEM_ROWS, SEGMENTS, 0, KEY_GROUPS,
                )),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_compute, (
                    q_ptr, out_ptr, lse_ptr, start_ptr, length_ptr, num_rows, num_histories, num_splits, scale, is_settled,
                    k_rows_ptr, v_rows_ptr, slot_ptr, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride, num_tokens,
                    q_smem, k_smem, v_smem, numbers_smem, k_full, k_empty, v_full, v_empty, is_given,
                    0, G, X, D, KEYS, K_STAGES, V_STAGES, IS_SPLIT, OWN, ITEM_ROWS, SEGMENTS, KEY_GROUPS,
                )),
                (_compute, (
                    q_ptr, out_ptr, lse_ptr, start_ptr, length_ptr, num_rows, num_histories, num_splits, scale, is_settled,
                    k_rows_ptr, v_rows_ptr, slot_ptr, k_slot_stride, v_slot_stride, k_token_stride, v_token_stride, num_tokens,
                    q_smem, k_smem, v_smem, numbers_smem, k_full, k_empty, v_full, v_empty, is_given,
                    1, G, X, D, KEYS, K_STAGES, V_STAGES, IS_SPLIT, OWN, ITEM_ROWS, SEGMENTS, KEY_GROUPS,
                )),
                (load_beam_tiles, (
                    k_desc, v_desc, table_ptr, start_ptr, length_ptr, num_histories, num_splits, table_stride, is_settled,
                    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    G, X, D, PAGE_SIZE, KEYS, K_STAGES, V_STAGES, ITEM_ROWS, SEGMENTS, 0, KEY_GROUPS,
                )),
                (load_beam_tiles, (
                    k_desc, v_desc, table_ptr, start_ptr, length_ptr, num_histories, num_splits, table_stride, is_settled,
                    k_smem, v_smem, k_full, k_empty, v_full, v_empty,
                    G, X, D, PAGE_SIZE, KEYS, K_STAGES, V_STAGES, ITEM_ROWS, SEGMENTS, 1, KEY_GROUPS,
                )),
            ],
            [4, 1, 1],
            [PART_REGISTERS, 40, 40],
        )  # fmt: skip
