"""Cases of the ops that normalise, rotate and store the projections of a layer."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from xgr_runtime.conformance.attention_cases import (
    HISTORIES,
    ROW_SHAPES,
    Histories,
    own_rows,
    pages_of,
)
from xgr_runtime.conformance.op_case import Args, OpCase, int32, normal

# Not only powers of two; the widest head that is stored.
_ODD_HEADS = Histories([3], [3], 3, 5, 10, 4, ())
_WIDE_HEADS = Histories([2], [2], 2, 1, 256, 16, ())
_EPS = 1e-6


def rope_write_shared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        k_pages, v_pages = args["k_pages"][1:], args["v_pages"][1:]
        return {"result": result, "k_pages": k_pages, "v_pages": v_pages}

    shapes = {**HISTORIES, "odd heads": _ODD_HEADS, "heads of 256": _WIDE_HEADS}
    for label, histories in shapes.items():
        for padding in (0, 2):
            pages = pages_of(30, histories, dtype)
            size = histories.page_size
            num_slots = (pages["k_pages"].shape[0] - 1) * size
            slots = size + np.random.default_rng(4).permutation(num_slots)[: sum(histories.new)]
            null_slots = np.arange(padding, dtype=np.int64) % size
            num_tokens = len(slots) + padding
            args = {
                **_projections("TXD", num_tokens, histories, dtype, is_normalised=padding == 0),
                "k_pages": pages["k_pages"],
                "v_pages": pages["v_pages"],
                "slot_T": torch.from_numpy(np.concatenate((slots, null_slots))),
            }
            dims = {"T": num_tokens, **_heads(histories), "page_size": size}
            written = ("k_pages", "v_pages")
            yield OpCase(f"{label}, padding {padding}", args, dims, mutates=written, view=view)


def rope_write_unshared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        return {"result": result, "k_rows": args["k_rows"][:-1], "v_rows": args["v_rows"][:-1]}

    for label, (num_rows, max_tokens, heads, kv_heads, dim) in ROW_SHAPES.items():
        shape = Histories([], [], heads, kv_heads, dim, 1, ())
        for position in sorted({0, max_tokens - 1}):
            rows = own_rows(31, label, position, dtype)
            dummy = rows["k_rows"].shape[0] - 1
            args = {
                **_projections("NXD", num_rows + 2, shape, dtype, is_normalised=position == 0),
                "k_rows": rows["k_rows"],
                "v_rows": rows["v_rows"],
                "slot_N": torch.cat((rows["slot_N"], int32([dummy, dummy]))),
                "position": position,
            }
            dims = {"N": num_rows + 2, **_heads(shape)}
            written = ("k_rows", "v_rows")
            yield OpCase(f"{label}, at {position}", args, dims, mutates=written, view=view)


def _projections(
    dims: str, num_tokens: int, shape: Histories, dtype: torch.dtype, *, is_normalised: bool
) -> Args:
    """What both ops begin with; `dims` is TXD or NXD, as the op names its packed tokens."""
    rows, heads, dim = dims[0], shape.heads + 2 * shape.kv_heads, shape.dim
    angles = normal(32, num_tokens, dim // 2).repeat(1, 2) * 30
    weights = [1 + normal(seed, dim, dtype=dtype) if is_normalised else None for seed in (33, 34)]
    return {
        f"qkv_{dims}": normal(35, num_tokens, heads, dim, dtype=dtype),
        "q_norm_D": weights[0],
        "k_norm_D": weights[1],
        "eps": _EPS,
        f"cos_{rows}D": angles.cos(),
        f"sin_{rows}D": angles.sin(),
    }


def _heads(shape: Histories) -> dict[str, int]:
    return {"Q": shape.heads, "G": shape.kv_heads, "D": shape.dim}
