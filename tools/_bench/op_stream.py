"""Pairs of products around the residual stream: a call of the second product with the first one in front.

Rows: 1,024 and 8,192, the tokens of one history and of eight; pages take those of eight alone. Of a round: the beams of one
request, as many as each model's pairs are bound for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tools._bench.floor import SHAPES, ModelShape
from tools._bench.op_cache import linear_rope_write_shared, linear_rope_write_unshared
from tools._bench.op_products import EPS, TINY, linear_silu
from tools._bench.op_rounding import stream_silu_noise
from tools._bench.op_work import OpWork, Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from xgr_runtime.conformance.op_case import OpCase

ROWS = (1024, 8192)
BEAMS = {1024: 512, 2048: 256}  # by hidden size


def works(place: Place) -> Iterator[OpWork]:
    """Of one layer: from the attention to the feed-forward layer's inner rows, and from those to the next attention."""
    for name, shape in {"tiny": TINY}.items() if place.is_tiny else SHAPES.items():
        hidden, inner = shape.hidden_size, shape.intermediate_size
        beams = 7 if place.is_tiny else BEAMS[hidden]
        for rows in (5,) if place.is_tiny else ROWS:
            yield _gated(place, name, shape, rows)
        yield _gated(place, name, shape, beams, is_round=True)
        second, rows = linear_rope_write_shared(place, hidden), 10 if place.is_tiny else ROWS[-1]
        names = {"x_TM": "x_TK", "residual": "residual_TM", "weight_OM": "qkv_weight_OM"}
        yield _pair(place, second, names, (rows, inner, hidden))
        second = linear_rope_write_unshared(place, hidden, beams)
        names = {"x_NM": "x_NK", "residual": "residual_NM", "weight_OM": "qkv_weight_OM"}
        yield _pair(place, second, names, (beams, inner, hidden), is_round=True)


def _gated(
    place: Place, name: str, shape: ModelShape, rows: int, *, is_round: bool = False
) -> OpWork:
    second, inputs = linear_silu(place, name, shape, rows), shape.num_heads * shape.head_dim
    names = {"x_NM": "x_NK", "residual": "residual_NM", "weight_2FM": "gate_up_2FM"}
    pair = _pair(place, second, names, (rows, inputs, shape.hidden_size), is_round=is_round)
    return replace(pair, noise=stream_silu_noise)


def _pair(
    place: Place,
    second: OpWork,
    names: Mapping[str, str],
    sizes: tuple[int, int, int],
    *,
    is_round: bool = False,
) -> OpWork:
    """names: of the second's input, of the stream and of the second's weight, as the pair calls them. sizes: rows, inputs, hidden size."""
    rows, inputs, hidden = sizes
    (_, x_name), (_, residual_name), (old_weight, weight_name) = names.items()

    def draw(seed: int) -> OpCase:
        case = second.draw(seed)
        args = {name: arg for name, arg in case.args.items() if name not in names}
        added = {
            x_name: place.normal(seed + 20, rows, inputs),
            "weight_MK": place.normal(seed + 21, hidden, inputs, scale=inputs**-0.5),
            residual_name: place.normal(seed + 22, rows, hidden),
            "norm_weight_M": 1 + place.normal(seed + 23, hidden, scale=0.1),
            "eps": EPS,
            weight_name: case.args[old_weight],
        }

        def view(args: Mapping[str, Any], result: Any) -> dict[str, torch.Tensor]:
            return {**case.view(dict(args), result), residual_name: args[residual_name]}

        written = (*case.mutates, residual_name)
        dims = {**case.dims, "T": rows, "M": hidden, **({"max_rows": rows} if is_round else {})}
        return replace(case, args={**args, **added}, dims=dims, mutates=written, view=view)

    # the second product's rows are neither written nor read; the stream is both
    elements = rows * inputs + hidden * inputs + rows * hidden
    return OpWork(
        f"stream_{second.op}",
        second.label,
        draw,
        flops=second.flops + 2.0 * rows * inputs * hidden,
        num_bytes=second.num_bytes + place.dtype.itemsize * float(elements),
    )
