"""Products that start before the kernel in front of them has ended, and read from many cores at once.

What must hold beside parity: whoever writes their inputs right before, they read what he wrote, in a captured graph too; and
the same inputs give the same bits every time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from xgr_runtime.hal.ops.activation import linear_silu_mul
from xgr_runtime.hal.ops.linear import linear_add_rms_norm
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec, resolve
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Op

on_gpu = pytest.mark.device("cuda")
SIZE, FEATURES, EPS = 256, 512, 1e-6
NUM_LAYERS, NUM_ADDENDS = 6, 2048
NUM_REPLAYS, NUM_REPEATS = 50, 50


def provider(op: Op[..., Any], name: str = "gluon") -> Callable[..., Any]:
    load_providers("cuda")
    return next(i.fn for i in op.impls if (i.provider, i.device_kind) == (name, "cuda"))


def normal(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16).cuda()


class Layers:
    """Layers whose input is written right in front of the product, every time by something else."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.sources = [normal(seed, num_rows, SIZE) for seed in range(NUM_LAYERS)]
        self.gate_up = normal(10, 2 * FEATURES, SIZE, scale=SIZE**-0.5)
        self.down = normal(11, SIZE, FEATURES, scale=FEATURES**-0.5)
        self.start, self.norm = normal(12, num_rows, SIZE), normal(13, SIZE)
        self.x, self.residual = torch.empty_like(self.start), torch.empty_like(self.start)
        # zeros but for the source: a sum that takes long and writes at its end
        self.addends = torch.zeros(NUM_ADDENDS, num_rows * SIZE, dtype=torch.bfloat16).cuda()
        make_stream: Any = torch.cuda.Stream
        self.side = make_stream()

    def write_input(self, layer: int) -> None:
        source, how = self.sources[layer], layer % 4
        if how == 0:
            self.x.copy_(source)
        elif how == 1:
            self.addends.zero_()
            self.addends[layer] = source.flatten()
            torch.sum(self.addends, 0, out=self.x.view(-1))
        elif how == 2:
            self.x.zero_()
            self.x += source
        else:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                torch.mul(source, 1.0, out=self.x)
            torch.cuda.current_stream().wait_stream(self.side)

    def run(
        self, gated: Callable[..., Any], normed: Callable[..., Any], between: Callable[[], None]
    ) -> list[torch.Tensor]:
        results = []
        for layer in range(NUM_LAYERS):
            self.write_input(layer)
            between()
            x_NF = gated(self.x, self.gate_up)
            between()
            self.residual.copy_(self.start)
            between()
            out_NM = normed(x_NF, self.down, self.residual, self.norm, EPS)
            between()
            results += [x_NF, out_NM, self.residual.clone()]
            # rows of the next layer are what this one wrote last, with nobody else in between
            again_NF = gated(out_NM, self.gate_up)
            between()
            results.append(normed(again_NF, self.down, self.residual, self.norm, EPS))
            between()
        return results


@on_gpu
@pytest.mark.parametrize(
    ("num_rows", "name"),
    [(5, "gluon"), (64, "gluon"), (128, "gluon"), (5, "torch"), (1100, "torch")],
)
def test_early_starts_read_what_was_written_right_before(
    num_rows: int, name: str, device: Device
) -> None:
    layers, held = Layers(num_rows), list[torch.Tensor]()
    own = provider(linear_silu_mul), provider(linear_add_rms_norm, name)
    apart = layers.run(*own, torch.cuda.synchronize)
    references = linear_silu_mul.reference, linear_add_rms_norm.reference
    tolerance = TOLERANCES[torch.bfloat16]
    for got, expected in zip(apart, layers.run(*references, lambda: None), strict=True):
        # layers that follow each other carry the other's rounding on
        torch.testing.assert_close(got, expected, atol=3 * tolerance.atol, rtol=3 * tolerance.rtol)

    def run() -> None:
        held[:] = layers.run(*own, lambda: None)

    run()
    torch.cuda.synchronize()
    graph = device.capture("products", run)
    for _ in range(NUM_REPLAYS):
        for result in held:
            result.fill_(torch.nan)
        torch.cuda.synchronize()
        with device.segment("products"):
            graph.replay()
        device.synchronize()
        assert all(torch.equal(got, want) for got, want in zip(held, apart, strict=True))


