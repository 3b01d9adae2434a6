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
    stream_linear_rope_write_unshared_kv,
    stream_linear_silu_mul,
)
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec, resolve
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Impl, Op

on_gpu = pytest.mark.device("cuda")
FEATURES, NUM_HEADS, NUM_KV_HEADS, DIM, EPS = 512, 4, 2, 128, 1e-6
NUM_LAYERS, NUM_REPLAYS, PAGE_SIZE, POSITION = 3, 50, 16, 1
TO_PAGES, TO_ROWS = stream_linear_rope_write_shared_kv, stream_linear_rope_write_unshared_kv
ALL = (stream_linear_silu_mul, TO_PAGES, TO_ROWS)


def found(op: Op[..., Any]) -> Impl[..., Any]:
    load_providers("cuda")
    return next(i for i in op.impls if (i.provider, i.device_kind) == ("gluon", "cuda"))


def normal(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16).cuda()


class Layers:
    """Layers whose queries stand for the attention's output, so that each product reads what the one before left.

    Keys and values go to pages, as a prefill's do, or with is_round to rows of beams.
    """

    def __init__(self, num_rows: int, hidden: int, *, is_round: bool) -> None:
        heads, outputs = NUM_HEADS * DIM, (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM
        shapes = [(hidden, heads), (2 * FEATURES, hidden), (hidden, FEATURES), (outputs, hidden)]
        self.weights = [
            [
                normal(10 * layer + i, *shape, scale=shape[1] ** -0.5)
                for i, shape in enumerate(shapes)
            ]
            for layer in range(NUM_LAYERS)
        ]
        self.norms = [1 + normal(50 + i, hidden, scale=0.1) for i in range(2)]
        self.head_norms = [1 + normal(52 + i, DIM, scale=0.1) for i in range(2)]
        self.start, self.x = normal(60, num_rows, hidden), normal(61, num_rows, heads)
        angles = normal(62, num_rows, DIM // 2).float().repeat(1, 2) * 30
        self.angles = (angles.cos(), angles.sin())
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(63)).cuda()
        self.position: tuple[int, ...]
        if is_round:
            self.slot, self.position = order.int(), (POSITION,)
            places = (num_rows + 1, POSITION + 2)
        else:
            self.slot, self.position = PAGE_SIZE + order, ()
            places = (1 + -(-num_rows // PAGE_SIZE), PAGE_SIZE)
        shape = (NUM_LAYERS, *places, NUM_KV_HEADS, DIM)
        self.kv = [torch.zeros(shape, dtype=torch.bfloat16).cuda() for _ in range(2)]
        if is_round:
            self.written = [rows[:, :num_rows, POSITION] for rows in self.kv]
        else:
            slots = slice(PAGE_SIZE, PAGE_SIZE + num_rows)
            self.written = [pages.flatten(1, 2)[:, slots] for pages in self.kv]
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
            places = (*(kv[layer] for kv in self.kv), self.slot, *self.position)
            stream = (self.residual, self.norms[1], EPS)
            q = projected(x_NF, down, *stream, qkv, *self.head_norms, *self.angles, *places)
            x = q.flatten(1)
            results += [x_NF, q]
        between()
        return [*results, self.residual.clone(), *(kv.clone() for kv in self.kv)]


@on_gpu
@pytest.mark.parametrize(
    ("num_rows", "hidden", "op"),
    [
        *((rows, 1024, TO_PAGES) for rows in (1, 130, 1040, 2100)),
        *((rows, 1024, TO_ROWS) for rows in (300, 512)),
        *((rows, 2048, TO_ROWS) for rows in (140, 256)),
    ],
)
def test_pairs_that_follow_each_other(
    num_rows: int, hidden: int, op: Op[..., Any], device: Device
) -> None:
    layers, held = Layers(num_rows, hidden, is_round=op is TO_ROWS), list[torch.Tensor]()
    own = found(stream_linear_silu_mul).fn, found(op).fn
    apart = layers.run(*own, torch.cuda.synchronize)
    expected = layers.run(stream_linear_silu_mul.reference, op.reference, lambda: None)
    tolerance = TOLERANCES[torch.bfloat16]
    for got, want in zip(apart, expected, strict=True):
        # layers that follow each other carry the other's rounding on
        torch.testing.assert_close(got, want, atol=4 * tolerance.atol, rtol=4 * tolerance.rtol)

    def run() -> None:
        held[:] = layers.run(*own, lambda: None)

    run()
    torch.cuda.synchronize()
    graph = device.capture("pairs", run)
    for _ in range(NUM_REPLAYS):
        for result in (*held, *layers.written):
            result.fill_(torch.nan)
        torch.cuda.synchronize()
        with device.segment("pairs"):
            graph.replay()
        device.synchronize()
        assert all(torch.equal(got, want) for got, want in zip(held, apart, strict=True))


@on_gpu
@pytest.mark.parametrize(("num_rows", "hidden"), [(300, 1024), (200, 2048)])
def test_rows_without_a_norm_stay_their_own(num_rows: int, hidden: int, device: Device) -> None:
    """Zeros, squares beyond fp32, infinity and NaN give what the references give, each in its row alone."""
    layers = Layers(num_rows, hidden, is_round=True)
    for values in (layers.start, layers.x):
        values[2], values[num_rows - 1] = 0, 0
    layers.start[70], layers.start[71, 5], layers.x[72, 3] = 1e30, torch.inf, torch.nan
    expected = layers.run(stream_linear_silu_mul.reference, TO_ROWS.reference, lambda: None)
    found_here = layers.run(found(stream_linear_silu_mul).fn, found(TO_ROWS).fn, lambda: None)
    tolerance = TOLERANCES[torch.bfloat16]
    atol, rtol = 4 * tolerance.atol, 4 * tolerance.rtol
    for got, want in zip(found_here, expected, strict=True):
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol, equal_nan=True)
    inner, queries = found_here[:2]
    assert inner[[2, 70, num_rows - 1]].count_nonzero() == 0
    assert queries[[2, num_rows - 1]].isfinite().all()
    lost = inner.isnan()
    assert lost[[71, 72]].all()
    assert int(lost.sum()) == 2 * FEATURES


@on_gpu
@pytest.mark.parametrize("op", ALL, ids=lambda op: str(op.name))
@pytest.mark.parametrize(
    ("dtype", "dims", "reason"),
    [
        (torch.float16, {}, "overflow"),
        (torch.bfloat16, {"T": 513}, "tokens of a prefill must be"),
        (torch.bfloat16, {"T": 2048, "M": 1024}, "tokens of a prefill must be"),
        (
            torch.bfloat16,
            {"T": 1024, "M": 2048},
            "tokens of a prefill must be from 129 to 256 where",
        ),
        (torch.bfloat16, {"N": 1024, "max_rows": 512}, "rows of a round must be"),
        (torch.bfloat16, {"T": 1024, "M": 1000}, "M must be"),
        (torch.bfloat16, {"T": 256, "M": 2112}, "M must be"),
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
@pytest.mark.parametrize("op", ALL, ids=lambda op: str(op.name))
def test_rows_that_pairs_are_faster_with(op: Op[..., Any]) -> None:
    model = {"F": 3072, "Q": 16, "G": 8, "D": 128}

    def provider(rows: int, hidden: int, *, is_round: bool) -> str:
        dims = {"T": rows, "N": rows, "M": hidden, **model, **({"max_rows": 9} if is_round else {})}
        spec = OpSpec("cuda", torch.bfloat16, "sm_90", dims)
        return resolve(op, spec, allow_reference=False).provider

    few = {1024: (256, 257, 512, 513), 2048: (128, 129, 256, 257)}
    for hidden, sizes in few.items():
        for is_round in (False, True):
            names = [provider(rows, hidden, is_round=is_round) for rows in sizes]
            assert names == ["parts", "gluon", "gluon", "parts"]
    many = (1023, 1024, 2047, 2048)
    names = [provider(rows, 1024, is_round=False) for rows in many]
    assert names == ["parts", "gluon", "gluon", "parts"]
    assert {provider(rows, 1024, is_round=True) for rows in many} == {"parts"}
    assert {provider(rows, 2048, is_round=False) for rows in many} == {"parts"}
    assert found(op).accepts(OpSpec("cuda", torch.bfloat16, "sm_90")) is None
    assert found(op).accepts(OpSpec("cuda", torch.bfloat16, "sm_90", {"max_rows": 64})) is None
