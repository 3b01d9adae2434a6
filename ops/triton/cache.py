"""Launchers of the kernels that move keys and values.

X layers times two (K and V), N rows, G KV heads, D head dim, R rounds.
"""

import torch

from .cache_kernels import copy_page_starts_kernel, move_slots_kernel, write_rows_kernel
from .launch import LaunchRules, check_dtype, check_rows_dense, next_power_of_two

# Programs that share the run of a layer: one history of 56 layers fills a GPU, and those of a batch that copy nothing end soon.
COPY_PARTS = 16


def launch_write_rows(
    k_NGD: torch.Tensor,
    v_NGD: torch.Tensor,
    k_slots: torch.Tensor,
    v_slots: torch.Tensor,
    slot_N: torch.Tensor,
    rules: LaunchRules,
) -> None:
    """Write row n of k and v to slot slot_N[n].

    Args:
        k_NGD: [N, G, D], any stride over rows.
        v_NGD: likewise.
        k_slots: [slots, G, D], any stride over slots, dtype of k_NGD; MUTATED.
        v_slots: like k_slots; MUTATED.
        slot_N: int32 or int64 [N]. Rows that name the same slot overwrite each other, in any order.
        rules: of the device.

    Raises:
        ValueError: a dtype or strides it cannot take.
    """
    check_dtype(write_rows_kernel, k_NGD.dtype)
    for name, rows in (
        ("keys", k_NGD),
        ("values", v_NGD),
        ("key slots", k_slots),
        ("value slots", v_slots),
    ):
        check_rows_dense(name, rows, 2)
    num_rows, row = k_NGD.shape[0], k_NGD.shape[1] * k_NGD.shape[2]
    write_rows_kernel[rules.grid(num_rows)](
        k_NGD,
        v_NGD,
        k_slots,
        v_slots,
        slot_N,
        num_rows,
        k_NGD.stride(0),
        v_NGD.stride(0),
        k_slots.stride(0),
        v_slots.stride(0),
        ROW=row,
        TILE=min(next_power_of_two(row), rules.max_tile_elements),
        **rules.options,
    )


def launch_copy_page_starts(
    kv_pages: torch.Tensor,
    source_H: torch.Tensor,
    target_H: torch.Tensor,
    num_tokens_H: torch.Tensor,
    rules: LaunchRules,
) -> None:
    """Copy the first num_tokens_H tokens of pages source_H to pages target_H in every layer.

    Args:
        kv_pages: [X, P, page_size, G, D], at most 2**31 elements a page; MUTATED.
        source_H: int32 [H], nobody's target.
        target_H: int32 [H], distinct where num_tokens_H is not 0.
        num_tokens_H: int32 [H].
        rules: of the device.

    Raises:
        ValueError: a dtype or strides it cannot take.
    """
    check_dtype(copy_page_starts_kernel, kv_pages.dtype)
    check_rows_dense("kv_pages", kv_pages, 3)
    num_layers, _, page_size, num_heads, dim = kv_pages.shape
    token = num_heads * dim
    # one tile is all that a program holds
    tile = min(next_power_of_two(page_size * token), 2 * rules.max_tile_elements)
    num_parts = min(COPY_PARTS, -(-page_size * token // tile))
    num_items = source_H.shape[0] * num_layers * num_parts
    copy_page_starts_kernel[rules.grid(num_items)](
        kv_pages,
        kv_pages,
        source_H,
        target_H,
        num_tokens_H,
        num_items,
        num_layers,
        kv_pages.stride(0),
        kv_pages.stride(1),
        NUM_PARTS=num_parts,
        TOKEN=token,
        TILE=tile,
        **rules.options,
    )


def launch_move_slots(
    kv_rows: torch.Tensor,
    src_N: torch.Tensor,
    dst_N: torch.Tensor,
    num_tokens: int,
    rules: LaunchRules,
) -> None:
    """Copy the first `num_tokens` tokens of slots src_N to slots dst_N in every layer, in place.

    Args:
        kv_rows: [X, slots, R - 1, G, D]; MUTATED.
        src_N: int32 or int64 [N].
        dst_N: like src_N; equal to src_N where nothing moves, else distinct and nobody's source.
        num_tokens: in [1, R - 1].
        rules: of the device.

    Raises:
        ValueError: a dtype or strides it cannot take.
    """
    check_dtype(move_slots_kernel, kv_rows.dtype)
    check_rows_dense("kv_rows", kv_rows, 3)
    num_layers, num_rows = kv_rows.shape[0], src_N.shape[0]
    row = num_tokens * kv_rows.shape[3] * kv_rows.shape[4]
    # few rows: layers are spread over programs too
    groups_wanted = min(num_layers, -(-rules.num_programs // max(1, num_rows)))
    group_layers = -(-num_layers // groups_wanted)
    num_groups = -(-num_layers // group_layers)
    move_slots_kernel[rules.grid(num_rows * num_groups)](
        kv_rows,
        kv_rows,
        src_N,
        dst_N,
        num_rows * num_groups,
        num_layers,
        kv_rows.stride(0),
        kv_rows.stride(1),
        NUM_GROUPS=num_groups,
        GROUP_LAYERS=group_layers,
        ROW=row,
        TILE=min(next_power_of_two(row), rules.max_tile_elements),
        **rules.options,
    )
