"""Products, norms and activations of a layer, and what precedes the first one, at the sizes of Qwen3-0.6B and 1.7B.

Rows: 512 and 4,096 are the beams of one request and of eight with 512 each, 8,192 the tokens of eight histories of 1,024,
40,000 those of eight of 5,000.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from tools._bench.floor import SHAPES, ModelShape
from tools._bench.op_work import OpWork, Place
from xgr_runtime.conformance.op_case import OpCase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROWS = (512, 4096, 8192)
MOST_ROWS = 40_000
# few: the beams of a small request, and its new tokens behind cached ones
BEGUN_ROWS = (32, 128, 512, 4096, MOST_ROWS)
VOCABULARY, CODES = 16_384, 8192  # more tokens cost no more: each row is somewhere else in memory
EPS = 1e-6
TINY = ModelShape(32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)


def works(place: Place) -> Iterator[OpWork]:
    """Each product at each number of rows, alone and with what follows it; norms and the activation."""
    for name, shape in {"tiny": TINY}.items() if place.is_tiny else SHAPES.items():
        for rows in (5,) if place.is_tiny else ROWS:
            yield from _products(place, name, shape, rows)
        rows = 5 if place.is_tiny else MOST_ROWS
        yield linear_silu(place, name, shape, rows)
        for count in (5,) if place.is_tiny else (4096, MOST_ROWS):
            yield from _norms(place, name, shape, count)
            yield _silu(place, name, shape, count)
        for count in (5,) if place.is_tiny else BEGUN_ROWS:
            yield _begun(place, name, shape, count)


def _products(place: Place, model: str, shape: ModelShape, rows: int) -> Iterator[OpWork]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes = {
        "qkv": (hidden, q + 2 * kv),
        "out": (q, hidden),
        "gate and up": (hidden, 2 * inner),
        "down": (inner, hidden),
    }
    for what, (size, out) in sizes.items():
        yield _linear(place, f"{model} {what}, {rows} rows", rows, size, out)
        if out == hidden:
            yield _linear_add_norm(place, f"{model} {what}, {rows} rows", rows, size, out)
    yield linear_silu(place, model, shape, rows)


def _weight(place: Place, seed: int, out: int, size: int) -> torch.Tensor:
    return place.normal(seed, out, size, scale=size**-0.5)


def _linear(place: Place, label: str, rows: int, size: int, out: int) -> OpWork:
    def draw(seed: int) -> OpCase:
        x = place.normal(seed, rows, size)
        args = {"x_NK": x, "weight_OK": _weight(place, seed + 1, out, size)}
        return OpCase(label, args, {"N": rows})

    elements = rows * size + out * size + rows * out
    return OpWork(
        "linear",
        label,
        draw,
        flops=2.0 * rows * size * out,
        num_bytes=place.dtype.itemsize * float(elements),
    )


def _linear_add_norm(place: Place, label: str, rows: int, size: int, out: int) -> OpWork:
    def draw(seed: int) -> OpCase:
        args = {
            "x_NK": place.normal(seed, rows, size),
            "weight_MK": _weight(place, seed + 1, out, size),
            "residual_NM": place.normal(seed + 2, rows, out),
            "norm_weight_M": 1 + place.normal(seed + 3, out, scale=0.1),
            "eps": EPS,
        }
        dims = {"T": rows, "N": rows, "M": out}
        return OpCase(label, args, dims, mutates=("residual_NM",), view=_with_residual)

    elements = rows * size + out * size + 3 * rows * out
    return OpWork(
        "linear_add_rms_norm",
        label,
        draw,
        flops=2.0 * rows * size * out,
        num_bytes=place.dtype.itemsize * float(elements),
    )


def _with_residual(args: Mapping[str, Any], result: Any) -> dict[str, torch.Tensor]:
    return {"result": result, "residual_NM": args["residual_NM"]}


def linear_silu(place: Place, model: str, shape: ModelShape, rows: int) -> OpWork:
    """The gated product of so many rows."""
    size, inner = shape.hidden_size, shape.intermediate_size
    label = f"{model}, {rows} rows"

    def draw(seed: int) -> OpCase:
        x = place.normal(seed, rows, size)
        args = {"x_NM": x, "weight_2FM": _weight(place, seed + 1, 2 * inner, size)}
        return OpCase(label, args, {"N": rows, "M": size, "F": inner})

    def by_torch(args: Mapping[str, Any]) -> Any:
        def call() -> Mapping[str, torch.Tensor]:
            gate, up = functional.linear(args["x_NM"], args["weight_2FM"]).chunk(2, dim=-1)
            return {"result": functional.silu(gate) * up}

        return call

    elements = rows * size + 2 * inner * size + rows * inner
    return OpWork(
        "linear_silu_mul",
        label,
        draw,
        flops=4.0 * rows * size * inner,
        num_bytes=place.dtype.itemsize * float(elements),
        peers={"torch, three kernels": by_torch},
    )


def _norms(place: Place, model: str, shape: ModelShape, rows: int) -> Iterator[OpWork]:
    size, label = shape.hidden_size, f"{model}, {rows} rows"
    dims = {"N": rows, "M": size}

    def draw(seed: int) -> OpCase:
        weight = 1 + place.normal(seed + 1, size, scale=0.1)
        args = {"x_NM": place.normal(seed, rows, size), "weight_M": weight, "eps": EPS}
        return OpCase(label, args, dims)

    def draw_add(seed: int) -> OpCase:
        args = {**draw(seed).args, "residual_NM": place.normal(seed + 2, rows, size)}
        return OpCase(label, args, dims, mutates=("residual_NM",), view=_with_residual)

    def by_torch(args: Mapping[str, Any]) -> Any:
        x, weight = args["x_NM"], args["weight_M"]
        return lambda: {"result": functional.rms_norm(x, (size,), weight, EPS)}

    num_bytes = place.dtype.itemsize * 2.0 * rows * size
    yield OpWork("rms_norm", label, draw, 0.0, num_bytes, {"torch": by_torch})
    yield OpWork("add_rms_norm", label, draw_add, 0.0, 2 * num_bytes)


def _begun(place: Place, model: str, shape: ModelShape, rows: int) -> OpWork:
    """Embeddings of codes, as a step has them, with their norm, cosines and sines."""
    size, dim, label = shape.hidden_size, shape.head_dim, f"{model}, {rows} rows"
    vocabulary, codes = (64, 32) if place.is_tiny else (VOCABULARY, CODES)

    def draw(seed: int) -> OpCase:
        code_T = place.permutation(seed, max(rows, codes))[:rows] % codes
        pair = torch.arange(dim // 2, device=place.device)
        args = {
            "embedding_VM": place.normal(seed + 1, vocabulary, size),
            "id_T": code_T.int(),
            "token_of_C": place.permutation(seed + 2, vocabulary)[:codes],
            "norm_weight_M": 1 + place.normal(seed + 3, size, scale=0.1),
            "eps": EPS,
            "position_T": torch.arange(rows, device=place.device),
            "frequency_D": (1e6 ** (-2.0 * pair / dim)).repeat(2),
        }
        return OpCase(label, args, {"T": rows, "N": rows, "M": size, "D": dim})

    # a row of the embedding is read at most once, whoever asks for it again
    elements = (2 * rows + min(rows, codes)) * size
    num_bytes = float(place.dtype.itemsize * elements + rows * (4 + 8 + 8 * dim))
    return OpWork("embedding_rms_norm_cos_sin", label, draw, 0.0, num_bytes)


def _silu(place: Place, model: str, shape: ModelShape, rows: int) -> OpWork:
    inner, label = shape.intermediate_size, f"{model}, {rows} rows"

    def draw(seed: int) -> OpCase:
        args = {"gate_up_N2F": place.normal(seed, rows, 2 * inner)}
        return OpCase(label, args, {"N": rows, "F": inner})

    return OpWork("silu_mul", label, draw, 0.0, place.dtype.itemsize * 3.0 * rows * inner)
