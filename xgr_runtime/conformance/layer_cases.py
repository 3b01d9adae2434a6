"""Cases of the ops of a layer that are neither attention, cache nor a product."""

from collections.abc import Iterator
from typing import Any

import torch

from xgr_runtime.conformance.op_case import Args, OpCase, normal

MATRIX_SHAPES = {"one": (1, 2), "odd": (3, 6), "not a power of two": (17, 48), "wide": (512, 64)}
# rows, hidden size, head dim: several rows a program, the last ones of which may be none, and one
EMBEDDING_SHAPES = {
    "one": (1, 2, 2),
    "odd": (3, 6, 6),
    "heads wider than rows": (17, 48, 80),
    "a tile and a row": (33, 64, 16),
    "one row a program": (9, 2048, 128),
    "not a power of two": (5, 1100, 128),
}
VOCABULARY, CODES, LAST_POSITION = 41, 23, 40_959


def embedding_rms_norm_cos_sin(dtype: torch.dtype) -> Iterator[OpCase]:
    """Tokens by themselves and by codes of either width; positions up to the longest that models have."""
    for label, (rows, size, dim) in EMBEDDING_SHAPES.items():
        row_T = torch.arange(rows)
        token_of_C = (torch.arange(CODES) * 7 + 3) % VOCABULARY
        args = {
            "embedding_VM": normal(26, VOCABULARY, size, dtype=dtype) / 4,
            "norm_weight_M": 1 + normal(27, size, dtype=dtype) / 8,
            "eps": 1e-5,
            "position_T": LAST_POSITION - row_T * 31 * (row_T % 2) if rows > 1 else row_T,
            "frequency_D": 1e6 ** (-torch.arange(dim // 2) / (dim // 2)).repeat(2),
        }
        dims = {"T": rows, "M": size, "D": dim}
        for what, id_T, token_of in (
            ("tokens", row_T * 5 % VOCABULARY, None),
            ("int32 codes", (row_T * 5 % CODES).int(), token_of_C),
            ("int64 codes", CODES - 1 - row_T % CODES, token_of_C),
        ):
            ids = {"id_T": id_T, "token_of_C": token_of}
            yield OpCase(f"{label}, {what}", {**args, **ids}, dims)


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
