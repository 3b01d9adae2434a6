"""A product added to the residual stream, whose norm is left to whoever multiplies the rows next.

A row is normalised by a factor of its own, which a product of that row may take as well as the row: behind it, in fp32. So
no kernel waits for whole rows. This one stores the new stream, the new stream times the norm's weight, and of each row the
sum of squares of every tile of columns; the next product adds those up (`row_factors` in `matmul_warp_kernels`).

Written in Gluon for NVIDIA's Hopper generation; the product is that of `matmul_warp_kernels`. A tile's part of the stream is
asked for before its product and used behind it.

N rows, K inputs, O columns of the stream, S tiles of columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .matmul_warp_kernels import bring_tiles, multiply, place_of_tile

ROWS = gl.constexpr(64)  # of a warpgroup


@gluon.jit
def _compute(
    x_tiles, weight_tiles, stream_tiles, out_tiles, full, empty, stream_desc, out_desc, stream_ptr, norm_ptr, squares_ptr,
    num_rows, num_columns, WARPGROUP: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, TILE_N: gl.constexpr, TILE_O: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its 64 rows of each of the program's tiles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_O, 16])
    dtype: gl.constexpr = stream_ptr.dtype.element_ty
    sums = gl.zeros([ROWS, TILE_O], gl.float32, layout)
    more_sums = 0
    row_tiles, col_tiles = gl.cdiv(num_rows, TILE_N), gl.cdiv(num_columns, TILE_O)
    gdc_wait()
    count = 0
    for tile in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
        r, c, _ = place_of_tile(tile, row_tiles, col_tiles, GROUP)
        row, column = r * TILE_N + WARPGROUP * ROWS, c * TILE_O
        n = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        o = column + gl.arange(0, TILE_O, gl.SliceLayout(0, layout))
        is_used = (n < num_rows)[:, None] & (o < num_columns)[None, :]
        place = n.to(gl.int64)[:, None] * num_columns + o[None, :]
        stream = gl.load(stream_ptr + place, mask=is_used, other=0.0)
        weight = gl.load(norm_ptr + o, mask=o < num_columns, other=0.0)
        sums, more_sums, count = multiply(
            x_tiles, weight_tiles, weight_tiles, full, empty, sums, more_sums, count, WARPGROUP, STEPS, STAGES, 0
        )  # fmt: skip
        new = (sums + stream.to(gl.float32)).to(dtype)
        tma.store_wait(0)  # of the tile before, which lay in the same place
        stream_tiles.index(WARPGROUP).store(new)
        new = new.to(gl.float32)
        out_tiles.index(WARPGROUP).store((new * weight.to(gl.float32)[None, :]).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(stream_desc, [row, column], stream_tiles.index(WARPGROUP))
        tma.async_copy_shared_to_global(out_desc, [row, column], out_tiles.index(WARPGROUP))
        squares = gl.sum(new * new, axis=1)
        gl.store(squares_ptr + n * col_tiles + c, squares, mask=n < num_rows)
    tma.store_wait(0)


@gluon.jit
def add_product_kernel(
    x_desc, weight_desc, stream_desc, out_desc, stream_ptr, norm_ptr, squares_ptr, num_rows, num_columns,
    STEPS: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, TILE_O: gl.constexpr, TILE_K: gl.constexpr,
    GROUP: gl.constexpr, NUM_REGISTERS: gl.constexpr,
):  # fmt: skip
    """stream += x weight^T, rounded; out = the new stream times norm, rounded; squares[n, s]: fp32, of the s-th tile of columns.

    stream_desc and stream_ptr are of the same memory, [num_rows, num_columns].
    """
    TILE_N: gl.constexpr = 64 * WARPGROUPS
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TILE_N, TILE_K], x_desc.layout)
    weight_tiles = gl.allocate_shared_memory(
        weight_desc.dtype, [STAGES, TILE_O, TILE_K], weight_desc.layout
    )
    stream_tiles = gl.allocate_shared_memory(
        stream_desc.dtype, [WARPGROUPS, 64, TILE_O], stream_desc.layout
    )
    out_tiles = gl.allocate_shared_memory(out_desc.dtype, [WARPGROUPS, 64, TILE_O], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    gdc_launch_dependents()
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (_compute, (x_tiles, weight_tiles, stream_tiles, out_tiles, full, empty, stream_desc, out_desc, stream_ptr, norm_ptr, squares_ptr, num_rows, num_columns, gl.constexpr(0), STEPS, STAGES, TILE_N, TILE_O, GROUP)),
            (bring_tiles, (x_desc, weight_desc, x_tiles, weight_tiles, full, empty, num_rows, num_columns, STEPS, STAGES, TILE_N, TILE_O, TILE_K, GROUP)),
        ], [1], [40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute, (x_tiles, weight_tiles, stream_tiles, out_tiles, full, empty, stream_desc, out_desc, stream_ptr, norm_ptr, squares_ptr, num_rows, num_columns, gl.constexpr(0), STEPS, STAGES, TILE_N, TILE_O, GROUP)),
            (_compute, (x_tiles, weight_tiles, stream_tiles, out_tiles, full, empty, stream_desc, out_desc, stream_ptr, norm_ptr, squares_ptr, num_rows, num_columns, gl.constexpr(1), STEPS, STAGES, TILE_N, TILE_O, GROUP)),
            (bring_tiles, (x_desc, weight_desc, x_tiles, weight_tiles, full, empty, num_rows, num_columns, STEPS, STAGES, TILE_N, TILE_O, TILE_K, GROUP)),
        ], [4, 1], [NUM_REGISTERS, 40])  # fmt: skip
