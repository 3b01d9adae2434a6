"""Pairs of products around the residual stream whose kernels start before those in front of them have ended.

What must hold beside parity: each reads what the one before wrote, stream and sums of squares, in a captured graph too, and
the same inputs give the same bits every time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from xgr_runtime.hal.ops.stream import (
    stream_linear_rope_write_shared_kv,
    stream_linear_silu_mul,
)
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Impl, Op

on_gpu = pytest.mark.device("cuda")
HIDDEN, FEATURES, NUM_HEADS, NUM_KV_HEADS, DIM, EPS = 1024, 512, 4, 2, 128, 1e-6
NUM_LAYERS, NUM_REPLAYS, PAGE_SIZE = 3, 50, 16
BOTH = (stream_linear_silu_mul, stream_linear_rope_write_shared_kv)


def found(op: Op[..., Any]) -> Impl[..., Any]:
    load_providers("cuda")
    return next(i for i in op.impls if (i.provider, i.device_kind) == ("gluon", "cuda"))


def normal(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16).cuda()


class Layers:
    """Layers whose queries stand for the attention's output, so that each product reads what the one before left."""

    def __init__(self, num_rows: int) -> None:
        heads, outputs = NUM_HEADS * DIM, (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM
        shapes = [(HIDDEN, heads), (2 * FEATURES, HIDDEN), (HIDDEN, FEATURES), (outputs, HIDDEN)]
        self.weights = [
            [
                normal(10 * layer + i, *shape, scale=shape[1] ** -0.5)
                for i, shape in enumerate(shapes)
            ]
            for layer in range(NUM_LAYERS)
        ]
        self.norms = [1 + normal(50 + i, HIDDEN, scale=0.1) for i in range(2)]
        self.head_norms = [1 + normal(52 + i, DIM, scale=0.1) for i in range(2)]
        self.start, self.x = normal(60, num_rows, HIDDEN), normal(61, num_rows, heads)
        angles = normal(62, num_rows, DIM // 2).float().repeat(1, 2) * 30
        self.angles = (angles.cos(), angles.sin())
        num_pages = 1 + -(-num_rows // PAGE_SIZE)
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(63))
        self.slot = (PAGE_SIZE + order).cuda()
        shape = (NUM_LAYERS, num_pages, PAGE_SIZE, NUM_KV_HEADS, DIM)
        self.pages = [torch.zeros(shape, dtype=torch.bfloat16).cuda() for _ in range(2)]
        self.residual = torch.empty_like(self.start)

    def run(
        self, gated: Callable[..., Any], projected: Callable[..., Any], between: Callable[[], None]
    ) -> list[torch.Tensor]:
        self.residual.copy_(self.start)
        x, results = self.x, list[torch.Tensor]()
        for layer, (out, gate_up, down, qkv) in enumerate(self.weights):
            between()
            x_NF = gated(x, out, self.residual, self.norms[0], EPS, gate_up)
            between()
            to = (*self.angles, *(pages[layer] for pages in self.pages), self.slot)
            stream = (self.residual, self.norms[1], EPS)
            q = projected(x_NF, down, *stream, qkv, *self.head_norms, *to)
            x = q.flatten(1)
            results += [x_NF, q]
        between()
        return [*results, self.residual.clone(), *(pages.clone() for pages in self.pages)]


@on_gpu
@pytest.mark.parametrize("num_rows", [1, 130, 1040, 2100])
def test_pairs_that_follow_each_other(num_rows: int, device: Device) -> None:
    layers, held = Layers(num_rows), list[torch.Tensor]()
    gated, projected = (found(op).fn for op in BOTH)
    apart = layers.run(gated, projected, torch.cuda.synchronize)
    expected = layers.run(BOTH[0].reference, BOTH[1].reference, lambda: None)
    tolerance = TOLERANCES[torch.bfloat16]
    for got, want in zip(apart, expected, strict=True):
        # layers that follow each other carry the other's rounding on
        torch.testing.assert_close(got, want, atol=4 * tolerance.atol, rtol=4 * tolerance.rtol)

    def run() -> None:
        held[:] = layers.run(gated, projected, lambda: None)

    run()
    torch.cuda.synchronize()
    graph = device.capture("pairs", run)
    for _ in range(NUM_REPLAYS):
        for result in (*held, *layers.pages):
            result.fill_(torch.nan)
        for pages in layers.pages:
            pages[:, 0] = 0  # nobody writes there
            pages.flatten(1, 2)[:, PAGE_SIZE + num_rows :] = 0
        torch.cuda.synchronize()
        with device.segment("pairs"):
            graph.replay()
        device.synchronize()
        assert all(torch.equal(got, want) for got, want in zip(held, apart, strict=True))


@on_gpu
@pytest.mark.parametrize("op", BOTH, ids=lambda op: str(op.name))
@pytest.mark.parametrize(
    ("dtype", "dims", "reason"),
    [
        (torch.float16, {}, "overflow"),
        (torch.bfloat16, {"T": 512}, "T must be"),
        (torch.bfloat16, {"T": 2048, "M": 1024}, "T must be"),
        (torch.bfloat16, {"T": 1024, "M": 1024, "max_rows": 512}, "rounds"),
        (torch.bfloat16, {"T": 1024, "M": 1000}, "M must be"),
        (torch.bfloat16, {"T": 1024, "M": 2048}, "M must be"),
        (torch.bfloat16, {"T": 1024, "M": 1024, "F": 3075}, "F"),
    ],
)
def test_what_is_refused(
    op: Op[..., Any], dtype: torch.dtype, dims: dict[str, int], reason: str
) -> None:
    refusal = found(op).accepts(OpSpec("cuda", dtype, "sm_90", dims))
    assert refusal is not None
    assert reason in refusal


@on_gpu
@pytest.mark.parametrize("op", BOTH, ids=lambda op: str(op.name))
def test_what_is_taken(op: Op[..., Any]) -> None:
    dims = {"T": 1024, "M": 1024, "F": 3072, "Q": 16, "G": 8, "D": 128}
    assert found(op).accepts(OpSpec("cuda", torch.bfloat16, "sm_90", dims)) is None
    assert found(op).accepts(OpSpec("cuda", torch.bfloat16, "sm_90")) is None
