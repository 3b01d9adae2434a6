"""Beams' attention on Hopper where rows are shared out unevenly, and where it starts before the kernel in front has ended.

Programs are counted by all rows together, as the host does not know how many each history has: each finds its own. A graph's
kernels read keys early, and what they take from the kernel in front when it has ended.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from xgr_runtime.hal.ops.fused_attention import beam_attention
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Impl

on_gpu = pytest.mark.device("cuda")
NUM_HEADS, NUM_KV_HEADS, DIM, PAGE_SIZE = 16, 8, 128, 128
NUM_OWN = (
    NUM_HEADS // NUM_KV_HEADS
)  # own tokens of a beam, so that own keys have the shape of results
NUM_LAYERS, NUM_REPLAYS, NUM_REPEATS = 6, 50, 10
# Rows and lengths of histories. The first two have more rows than warpgroups that could divide keys, the last two keys in parts.
SHARED_OUT: dict[str, tuple[list[int], list[int]]] = {
    "uneven, one without rows": (
        [64, 512, 3, 200, 0, 511, 33, 256],
        [1024, 300, 5, 900, 128, 1024, 129, 700],
    ),
    "equal, many": ([300] * 6, [640] * 6),
    "forty, a fifth of them without rows": (
        [7 * i % 23 * (i % 5 > 0) for i in range(40)],
        [37 * i % 700 + 1 for i in range(40)],
    ),
    "one beam each": ([1] * 70, [256] * 70),
    "the last without rows": ([2] * 31 + [0], [600] * 32),
    "none with rows": ([0, 0], [5, 700]),
    "only the last with rows": ([0, 0, 9], [5, 0, 700]),
    "alone and few": ([16], [1000]),
}
# So few that their histories' keys go to all cores; in the last one not even a tile of keys for each.
FEW: dict[str, tuple[list[int], list[int]]] = {
    "few, uneven": ([64, 3, 0, 61], [1024, 300, 5, 129]),
    "few, one of them without tokens": ([40, 24], [0, 700]),
    "few, all without tokens": ([5, 4], [0, 0]),
    "few of a long history": ([128], [3000]),
    "few of a short history": ([33], [63]),
}
SHARED_OUT_TO = [
    *(("gluon", name) for name in SHARED_OUT),
    *(("gluon-short", name) for name in ("alone and few", "none with rows", *FEW)),
]


def provider(name: str, rows: list[int], device: Device) -> Impl[..., Any] | None:
    """The provider of that name, or none where the GPU is of another generation, which it has to say itself."""
    load_providers("cuda")
    found = next(i for i in beam_attention.impls if (i.provider, i.device_kind) == (name, "cuda"))
    dims = {"N": sum(rows), "H": len(rows), "Q": NUM_HEADS, "G": NUM_KV_HEADS}
    dims |= {"D": DIM, "page_size": PAGE_SIZE}
    reason = found.accepts(OpSpec("cuda", torch.bfloat16, device.capability, dims))
    if device.capability != "sm_90":
        assert reason is not None
        return None
    assert reason is None, reason
    return found


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(torch.bfloat16).cuda()


class Inputs:
    """Histories in pages of random order, NaN behind their ends; queries and own tokens are given with a call."""

    def __init__(
        self,
        rows: list[int],
        lengths: list[int],
        page_size: int = PAGE_SIZE,
        num_own: int = NUM_OWN,
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        counts = [-(-length // page_size) for length in lengths]
        num_pages, self.num_rows, self.max_kv = sum(counts), sum(rows), max(1, *lengths)
        shape = (num_pages + 1, page_size, NUM_KV_HEADS, DIM)
        self.k, self.v = normal(generator, *shape), normal(generator, *shape)
        order = (torch.randperm(num_pages, generator=generator) + 1).tolist()
        table = torch.zeros(len(rows), max(1, *counts), dtype=torch.int32)
        for h, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            pages, order = order[:count], order[count:]
            table[h, :count] = torch.tensor(pages, dtype=torch.int32)
            for states in (self.k, self.v):
                if length % page_size:
                    states[pages[-1], length % page_size :] = torch.nan
        self.table, starts = table.cuda(), [0, *itertools.accumulate(rows)]
        self.starts = torch.tensor(starts, dtype=torch.int32).cuda()
        self.lengths = torch.tensor(lengths, dtype=torch.int32).cuda()
        self.slots = torch.randperm(self.num_rows, generator=generator).to(torch.int32).cuda()
        self.q = normal(generator, self.num_rows, NUM_HEADS, DIM)
        own = (self.num_rows, num_own, NUM_KV_HEADS, DIM)
        self.own = normal(generator, *own), normal(generator, *own)

    def call(
        self,
        fn: Callable[..., torch.Tensor],
        q: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor],
        max_rows: int,
        num_tokens: int = NUM_OWN,
    ) -> torch.Tensor:
        """What fn finds; the host's lengths, which it may not read, are wrong."""
        history = (self.k, self.v, self.table, self.starts, self.lengths)
        bounds = (DIM**-0.5, max_rows, self.max_kv, (1,) * len(self.lengths))
        return fn(q, *history, *own, self.slots, num_tokens, *bounds)


