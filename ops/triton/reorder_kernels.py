"""The plan of a reorder in one kernel: which slot each child row takes, and from which it copies.

A program has a search: its slots are a range, its children follow each other, its parents' slots are distinct. Four
walks over them with a barrier between: forget the slots; the first child of each slot (an integer minimum, the same in
any order); list the slots that nobody reads; give the first children their parent's slot and the k-th other child the
k-th free one. One more program has the padding rows. Between walks values pass through memory that other threads of the program
wrote, so they are read past the first cache.
"""

import triton
import triton.language as tl

NOBODY = tl.constexpr(2**31 - 1)


@triton.jit
def rows_before(search_ptr, search, num_rows, TILE: tl.constexpr):
    """How many rows belong to earlier searches."""
    count = tl.zeros([], tl.int32)
    for first in range(0, num_rows, TILE):
        row_N = first + tl.arange(0, TILE)
        search_N = tl.load(search_ptr + row_N, mask=row_N < num_rows, other=search)
        count += tl.sum((search_N < search).to(tl.int32), axis=0)
    return count


@triton.jit(do_not_specialize=["num_children", "num_searches", "num_slots"])
def plan_reorder_kernel(
    parent_ptr,
    slot_in_ptr,
    search_ptr,
    slot_start_ptr,
    src_ptr,
    dst_ptr,
    first_child_ptr,
    free_ptr,
    num_children,
    num_searches,
    num_slots,
    TILE: tl.constexpr,
):
    """src[n] and dst[n] of every child row; first_child and free are scratch of num_slots entries each."""
    search = tl.program_id(0)
    begin = rows_before(search_ptr, search, num_children, TILE)
    if search == num_searches:
        dummy_N = tl.full([TILE], 0, tl.int32) + (num_slots - 1)
        for first in range(begin, num_children, TILE):
            row_N = first + tl.arange(0, TILE)
            tl.store(src_ptr + row_N, dummy_N, mask=row_N < num_children)
            tl.store(dst_ptr + row_N, dummy_N, mask=row_N < num_children)
    else:
        end = rows_before(search_ptr, search + 1, num_children, TILE)
        first_slot = tl.load(slot_start_ptr + search)
        end_slot = tl.load(slot_start_ptr + search + 1)
        nobody_N = tl.full([TILE], NOBODY, tl.int32)
        for first in range(first_slot, end_slot, TILE):
            slot_N = first + tl.arange(0, TILE)
            tl.store(first_child_ptr + slot_N, nobody_N, mask=slot_N < end_slot)
        tl.debug_barrier()
        for first in range(begin, end, TILE):
            row_N = first + tl.arange(0, TILE)
            is_row_N = row_N < end
            parent_N = tl.load(parent_ptr + row_N, mask=is_row_N, other=0)
            src_N = tl.load(slot_in_ptr + parent_N, mask=is_row_N, other=0)
            tl.store(src_ptr + row_N, src_N, mask=is_row_N)
            tl.atomic_min(first_child_ptr + src_N, row_N, mask=is_row_N, sem="relaxed")
        tl.debug_barrier()
        num_free = tl.zeros([], tl.int32)
        for first in range(first_slot, end_slot, TILE):
            slot_N = first + tl.arange(0, TILE)
            is_slot_N = slot_N < end_slot
            child_N = tl.load(
                first_child_ptr + slot_N, mask=is_slot_N, other=0, cache_modifier=".cg"
            )
            free_N = (is_slot_N & (child_N == NOBODY)).to(tl.int32)
            place_N = first_slot + num_free + tl.cumsum(free_N, axis=0) - free_N
            tl.store(free_ptr + place_N, slot_N, mask=free_N > 0)
            num_free += tl.sum(free_N, axis=0)
        tl.debug_barrier()
        num_moved = tl.zeros([], tl.int32)
        for first in range(begin, end, TILE):
            row_N = first + tl.arange(0, TILE)
            is_row_N = row_N < end
            src_N = tl.load(src_ptr + row_N, mask=is_row_N, other=0, cache_modifier=".cg")
            child_N = tl.load(first_child_ptr + src_N, mask=is_row_N, other=0, cache_modifier=".cg")
            moves_N = (is_row_N & (child_N != row_N)).to(tl.int32)
            place_N = first_slot + num_moved + tl.cumsum(moves_N, axis=0) - moves_N
            free_N = tl.load(free_ptr + place_N, mask=moves_N > 0, other=0, cache_modifier=".cg")
            tl.store(dst_ptr + row_N, tl.where(moves_N > 0, free_N, src_N), mask=is_row_N)
            num_moved += tl.sum(moves_N, axis=0)
