"""A layer's product of queries, keys and values that ends as rotated queries and stored keys and values.

Written in Gluon for NVIDIA's Hopper generation. The product is that of `matmul_warp_kernels`: a warp copies tiles, warpgroups
multiply 64 rows each. A tile has the columns of one head or of two, so that all that is left to do is in sight of a
warpgroup: the mean square of a head, its weight, and the rotation, which pairs column c with column c + D/2. The matrix
instruction leaves both in the same thread, and a row in four neighbouring ones. The [T, X D] product is neither written
nor read again.

Sums stay in fp32 until after the normalisation; from there on they are rounded where the ops round that this replaces. Each
half of a head then changes threads, so that a row of it is a whole run of memory wherever it goes.

Cosines and sines of a tile's rows are asked for before its product and used behind it.
They and the slots may come from the kernel in front on the stream, hence are read once that has ended, like x.

T packed tokens or beam rows, X = Q + 2 G heads: Q queries, G keys, G values; D head dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .matmul_warp_kernels import bring_tiles, load_squares, multiply, place_of_tile, row_factors

ROWS = gl.constexpr(64)  # of a warpgroup


@gluon.jit
def _halves(x, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Left and right half, of WIDTH columns each, in `layout`; no element changes threads."""
    left, right = x.reshape([ROWS, 2, WIDTH]).permute([0, 2, 1]).split()
    left = gl.convert_layout(left, layout, assert_trivial=True)
    return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _weighted(x, inverse, weight, dtype: gl.constexpr):
    scaled = (x * inverse[:, None]).to(dtype).to(gl.float32)
    return (scaled * weight[None, :]).to(dtype).to(gl.float32)


@gluon.jit
def _turned(left, right, norm_ptr, eps, cos, sin, dtype: gl.constexpr, HALF: gl.constexpr):
    """Halves of a head normalised (norm_ptr None: not) and rotated, fp32."""
    if norm_ptr is not None:
        c = gl.arange(0, HALF, gl.SliceLayout(0, left.type.layout))
        left_weight = gl.load(norm_ptr + c).to(gl.float32)
        right_weight = gl.load(norm_ptr + HALF + c).to(gl.float32)
        mean = gl.sum(left * left + right * right, axis=1) / (2 * HALF)
        inverse = gl.rsqrt(mean + eps)
        left = _weighted(left, inverse, left_weight, dtype)
        right = _weighted(right, inverse, right_weight, dtype)
    return left * cos - right * sin, right * cos + left * sin


@gluon.jit
def _store_half(ptr, half, place, is_row, dtype: gl.constexpr, HALF: gl.constexpr):
    """place: of each row's first element. Rows change to threads that hold 16 bytes of one."""
    LANES: gl.constexpr = HALF // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    c = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    half = gl.convert_layout(half.to(dtype), layout)
    gl.store(ptr + place[:, None] + c[None, :], half, mask=is_row[:, None])


@gluon.jit
def _angles(ptr, stride, row, num_rows, is_used, HALF: gl.constexpr, layout: gl.constexpr):
    """fp32 [64, HALF] of the rows from `row` on, zeros unless is_used."""
    n = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    c = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    place = n.to(gl.int64)[:, None] * stride + c[None, :]
    return gl.load(ptr + place, mask=((n < num_rows) & is_used)[:, None], other=0.0)


@gluon.jit
def _finish_head(
    x, head, row, q_norm_ptr, k_norm_ptr, eps, cos, sin, q_out_ptr, k_slots_ptr, v_slots_ptr, slot_ptr,
    k_slot_stride, v_slot_stride, num_rows, Q: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr, half_layout: gl.constexpr,
):  # fmt: skip
    """x: fp32 [64, D], the product's rows from `row` on and columns of head `head` of X."""
    dtype: gl.constexpr = q_out_ptr.dtype.element_ty
    LANES: gl.constexpr = HALF // 8
    rows_layout: gl.constexpr = gl.SliceLayout(
        1, gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    )
    left, right = _halves(x, HALF, half_layout)
    n = row + gl.arange(0, ROWS, rows_layout)
    is_row = n < num_rows
    slot = gl.load(slot_ptr + n, mask=is_row, other=0).to(gl.int64)
    if head < Q:
        left, right = _turned(left, right, q_norm_ptr, eps, cos, sin, dtype, HALF)
        place = (n.to(gl.int64) * Q + head) * (2 * HALF)
        _store_half(q_out_ptr, left, place, is_row, dtype, HALF)
        _store_half(q_out_ptr + HALF, right, place, is_row, dtype, HALF)
    elif head < Q + G:
        left, right = _turned(left, right, k_norm_ptr, eps, cos, sin, dtype, HALF)
        place = slot * k_slot_stride + (head - Q) * (2 * HALF)
        _store_half(k_slots_ptr, left, place, is_row, dtype, HALF)
        _store_half(k_slots_ptr + HALF, right, place, is_row, dtype, HALF)
    else:
        place = slot * v_slot_stride + (head - Q - G) * (2 * HALF)
        _store_half(v_slots_ptr, left, place, is_row, dtype, HALF)
        _store_half(v_slots_ptr + HALF, right, place, is_row, dtype, HALF)


