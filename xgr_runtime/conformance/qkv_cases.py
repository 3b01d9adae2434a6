"""Cases of the ops that project a layer's input, rotate and store in one.

Beside the shapes of `rope_write_cases`: heads of 64 and 128 with as many rows as fill tiles of a GPU and do not, inputs that
fill no tile and so many that they are summed in parts, odd and even numbers of heads.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from xgr_runtime.conformance.op_case import Args, OpCase, int32, normal

_EPS = 1e-6
Shape = tuple[int, int, int, int, int]  # rows, inputs, query heads, KV heads, head dim
SHAPES: Mapping[str, Shape] = {
    "one": (1, 2, 1, 1, 2),
    "odd": (7, 24, 3, 1, 6),
    "wide heads": (5, 64, 2, 1, 256),
    "less than a tile": (40, 64, 2, 2, 128),
    "a tile": (128, 64, 4, 2, 64),
    "in three tiles": (300, 200, 4, 2, 128),
    "odd heads in tiles": (131, 128, 5, 3, 128),
    "in many tiles": (1030, 72, 8, 4, 64),
    "many inputs of few rows": (40, 2048, 4, 2, 128),
    "many inputs of a tile": (98, 2048, 3, 1, 64),
}
NUM_PADDING = 2
PAGE_SIZE = 16


def linear_rope_write_shared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    return to_pages(dtype, SHAPES)


def to_pages(dtype: torch.dtype, shapes: Mapping[str, Shape]) -> Iterator[OpCase]:
    """The cases of `linear_rope_write_shared_kv` of these shapes."""

    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        k_pages, v_pages = args["k_pages"][1:], args["v_pages"][1:]  # page 0 takes padding
        return {"result": result, "k_pages": k_pages, "v_pages": v_pages}

    for (label, shape), is_normalised in itertools.product(shapes.items(), (False, True)):
        rows, _, _, kv_heads, dim = shape
        num_pages = 2 + -(-rows // PAGE_SIZE)
        slots = np.random.default_rng(41).permutation((num_pages - 1) * PAGE_SIZE)[:rows]
        padding = np.arange(NUM_PADDING, dtype=np.int64)
        args = {
            **_projected("TM", shape, dtype, is_normalised=is_normalised),
            "k_pages": torch.full((num_pages, PAGE_SIZE, kv_heads, dim), torch.nan, dtype=dtype),
            "v_pages": torch.full((num_pages, PAGE_SIZE, kv_heads, dim), torch.nan, dtype=dtype),
            "slot_T": torch.from_numpy(np.concatenate((PAGE_SIZE + slots, padding))),
        }
        dims = {"T": rows + NUM_PADDING, **_sizes(shape), "page_size": PAGE_SIZE}
        yield OpCase(
            f"{label}, {'' if is_normalised else 'not '}normalised",
            args,
            dims,
            mutates=("k_pages", "v_pages"),
            view=view,
        )


def linear_rope_write_unshared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    return to_rows(dtype, SHAPES)


def to_rows(dtype: torch.dtype, shapes: Mapping[str, Shape]) -> Iterator[OpCase]:
    """The cases of `linear_rope_write_unshared_kv` of these shapes."""

    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        return {"result": result, "k_rows": args["k_rows"][:-1], "v_rows": args["v_rows"][:-1]}

    for (label, shape), position in itertools.product(shapes.items(), (0, 2)):
        rows, _, _, kv_heads, dim = shape
        slots = np.random.default_rng(42).permutation(rows + 3)[:rows]
        dummy = rows + 3
        args = {
            **_projected("NM", shape, dtype, is_normalised=position == 0),
            "k_rows": torch.full((rows + 4, 3, kv_heads, dim), torch.nan, dtype=dtype),
            "v_rows": torch.full((rows + 4, 3, kv_heads, dim), torch.nan, dtype=dtype),
            "slot_N": int32([*slots, *[dummy] * NUM_PADDING]),
            "position": position,
        }
        dims = {"N": rows + NUM_PADDING, **_sizes(shape)}
        written = ("k_rows", "v_rows")
        yield OpCase(f"{label}, at {position}", args, dims, mutates=written, view=view)


def _projected(names: str, shape: Shape, dtype: torch.dtype, *, is_normalised: bool) -> Args:
    """What both ops begin with; `names` is TM or NM, as the op names the dims of its input."""
    rows, inputs, heads, kv_heads, dim = shape
    num_rows, outputs = rows + NUM_PADDING, (heads + 2 * kv_heads) * dim
    angles = normal(43, num_rows, dim // 2).repeat(1, 2) * 30
    # near 1: a large weight makes large addends of a small sum, and their rounding is not the sum's
    norms = [(1 + normal(seed, dim) / 8).to(dtype) if is_normalised else None for seed in (44, 45)]
    return {
        f"x_{names}": normal(46, num_rows, inputs, dtype=dtype),
        "weight_OM": (normal(47, outputs, inputs) * inputs**-0.5).to(dtype),
        "q_norm_D": norms[0],
        "k_norm_D": norms[1],
        "eps": _EPS,
        f"cos_{names[0]}D": angles.cos(),
        f"sin_{names[0]}D": angles.sin(),
    }


def _sizes(shape: Shape) -> dict[str, int]:
    return dict(zip(("M", "Q", "G", "D"), shape[1:], strict=True))