@on_gpu
@pytest.mark.parametrize(("by", "name"), SHARED_OUT_TO)
def test_however_rows_are_shared_out(by: str, name: str, device: Device) -> None:
    rows, lengths = {**SHARED_OUT, **FEW}[name]
    found = provider(by, rows, device)
    if found is None:
        return
    inputs, tolerance = Inputs(rows, lengths), TOLERANCES[torch.bfloat16]
    got = inputs.call(found.fn, inputs.q, inputs.own, max(rows))
    want = inputs.call(beam_attention.reference, inputs.q, inputs.own, max(rows))
    torch.testing.assert_close(got, want, atol=tolerance.atol, rtol=tolerance.rtol)
    for _ in range(NUM_REPEATS):
        again = inputs.call(found.fn, inputs.q, inputs.own, sum(rows))
        assert torch.equal(again, got), "a history may have more rows: the same bits"


@on_gpu
@pytest.mark.parametrize(
    ("by", "name"),
    [
        *(("gluon", name) for name in ("uneven, one without rows", "one beam each")),
        *((by, "alone and few") for by in ("gluon", "gluon-short")),
        *(("gluon-short", name) for name in ("few, uneven", "few of a short history")),
    ],
)
def test_queries_and_own_tokens_come_from_the_kernel_in_front(
    by: str, name: str, device: Device
) -> None:
    """Layers one right behind the other: each takes what the one before has found as queries and as own keys and values."""
    rows, lengths = {**SHARED_OUT, **FEW}[name]
    found = provider(by, rows, device)
    if found is None:
        return
    inputs, held = Inputs(rows, lengths), list[torch.Tensor]()

    def run(*, waits: bool) -> None:
        held.clear()
        q, own = inputs.q, inputs.own
        for _ in range(NUM_LAYERS):
            q = inputs.call(found.fn, q, own, max(rows))
            own = (q.view_as(own[0]), q.view_as(own[1]))
            held.append(q)
            if waits:
                device.synchronize()

    run(waits=True)
    want = [result.clone() for result in held]
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(want)), "layers differ"
    graph = device.capture("attention", lambda: run(waits=False))
    for _ in range(NUM_REPLAYS):
        for result in held:
            result.fill_(torch.nan)
        torch.cuda.synchronize()
        with device.segment("attention"):
            graph.replay()
        device.synchronize()
        assert all(torch.equal(got, expected) for got, expected in zip(held, want, strict=True))


@on_gpu
@pytest.mark.parametrize("page_size", [PAGE_SIZE, PAGE_SIZE // 2])
@pytest.mark.parametrize(("num_own", "num_tokens"), [(1, 1), (3, 2), (4, 4), (5, 1), (6, 6)])
def test_few_rows_with_any_number_of_own_tokens(
    num_own: int, num_tokens: int, page_size: int, device: Device
) -> None:
    """More of them than a join has room for are the other kernels', whatever the page."""
    rows, lengths = FEW["few, uneven"]
    found = provider("gluon-short", rows, device)
    if found is None:
        return
    inputs, tolerance = Inputs(rows, lengths, page_size, num_own), TOLERANCES[torch.bfloat16]
    for states in inputs.own:
        states[:, num_tokens:] = torch.nan  # nobody's yet
    args = (inputs.q, inputs.own, max(rows), num_tokens)
    want = inputs.call(beam_attention.reference, *args)
    got = inputs.call(found.fn, *args)
    torch.testing.assert_close(got, want, atol=tolerance.atol, rtol=tolerance.rtol)