@gluon.jit
def _compute(
    x_tiles, weight_tiles, full, empty, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, q_out_ptr, k_slots_ptr, v_slots_ptr,
    slot_ptr, squares_ptr, num_rows, eps, cos_stride, sin_stride, k_slot_stride, v_slot_stride, WARPGROUP: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, TILE_N: gl.constexpr, HEADS: gl.constexpr, TILE_K: gl.constexpr,
    GROUP: gl.constexpr, Q: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr, SQUARES: gl.constexpr,
    SQUARES_PAD: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its 64 rows of each of the program's tiles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF * HEADS, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    sums = gl.zeros([ROWS, 2 * HALF * HEADS], gl.float32, layout)
    more_sums = 0
    row_tiles, col_tiles = gl.cdiv(num_rows, TILE_N), (Q + 2 * G) // HEADS
    gdc_wait()
    count = 0
    for tile in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        r, c, _ = place_of_tile(tile, row_tiles, col_tiles, GROUP)
        row, head = r * TILE_N + WARPGROUP * ROWS, c * HEADS
        is_turned = head < Q + G
        if squares_ptr is not None:
            squares = load_squares(squares_ptr, row, num_rows, SQUARES, SQUARES_PAD)
        cos = _angles(cos_ptr, cos_stride, row, num_rows, is_turned, HALF, half_layout)
        sin = _angles(sin_ptr, sin_stride, row, num_rows, is_turned, HALF, half_layout)
        sums, more_sums, count = multiply(
            x_tiles, weight_tiles, weight_tiles, full, empty, sums, more_sums, count, WARPGROUP, STEPS, STAGES, 0
        )  # fmt: skip
        if squares_ptr is not None:
            sums = sums * row_factors(squares, STEPS * TILE_K, eps, layout)[:, None]
        if HEADS == 1:
            _finish_head(
                sums, head, row, q_norm_ptr, k_norm_ptr, eps, cos, sin, q_out_ptr, k_slots_ptr, v_slots_ptr, slot_ptr,
                k_slot_stride, v_slot_stride, num_rows, Q, G, HALF, half_layout,
            )  # fmt: skip
        else:
            one, other = sums.reshape([ROWS, 2, 2 * HALF]).permute([0, 2, 1]).split()
            _finish_head(
                one, head, row, q_norm_ptr, k_norm_ptr, eps, cos, sin, q_out_ptr, k_slots_ptr, v_slots_ptr, slot_ptr,
                k_slot_stride, v_slot_stride, num_rows, Q, G, HALF, half_layout,
            )  # fmt: skip
            _finish_head(
                other, head + 1, row, q_norm_ptr, k_norm_ptr, eps, cos, sin, q_out_ptr, k_slots_ptr, v_slots_ptr, slot_ptr,
                k_slot_stride, v_slot_stride, num_rows, Q, G, HALF, half_layout,
            )  # fmt: skip


@gluon.jit
def qkv_kernel(
    x_desc, weight_desc, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, q_out_ptr, k_slots_ptr, v_slots_ptr, slot_ptr,
    squares_ptr, num_rows, eps, cos_stride, sin_stride, k_slot_stride, v_slot_stride,
    STEPS: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, HEADS: gl.constexpr, TILE_K: gl.constexpr,
    GROUP: gl.constexpr, Q: gl.constexpr, G: gl.constexpr, HALF: gl.constexpr, SQUARES: gl.constexpr,
    SQUARES_PAD: gl.constexpr, NUM_REGISTERS: gl.constexpr,
):  # fmt: skip
    """q_out[t] of row t's queries, k_slots[slot[t]] and v_slots[slot[t]] of its keys and values.

    A tile has HEADS heads, 1 or 2, of D = 2 HALF columns each; 2 only where Q and G are even. Both halves of cos and sin are
    alike, hence the first is read. Both norms are None where heads are not normalised. squares_ptr: as in
    `warp_product_kernel`.
    """
    TILE_N: gl.constexpr = 64 * WARPGROUPS
    TILE_O: gl.constexpr = 2 * HALF * HEADS
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TILE_N, TILE_K], x_desc.layout)
    weight_tiles = gl.allocate_shared_memory(
        weight_desc.dtype, [STAGES, TILE_O, TILE_K], weight_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    gdc_launch_dependents()
    num_columns = (Q + 2 * G) * 2 * HALF
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (_compute, (x_tiles, weight_tiles, full, empty, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, q_out_ptr, k_slots_ptr, v_slots_ptr, slot_ptr, squares_ptr, num_rows, eps, cos_stride, sin_stride, k_slot_stride, v_slot_stride, gl.constexpr(0), STEPS, STAGES, TILE_N, HEADS, TILE_K, GROUP, Q, G, HALF, SQUARES, SQUARES_PAD)),
            (bring_tiles, (x_desc, weight_desc, x_tiles, weight_tiles, full, empty, num_rows, num_columns, STEPS, STAGES, TILE_N, TILE_O, TILE_K, GROUP)),
        ], [1], [40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute, (x_tiles, weight_tiles, full, empty, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, q_out_ptr, k_slots_ptr, v_slots_ptr, slot_ptr, squares_ptr, num_rows, eps, cos_stride, sin_stride, k_slot_stride, v_slot_stride, gl.constexpr(0), STEPS, STAGES, TILE_N, HEADS, TILE_K, GROUP, Q, G, HALF, SQUARES, SQUARES_PAD)),
            (_compute, (x_tiles, weight_tiles, full, empty, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, q_out_ptr, k_slots_ptr, v_slots_ptr, slot_ptr, squares_ptr, num_rows, eps, cos_stride, sin_stride, k_slot_stride, v_slot_stride, gl.constexpr(1), STEPS, STAGES, TILE_N, HEADS, TILE_K, GROUP, Q, G, HALF, SQUARES, SQUARES_PAD)),
            (bring_tiles, (x_desc, weight_desc, x_tiles, weight_tiles, full, empty, num_rows, num_columns, STEPS, STAGES, TILE_N, TILE_O, TILE_K, GROUP)),
        ], [4, 1], [NUM_REGISTERS, 40])  # fmt: skip