@on_gpu
@pytest.mark.parametrize(
    ("rows", "name"), [(512, "parts"), (1023, "parts"), (1024, "torch"), (40_000, "torch")]
)
def test_many_rows_are_added_where_the_stream_lies(rows: int, name: str) -> None:
    spec = OpSpec("cuda", torch.bfloat16, "sm_90", {"T": rows, "M": 2048, "F": 6144})
    assert resolve(linear_add_rms_norm, spec, allow_reference=False).provider == name


# hidden size, rows: columns and warpgroups of a tile, stages, parts, whether it leaves room
CHOSEN = {
    (1024, 32): {"out": (128, 1, 8, 8, True), "down": (64, 1, 12, 6, True), "gate": (64, 1, 8, 1, False)},
    (1024, 64): {"out": (128, 1, 8, 8, True), "down": (64, 1, 12, 6, True), "gate": (64, 1, 8, 1, False)},
    (1024, 128): {"out": (64, 1, 12, 2, True), "down": (64, 1, 12, 3, True), "gate": (32, 2, 8, 1, False)},
    (1024, 256): {"out": (64, 2, 8, 2, False), "down": (64, 2, 8, 3, False), "gate": (48, 2, 7, 1, True)},
    (1024, 512): {"gate": (96, 2, 5, 1, False), "pair": (64, 1, 5, 1, False)},
    (1024, 1024): {"gate": (96, 2, 5, 1, False), "pair": (64, 2, 4, 1, False)},
    (2048, 32): {"out": (128, 1, 8, 4, True), "down": (128, 1, 8, 6, True), "gate": (48, 1, 10, 1, True)},
    (2048, 64): {"out": (128, 1, 8, 4, True), "down": (128, 1, 8, 6, True), "gate": (48, 1, 10, 1, True)},
    (2048, 128): {"out": (64, 2, 8, 2, True), "down": (64, 2, 8, 4, True), "gate": (48, 2, 7, 1, True)},
    (2048, 256): {"gate": (96, 2, 5, 1, False), "pair": (64, 1, 5, 1, True)},
}  # fmt: skip


@on_gpu
@pytest.mark.parametrize(("hidden", "num_rows"), CHOSEN)
def test_products_are_cut_as_measured(hidden: int, num_rows: int) -> None:
    """The attention has 2,048 outputs, the feed-forward layer three times the hidden size."""
    load_providers("cuda")
    linear, matmul, stream = (
        import_module(f"xgr_ops.cuda.{name}") for name in ("linear", "matmul", "stream")
    )
    chosen = {
        "out": linear.tiles_in_parts(num_rows, hidden, 2048),
        "down": linear.tiles_in_parts(num_rows, hidden, 3 * hidden),
        "gate": matmul.gated_tiles(num_rows, 3 * hidden),
        "pair": stream.add_tiles(num_rows, hidden),
    }
    for what, expected in CHOSEN[hidden, num_rows].items():
        it = chosen[what]
        columns = it.columns + it.more
        assert (columns, it.warpgroups, it.stages, it.parts, it.is_light) == expected, what


@on_gpu
@pytest.mark.parametrize(
    ("num_rows", "size", "name"),
    [
        *((rows, 1024, "gluon") for rows in (1, 63, 65, 128, 200, 256, 300, 1030)),
        *((rows, 2048, "gluon") for rows in (63, 65, 128)),
        *((rows, 1024, "torch") for rows in (1, 300, 1030)),
    ],
)
def test_repeats_are_bit_identical(num_rows: int, size: int, name: str, device: Device) -> None:
    """One row count for every tile that is chosen; the sums are those of the reference."""
    features = 3 * size
    x, gate_up = (
        normal(1, num_rows, size),
        normal(2, 2 * features, size, scale=size**-0.5),
    )
    down, start, norm = (
        normal(3, size, features, scale=features**-0.5),
        normal(4, num_rows, size),
        normal(5, size),
    )

    def run(gated: Callable[..., Any], normed: Callable[..., Any]) -> list[torch.Tensor]:
        residual = start.clone()
        inner = gated(x, gate_up)
        return [inner, normed(inner, down, residual, norm, EPS), residual]

    own = provider(linear_silu_mul), provider(linear_add_rms_norm, name)
    first, tolerance = run(*own), TOLERANCES[torch.bfloat16]
    expected = run(linear_silu_mul.reference, linear_add_rms_norm.reference)
    for got, want in zip(first, expected, strict=True):
        torch.testing.assert_close(got, want, atol=3 * tolerance.atol, rtol=3 * tolerance.rtol)
    for _ in range(NUM_REPEATS):
        assert all(torch.equal(got, want) for got, want in zip(run(*own), first, strict=True))
