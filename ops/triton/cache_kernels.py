"""Kernels that move keys and values: rows as whole contiguous runs, one at a time, never element by element.

write: one item is a row; its keys and its values go to the slot they are named for. move: one item is a child row and
a group of layers; a row that stays is decided once, before its layers. A row of move is read before it is written and
no slot is both somebody's source and another's destination (the plan sees to that), so any order of programs is right
and the only extra storage is one tile a program. copy: the first tokens of a page are one run in each layer; an item is a
history, a layer and every NUM_PARTS-th tile of its run. Keys and values of all layers lie in one tensor, so that one launch
copies them all: 104 tokens of 28 layers with 8 heads of 128 in 16 bits are 12 MB read and 12 MB written.
"""

import triton
import triton.language as tl


@triton.jit
def write_rows_kernel(
    k_ptr,
    v_ptr,
    k_out_ptr,
    v_out_ptr,
    slot_ptr,
    num_rows,
    k_row_stride,
    v_row_stride,
    k_slot_stride,
    v_slot_stride,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    """k_out[slot[n]] = k[n] and v_out[slot[n]] = v[n], rows of ROW elements."""
    place_E = tl.arange(0, TILE)
    for item in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(item, tl.int64)
        slot = tl.load(slot_ptr + row).to(tl.int64)
        for first in range(0, ROW, TILE):
            offset_E = first + place_E
            is_used_E = offset_E < ROW
            k_E = tl.load(k_ptr + row * k_row_stride + offset_E, mask=is_used_E, other=0.0)
            v_E = tl.load(v_ptr + row * v_row_stride + offset_E, mask=is_used_E, other=0.0)
            tl.store(k_out_ptr + slot * k_slot_stride + offset_E, k_E, mask=is_used_E)
            tl.store(v_out_ptr + slot * v_slot_stride + offset_E, v_E, mask=is_used_E)


@triton.jit
def move_slots_kernel(
    kv_ptr,
    kv_out_ptr,
    src_ptr,
    dst_ptr,
    num_items,
    num_layers,
    layer_stride,
    slot_stride,
    NUM_GROUPS: tl.constexpr,
    GROUP_LAYERS: tl.constexpr,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    """kv[x, dst[n]] = kv[x, src[n]] for ROW elements of every layer x, where they differ; items are (n, group of x).

    kv_ptr and kv_out_ptr are the same memory under two names: what is read is never written, and a compiler that sees
    one name has every load wait for the store before it.
    """
    place_E = tl.arange(0, TILE)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = tl.cast(item // NUM_GROUPS, tl.int64)
        first_layer = (item % NUM_GROUPS) * GROUP_LAYERS
        end_layer = tl.minimum(first_layer + GROUP_LAYERS, num_layers)
        src = tl.load(src_ptr + row).to(tl.int64)
        dst = tl.load(dst_ptr + row).to(tl.int64)
        if src != dst:
            for layer in range(first_layer, end_layer):
                src_place = tl.cast(layer, tl.int64) * layer_stride + src * slot_stride
                dst_place = tl.cast(layer, tl.int64) * layer_stride + dst * slot_stride
                for first in range(0, ROW, TILE):
                    offset_E = first + place_E
                    is_used_E = offset_E < ROW
                    kept_E = tl.load(kv_ptr + src_place + offset_E, mask=is_used_E, other=0.0)
                    tl.store(kv_out_ptr + dst_place + offset_E, kept_E, mask=is_used_E)


@triton.jit
def copy_page_starts_kernel(
    kv_ptr,
    kv_out_ptr,
    source_ptr,
    target_ptr,
    num_tokens_ptr,
    num_items,
    num_layers,
    layer_stride,
    page_stride,
    NUM_PARTS: tl.constexpr,
    TOKEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """kv[x, target[h]] = kv[x, source[h]] for the first num_tokens[h] tokens of TOKEN elements, in every layer x.

    kv_ptr and kv_out_ptr are the same memory under two names, as in `move_slots_kernel`.
    """
    place_E = tl.arange(0, TILE)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        part = item % NUM_PARTS
        layer = tl.cast((item // NUM_PARTS) % num_layers, tl.int64)
        history = item // NUM_PARTS // num_layers
        end = tl.load(num_tokens_ptr + history) * TOKEN
        if part * TILE < end:
            source = tl.load(source_ptr + history).to(tl.int64)
            target = tl.load(target_ptr + history).to(tl.int64)
            source_place = layer * layer_stride + source * page_stride
            target_place = layer * layer_stride + target * page_stride
            for first in range(part * TILE, end, NUM_PARTS * TILE):
                offset_E = first + place_E
                is_used_E = offset_E < end
                kept_E = tl.load(kv_ptr + source_place + offset_E, mask=is_used_E, other=0.0)
                tl.store(kv_out_ptr + target_place + offset_E, kept_E, mask=is_used_E)
