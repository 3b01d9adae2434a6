"""Cases of the ops that are matrix products: the head's logits, its normaliser, and the gated product.

Sizes that fill no tile, rows that the copy engine of a GPU cannot bring (not a multiple of 16 bytes) and rows that it can,
scales other than 1, and values at the end of a dtype's range.
"""

from collections.abc import Iterator

import torch

from xgr_runtime.conformance.op_case import OpCase, normal

# rows, hidden size
SHAPES = {
    "one": (1, 2),
    "odd": (3, 6),
    "not a power of two": (17, 48),
    "in two tiles": (130, 72),
    "wide": (512, 64),
}
# a long inner dim may be summed in parts
LINEAR_SHAPES = {**SHAPES, "many": (1100, 64), "long": (70, 1032), "many, long": (1100, 1032)}
SCALES = (0.5, 1.0)


def head_logsumexp(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (rows, size) in SHAPES.items():
        for vocab in (1, 97, 9000):
            for scale in SCALES:
                args = {
                    "hidden_NM": normal(26, rows, size, dtype=dtype),
                    "weight_VM": normal(27, vocab, size, dtype=dtype),
                    "scale": scale,
                }
                dims = {"N": rows, "V": vocab, "M": size}
                yield OpCase(f"{label}, vocabulary {vocab}, scale {scale}", args, dims)
    largest = torch.finfo(dtype).max / 2 if dtype == torch.float16 else 1e30
    for size in (1, 8):  # the other elements are 0, and 0 times infinity is NaN
        hidden = torch.zeros(8, size, dtype=dtype)
        values = [largest, -largest, torch.nan, 0.0, torch.inf, -torch.inf, 1.0, -80.0]
        hidden[:, 0] = torch.tensor(values)
        for vocab in (1, 9000):
            last = torch.zeros(vocab, size, dtype=dtype)
            last[-1, 0] = 1.0
            for what, weight in {"last row": last, "all rows": torch.ones_like(last)}.items():
                args = {"hidden_NM": hidden, "weight_VM": weight, "scale": 1.0}
                dims = {"N": 8, "V": vocab, "M": size}
                yield OpCase(f"extreme values, size {size}, {what} of {vocab}", args, dims)


def head_logits(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (rows, size) in SHAPES.items():
        for codes in (1, 97, 700):
            for scale in SCALES:
                args = {
                    "hidden_NM": normal(28, rows, size, dtype=dtype),
                    "weight_CM": normal(29, codes, size, dtype=dtype),
                    "scale": scale,
                }
                dims = {"N": rows, "M": size}
                yield OpCase(f"{label}, {codes} codes, scale {scale}", args, dims)


def linear_silu_mul(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (rows, size) in {**SHAPES, "many": (1100, 64)}.items():
        for features in (1, 40, 136):
            args = {
                "x_NM": normal(30, rows, size, dtype=dtype),
                "weight_2FM": (normal(31, 2 * features, size) * size**-0.5).to(dtype),
            }
            dims = {"T": rows, "M": size, "F": features}
            yield OpCase(f"{label}, {features} features", args, dims)
    gates = torch.tensor([-200.0, -30.0, 0.0, 30.0, 200.0, 1e4, -1e4, 1.0])
    weight = torch.zeros(16, 8, dtype=dtype)
    weight[:8, 0], weight[8:, 0] = gates, 1.0
    x = torch.zeros(3, 8, dtype=dtype)
    x[:, 0] = torch.tensor([1.0, torch.nan, 0.0])
    args = {"x_NM": x, "weight_2FM": weight}
    yield OpCase("gates far from zero", args, {"T": 3, "M": 8, "F": 8})


def linear(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (rows, size) in LINEAR_SHAPES.items():
        for outputs in (1, 40, 136):
            args = {
                "x_NK": normal(32, rows, size, dtype=dtype),
                "weight_OK": (normal(33, outputs, size) * size**-0.5).to(dtype),
            }
            yield OpCase(f"{label}, {outputs} outputs", args, {"T": rows})


def linear_add_rms_norm(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (rows, size) in LINEAR_SHAPES.items():
        for hidden in (8, 40, 136):
            args = {
                "x_NK": normal(34, rows, size, dtype=dtype),
                "weight_MK": (normal(35, hidden, size) * size**-0.5).to(dtype),
                "residual_NM": normal(36, rows, hidden, dtype=dtype),
                "norm_weight_M": normal(37, hidden, dtype=dtype),
                "eps": 1e-6,
            }
            dims = {"T": rows, "M": hidden, "F": size}
            yield OpCase(f"{label}, hidden size {hidden}", args, dims, mutates=("residual_NM",))
    x = normal(38, 5, 16, dtype=dtype)
    x[1, 3], x[3, 0] = torch.nan, torch.inf
    args = {
        "x_NK": x,
        "weight_MK": normal(39, 16, 16, dtype=dtype),
        "residual_NM": normal(40, 5, 16, dtype=dtype),
        "norm_weight_M": normal(41, 16, dtype=dtype),
        "eps": 1e-6,
    }
    dims = {"T": 5, "M": 16, "F": 16}
    yield OpCase("NaN and infinity in one row each", args, dims, mutates=("residual_NM",))
