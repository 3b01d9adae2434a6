"""Cases of the ops of a layer that are neither attention, cache nor a product."""

from collections.abc import Iterator
from typing import Any

import torch

from xgr_runtime.conformance.op_case import Args, OpCase, normal

MATRIX_SHAPES = {"one": (1, 2), "odd": (3, 6), "not a power of two": (17, 48), "wide": (512, 64)}


def rms_norm(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (rows, size) in MATRIX_SHAPES.items():
        weight = 1 + normal(20, size, dtype=dtype)
        for what, shape in (("rows", (rows, size)), ("heads", (rows, 3, size))):
            args = {"x_NM": normal(19, *shape, dtype=dtype), "weight_M": weight, "eps": 1e-6}
            yield OpCase(f"{label}, {what}", args, {"N": rows, "M": size})


def add_rms_norm(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        return {"result": result, "residual_NM": args["residual_NM"]}

    for label, (rows, size) in MATRIX_SHAPES.items():
        args = {
            "x_NM": normal(21, rows, size, dtype=dtype),
            "residual_NM": normal(22, rows, size, dtype=dtype),
            "weight_M": 1 + normal(20, size, dtype=dtype),
            "eps": 1e-5,
        }
        yield OpCase(label, args, {"N": rows, "M": size}, mutates=("residual_NM",), view=view)


def rotary_embedding(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (tokens, dim) in {**MATRIX_SHAPES, "head of 128": (9, 128)}.items():
        angles = normal(23, tokens, dim // 2).repeat(1, 2) * 30
        fused = normal(24, tokens, 6, dim, dtype=dtype)
        args = {
            "q_TQD": fused[:, :4],
            "k_TGD": fused[:, 4:],
            "cos_TD": angles.cos(),
            "sin_TD": angles.sin(),
        }
        yield OpCase(label, args, {"T": tokens, "Q": 4, "G": 2, "D": dim})


def silu_mul(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (rows, size) in MATRIX_SHAPES.items():
        args = {"gate_up_N2F": normal(25, rows, 2 * size, dtype=dtype)}
        yield OpCase(label, args, {"N": rows, "F": size})
