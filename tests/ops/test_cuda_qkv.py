"""Projections that start before the kernel in front of them has ended and store what they make by slots.

What must hold beside parity: inputs, angles and slots written right before are what is read and where it goes, in a captured
graph too, and every way to cut the product stores the same keys and values up to rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from xgr_runtime.hal.ops.fused_attention import linear_rope_write_unshared_kv
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Impl

on_gpu = pytest.mark.device("cuda")
NUM_HEADS, NUM_KV_HEADS, DIM, EPS = 4, 2, 128, 1e-6
FEW_INPUTS, MANY_INPUTS = 256, 2048  # the latter are summed in parts where rows are few
NUM_LAYERS, NUM_REPLAYS = 4, 50


def found() -> Impl[..., Any]:
    load_providers("cuda")
    impls = linear_rope_write_unshared_kv.impls
    return next(i for i in impls if (i.provider, i.device_kind) == ("gluon", "cuda"))


def normal(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16).cuda()


class Layers:
    """Each layer's input, angles and slots are written right in front of its projections, over those of the one before."""

    def __init__(self, num_rows: int, size: int) -> None:
        outputs = (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM
        self.weight = normal(1, outputs, size, scale=size**-0.5)
        self.norms = [1 + normal(seed, DIM, scale=0.1) for seed in (2, 3)]
        self.sources = [normal(10 + i, num_rows, size) for i in range(NUM_LAYERS)]
        self.angles = [
            normal(20 + i, num_rows, DIM // 2).float().repeat(1, 2) * 30 for i in range(NUM_LAYERS)
        ]
        orders = [
            torch.randperm(num_rows, generator=torch.Generator().manual_seed(i))
            for i in range(NUM_LAYERS)
        ]
        self.slots = [order.to(torch.int32).cuda() for order in orders]
        self.x, self.slot = torch.zeros_like(self.sources[0]), torch.zeros_like(self.slots[0])
        self.cos, self.sin = (torch.zeros_like(self.angles[0]) for _ in range(2))
        shape = (num_rows + 1, 2, NUM_KV_HEADS, DIM)
        self.k, self.v = (torch.zeros(shape, dtype=torch.bfloat16).cuda() for _ in range(2))

    def run(self, fn: Callable[..., Any], between: Callable[[], None]) -> list[torch.Tensor]:
        results = []
        for layer in range(NUM_LAYERS):
            torch.cos(self.angles[layer], out=self.cos)
            torch.sin(self.angles[layer], out=self.sin)
            self.slot.copy_(self.slots[layer])
            torch.mul(self.sources[layer], 1.0, out=self.x)
            between()
            angles, to = (self.cos, self.sin), (self.k, self.v, self.slot, layer % 2)
            q = fn(self.x, self.weight, *self.norms, EPS, *angles, *to)
            between()
            # the next one's slots come right behind this one's stores
            results += [q, self.k[:-1, layer % 2].clone(), self.v[:-1, layer % 2].clone()]
            between()
        return results


@on_gpu
@pytest.mark.parametrize(
    ("num_rows", "size"),
    [
        *((rows, FEW_INPUTS) for rows in (1, 40, 128, 300, 5000)),
        *((rows, MANY_INPUTS) for rows in (1, 40, 128)),
    ],
)
def test_early_starts_read_what_was_written_right_before(
    num_rows: int, size: int, device: Device
) -> None:
    layers, held, own = Layers(num_rows, size), list[torch.Tensor](), found().fn
    apart = layers.run(own, torch.cuda.synchronize)
    tolerance = TOLERANCES[torch.bfloat16]
    expected = layers.run(linear_rope_write_unshared_kv.reference, lambda: None)
    for got, want in zip(apart, expected, strict=True):
        # both round, each by as much as the tolerance allows
        torch.testing.assert_close(got, want, atol=2 * tolerance.atol, rtol=2 * tolerance.rtol)

    def run() -> None:
        held[:] = layers.run(own, lambda: None)

    run()
    torch.cuda.synchronize()
    graph = device.capture("projections", run)
    for _ in range(NUM_REPLAYS):
        for result in (*held, layers.k, layers.v):
            result.fill_(torch.nan)
        torch.cuda.synchronize()
        with device.segment("projections"):
            graph.replay()
        device.synchronize()
        assert all(torch.equal(got, want) for got, want in zip(held, apart, strict=True))


@on_gpu
@pytest.mark.parametrize("name", ["T", "N"])
@pytest.mark.parametrize("inputs", [None, 1024, 2048])
def test_rows_that_the_library_is_faster_with_are_left_to_it(
    name: str, inputs: int | None, device: Device
) -> None:
    def is_taken(num_rows: int) -> bool:
        dims = {name: num_rows, "D": DIM, **({} if inputs is None else {"M": inputs})}
        return found().accepts(OpSpec("cuda", torch.bfloat16, "sm_90", dims=dims)) is None

    assert [is_taken(rows) for rows in (31, 32, 1024, 40000)] == [False, True, True, True]
    assert [is_taken(rows) for rows in (2048, 8192)] == [inputs != 2048] * 2
