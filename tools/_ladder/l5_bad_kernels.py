"""Kernels that the rung has to refuse: without them nobody knew whether it can refuse at all."""

import triton
import triton.language as tl


@triton.jit
def element_gather(x_ptr, index_ptr, out_ptr, num_tiles, TILE: tl.constexpr):
    """A load through a tile of indices: the compiler turns it into a scalar loop."""
    place = tl.arange(0, TILE)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        index = tl.load(index_ptr + tile * TILE + place)
        tl.store(out_ptr + tile * TILE + place, tl.load(x_ptr + index))


@triton.jit
def too_large(x_ptr, index_ptr, out_ptr, num_tiles, TILE: tl.constexpr):
    """Tiles of 65,536 elements beside each other do not fit into the unified buffer."""
    place = tl.arange(0, TILE)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        x = tl.load(x_ptr + tile * TILE + place).to(tl.float32)
        tl.store(out_ptr + tile * TILE + place, x * x + tl.exp(x))


@triton.jit
def fits_without_overlap(x_ptr, index_ptr, out_ptr, num_tiles, TILE: tl.constexpr):
    """Fits when each tile is held once, not when the next is loaded meanwhile."""
    place = tl.arange(0, TILE)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        x = tl.load(x_ptr + tile * TILE + place)
        tl.store(out_ptr + tile * TILE + place, x + x)
