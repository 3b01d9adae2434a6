"""Products for NVIDIA's Hopper generation: a warp that copies tiles, and warpgroups that multiply 64 rows each.

Written in Gluon, as it needs what Triton's own language leaves to the compiler: which warp does what, and what waits for
what. A program takes tiles of the result one after the other. Its copying warp runs ahead by as many tiles of inputs as there
is room, over the border of results too, so that one result is written while the next one's tiles come. A tile of rows is
shared by the warpgroups, each of which starts the next product before it waits for the one before.

Three kinds of results. Plain: the product. Gated: silu(x gate^T) * (x up^T), the tile of the weight being 2 of F columns, so
that the [N, 2F] product is neither written nor read. Parts: of few rows, the inner dim is cut among programs, enough of them
that all cores stream weights; each writes its fp32 sums, which a second kernel adds up in order.

Columns of a tile are a power of two, or one and a half of it (MORE of them, in tiles and sums of their own): what that takes
to have as many tiles as cores.

A weight depends on nothing that runs before: its first tiles are on their way before the kernel waits for the one in front
of it, and the next kernel may be put onto the chip as soon as this one is there (programmatic dependent launch).

N rows, K inputs, O outputs, F gated outputs, S parts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS = gl.constexpr(64)  # of a warpgroup: the rows of one matrix instruction


@gluon.jit
def place_of_tile(tile, num_row_tiles, num_col_tiles, GROUP: gl.constexpr):
    """Row tile, column tile and part of the `tile`-th: down the rows of a group, to the next column, to the next part."""
    part = tile // (num_row_tiles * num_col_tiles)
    tile = tile % (num_row_tiles * num_col_tiles)
    in_group = GROUP * num_col_tiles
    first = tile // in_group * GROUP
    height = gl.minimum(num_row_tiles - first, GROUP)
    return first + tile % in_group % height, tile % in_group // height, part


@gluon.jit
def _copy_columns(
    desc, bar, buffer, column, k, num_columns, WIDTH: gl.constexpr, IS_GATED: gl.constexpr
):
    if IS_GATED:
        tma.async_copy_global_to_shared(desc, [column, k], bar, buffer.slice(0, WIDTH))
        tma.async_copy_global_to_shared(
            desc, [num_columns + column, k], bar, buffer.slice(WIDTH, WIDTH)
        )
    else:
        tma.async_copy_global_to_shared(desc, [column, k], bar, buffer)


@gluon.jit
def _copy_weight(
    weight_desc, more_desc, bar, tile, more, column, k, num_columns, num_bytes: gl.constexpr,
    TILE_O: gl.constexpr, MORE: gl.constexpr, IS_GATED: gl.constexpr,
):  # fmt: skip
    """Starts what fills the place of a tile of inputs; num_bytes: of x as well."""
    mbarrier.expect(bar, num_bytes)
    _copy_columns(weight_desc, bar, tile, column, k, num_columns, TILE_O, IS_GATED)
    if MORE > 0:
        _copy_columns(more_desc, bar, more, column + TILE_O, k, num_columns, MORE, IS_GATED)


@gluon.jit
def copy_tiles(
    x_desc, weight_desc, more_desc, x_tiles, weight_tiles, more_tiles, full, empty, num_rows, num_columns,
    STEPS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, TILE_N: gl.constexpr, TILE_O: gl.constexpr,
    MORE: gl.constexpr, TILE_K: gl.constexpr, GROUP: gl.constexpr, IS_GATED: gl.constexpr,
):  # fmt: skip
    """The copying warp. The weight's tiles that there is room for come before anything that an earlier kernel writes."""
    row_tiles, col_tiles = gl.cdiv(num_rows, TILE_N), gl.cdiv(num_columns, TILE_O + MORE)
    EARLY: gl.constexpr = min(STEPS, STAGES)
    WIDTH: gl.constexpr = (TILE_O + MORE) * (2 if IS_GATED else 1)
    num_bytes: gl.constexpr = (TILE_N + WIDTH) * TILE_K * 2
    r, c, part = place_of_tile(gl.program_id(0), row_tiles, col_tiles, GROUP)
    for step in range(EARLY):
        _copy_weight(
            weight_desc, more_desc, full.index(step), weight_tiles.index(step), more_tiles.index(step),
            c * (TILE_O + MORE), (part * STEPS + step) * TILE_K, num_columns, num_bytes, TILE_O, MORE, IS_GATED,
        )  # fmt: skip
    gdc_wait()
    count = 0
    for tile in range(gl.program_id(0), row_tiles * col_tiles * PARTS, gl.num_programs(0)):
        r, c, part = place_of_tile(tile, row_tiles, col_tiles, GROUP)
        for step in range(STEPS):
            s = count % STAGES
            k = (part * STEPS + step) * TILE_K
            if count >= EARLY:
                mbarrier.wait(empty.index(s), ((count // STAGES) & 1) ^ 1)
                _copy_weight(
                    weight_desc, more_desc, full.index(s), weight_tiles.index(s), more_tiles.index(s),
                    c * (TILE_O + MORE), k, num_columns, num_bytes, TILE_O, MORE, IS_GATED,
                )  # fmt: skip
            tma.async_copy_global_to_shared(
                x_desc, [r * TILE_N, k], full.index(s), x_tiles.index(s)
            )
            count += 1


@gluon.jit
def bring_tiles(
    x_desc, weight_desc, x_tiles, weight_tiles, full, empty, num_rows, num_columns,
    STEPS: gl.constexpr, STAGES: gl.constexpr, TILE_N: gl.constexpr, TILE_O: gl.constexpr, TILE_K: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """The copying warp of a whole product of one weight."""
    copy_tiles(
        x_desc, weight_desc, None, x_tiles, weight_tiles, weight_tiles, full, empty, num_rows, num_columns,
        STEPS, STAGES, 1, TILE_N, TILE_O, 0, TILE_K, GROUP, False,
    )  # fmt: skip


@gluon.jit
def multiply(
    x_tiles, weight_tiles, more_tiles, full, empty, sums, more_sums, count, WARPGROUP: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """A warpgroup's fp32 sums of one tile of the result, in order of the inputs, and the count of tiles of inputs so far."""
    for step in range(STEPS):
        s = count % STAGES
        mbarrier.wait(full.index(s), (count // STAGES) & 1)
        x = x_tiles.index(s).slice(WARPGROUP * ROWS, ROWS)
        weight = weight_tiles.index(s).permute((1, 0))
        sums = warpgroup_mma(x, weight, sums, use_acc=step > 0, is_async=True)
        if MORE > 0:
            more = more_tiles.index(s).permute((1, 0))
            more_sums = warpgroup_mma(x, more, more_sums, use_acc=step > 0, is_async=True)
            sums, more_sums = warpgroup_mma_wait(2, deps=[sums, more_sums])
        else:
            sums = warpgroup_mma_wait(1, deps=[sums])
        # all products but those just started have ended: the tile before is free
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
        count += 1
    if MORE > 0:
        sums, more_sums = warpgroup_mma_wait(0, deps=[sums, more_sums])
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
    return sums, more_sums, count


@gluon.jit
def load_squares(ptr, row, num_rows, NUM: gl.constexpr, NUM_PAD: gl.constexpr):
    """fp32 [64, NUM_PAD], zeros behind NUM, of the rows from `row` on: sums of squares that `row_factors` adds up."""
    layout: gl.constexpr = gl.BlockedLayout([1, NUM_PAD // 2], [16, 2], [4, 1], [1, 0])
    n = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    s = gl.arange(0, NUM_PAD, gl.SliceLayout(0, layout))
    is_used = (n < num_rows)[:, None] & (s < NUM)[None, :]
    return gl.load(ptr + n[:, None] * NUM + s[None, :], mask=is_used, other=0.0)


@gluon.jit
def row_factors(squares, size, eps, layout: gl.constexpr):
    """fp32 [64] that rows of `size` are multiplied by to be normalised, for sums in `layout`."""
    factors = gl.rsqrt(gl.sum(squares, axis=1) / size + eps)
    return gl.convert_layout(factors, gl.SliceLayout(1, layout))


@gluon.jit
def _normalised(sums, more_sums, squares, size, eps, MORE: gl.constexpr):
    layout: gl.constexpr = sums.type.layout
    sums = sums * row_factors(squares, size, eps, layout)[:, None]
    if MORE > 0:
        more_layout: gl.constexpr = more_sums.type.layout
        more_sums = more_sums * row_factors(squares, size, eps, more_layout)[:, None]
    return sums, more_sums


@gluon.jit
def _result(sums, WIDTH: gl.constexpr, IS_GATED: gl.constexpr):
    if IS_GATED:
        gate, up = sums.reshape([ROWS, 2, WIDTH]).permute([0, 2, 1]).split()
        out = gate / (1.0 + gl.exp(-gate)) * up
    else:
        out = sums
    return out


@gluon.jit
def _store_part(
    parts_ptr,
    sums,
    row,
    column,
    num_rows,
    num_columns,
    part,
    layout: gl.constexpr,
    WIDTH: gl.constexpr,
):
    n = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    place = (part * num_rows + n) * num_columns
    is_used = (n < num_rows)[:, None] & (o < num_columns)[None, :]
    gl.store(parts_ptr + place[:, None] + o[None, :], sums, mask=is_used)


@gluon.jit
def _compute(
    x_tiles, weight_tiles, more_tiles, out_tiles, more_out_tiles, full, empty, out_desc, more_out_desc, parts_ptr,
    squares_ptr, num_rows, num_columns, eps, WARPGROUP: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, TILE_N: gl.constexpr, TILE_O: gl.constexpr,
    MORE: gl.constexpr, TILE_K: gl.constexpr, GROUP: gl.constexpr, IS_GATED: gl.constexpr, SQUARES: gl.constexpr,
    SQUARES_PAD: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its 64 rows of each of the program's tiles of the result."""
    NUM: gl.constexpr = 2 if IS_GATED else 1
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NUM * TILE_O, 16])
    sums = gl.zeros([ROWS, NUM * TILE_O], gl.float32, layout)
    if MORE > 0:
        more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NUM * MORE, 16])
        more_sums = gl.zeros([ROWS, NUM * MORE], gl.float32, more_layout)
    else:
        more_sums = 0
    row_tiles, col_tiles = gl.cdiv(num_rows, TILE_N), gl.cdiv(num_columns, TILE_O + MORE)
    if squares_ptr is not None:
        gdc_wait()
    count = 0
    for tile in range(gl.program_id(0), row_tiles * col_tiles * PARTS, gl.num_programs(0)):
        r, c, part = place_of_tile(tile, row_tiles, col_tiles, GROUP)
        row, column = r * TILE_N + WARPGROUP * ROWS, c * (TILE_O + MORE)
        if squares_ptr is not None:
            squares = load_squares(squares_ptr, row, num_rows, SQUARES, SQUARES_PAD)
        sums, more_sums, count = multiply(
            x_tiles, weight_tiles, more_tiles, full, empty, sums, more_sums, count, WARPGROUP, STEPS, STAGES, MORE
        )  # fmt: skip
        if squares_ptr is not None:
            sums, more_sums = _normalised(sums, more_sums, squares, STEPS * TILE_K, eps, MORE)
        if parts_ptr is not None:
            _store_part(parts_ptr, sums, row, column, num_rows, num_columns, part, layout, TILE_O)
        else:
            tma.store_wait(0)  # of the tile before, which lay in the same place
            out_tiles.index(WARPGROUP).store(_result(sums, TILE_O, IS_GATED).to(out_desc.dtype))
            if MORE > 0:
                more_out = _result(more_sums, MORE, IS_GATED).to(out_desc.dtype)
                more_out_tiles.index(WARPGROUP).store(more_out)
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [row, column], out_tiles.index(WARPGROUP))
            if MORE > 0:
                tma.async_copy_shared_to_global(
                    more_out_desc, [row, column + TILE_O], more_out_tiles.index(WARPGROUP)
                )
    if parts_ptr is None:
        tma.store_wait(0)


@gluon.jit
def warp_product_kernel(
    x_desc, weight_desc, more_desc, out_desc, more_out_desc, parts_ptr, squares_ptr, num_rows, num_columns, eps,
    STEPS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, WARPGROUPS: gl.constexpr, TILE_O: gl.constexpr,
    MORE: gl.constexpr, TILE_K: gl.constexpr, GROUP: gl.constexpr, IS_GATED: gl.constexpr, SQUARES: gl.constexpr,
    SQUARES_PAD: gl.constexpr, NUM_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Either out (parts_ptr None) or fp32 parts[s, n, o] (out_desc None), [PARTS, num_rows, num_columns].

    A part is STEPS tiles of TILE_K inputs. more_desc and more_out_desc are for the MORE columns, None where there are none.
    squares_ptr: None, or fp32 [num_rows, SQUARES] whose sums over SQUARES are the squares' of rows that are not normalised
    yet: the product is, before what is gated. Inputs then fill their tiles.
    """
    TILE_N: gl.constexpr = 64 * WARPGROUPS
    NUM: gl.constexpr = 2 if IS_GATED else 1
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TILE_N, TILE_K], x_desc.layout)
    weight_tiles = gl.allocate_shared_memory(
        weight_desc.dtype, [STAGES, NUM * TILE_O, TILE_K], weight_desc.layout
    )
    more_tiles = weight_tiles
    if MORE > 0:
        more_tiles = gl.allocate_shared_memory(
            more_desc.dtype, [STAGES, NUM * MORE, TILE_K], more_desc.layout
        )
    out_tiles = x_tiles
    more_out_tiles = x_tiles
    if parts_ptr is None:
        out_tiles = gl.allocate_shared_memory(
            out_desc.dtype, [WARPGROUPS, 64, TILE_O], out_desc.layout
        )
        if MORE > 0:
            more_out_tiles = gl.allocate_shared_memory(
                out_desc.dtype, [WARPGROUPS, 64, MORE], more_out_desc.layout
            )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    gdc_launch_dependents()
    if WARPGROUPS == 1:
        gl.warp_specialize([
            (_compute, (x_tiles, weight_tiles, more_tiles, out_tiles, more_out_tiles, full, empty, out_desc, more_out_desc, parts_ptr, squares_ptr, num_rows, num_columns, eps, gl.constexpr(0), STEPS, STAGES, PARTS, TILE_N, TILE_O, MORE, TILE_K, GROUP, IS_GATED, SQUARES, SQUARES_PAD)),
            (copy_tiles, (x_desc, weight_desc, more_desc, x_tiles, weight_tiles, more_tiles, full, empty, num_rows, num_columns, STEPS, STAGES, PARTS, TILE_N, TILE_O, MORE, TILE_K, GROUP, IS_GATED)),
        ], [1], [40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute, (x_tiles, weight_tiles, more_tiles, out_tiles, more_out_tiles, full, empty, out_desc, more_out_desc, parts_ptr, squares_ptr, num_rows, num_columns, eps, gl.constexpr(0), STEPS, STAGES, PARTS, TILE_N, TILE_O, MORE, TILE_K, GROUP, IS_GATED, SQUARES, SQUARES_PAD)),
            (_compute, (x_tiles, weight_tiles, more_tiles, out_tiles, more_out_tiles, full, empty, out_desc, more_out_desc, parts_ptr, squares_ptr, num_rows, num_columns, eps, gl.constexpr(1), STEPS, STAGES, PARTS, TILE_N, TILE_O, MORE, TILE_K, GROUP, IS_GATED, SQUARES, SQUARES_PAD)),
            (copy_tiles, (x_desc, weight_desc, more_desc, x_tiles, weight_tiles, more_tiles, full, empty, num_rows, num_columns, STEPS, STAGES, PARTS, TILE_N, TILE_O, MORE, TILE_K, GROUP, IS_GATED)),
        ], [4, 1], [NUM_REGISTERS, 40])  # fmt: skip
