"""Beams' attention by warpgroups where rows are shared out unevenly, and where it starts before the kernel in front has ended.

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
    "only the last with rows": ([0, 0, 9], [5, 0, 700]),
    "alone and few": ([16], [1000]),
}


def provider(num_rows: int, device: Device) -> Impl[..., Any] | None:
    """That of warpgroups, or none where the GPU is of another generation, which it has to say itself."""
    load_providers("cuda")
    found = next(
        i for i in beam_attention.impls if (i.provider, i.device_kind) == ("gluon", "cuda")
    )
    dims = {"N": num_rows, "Q": NUM_HEADS, "G": NUM_KV_HEADS, "D": DIM, "page_size": PAGE_SIZE}
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

    def __init__(self, rows: list[int], lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(5)
        counts = [-(-length // PAGE_SIZE) for length in lengths]
        num_pages, self.num_rows, self.max_kv = sum(counts), sum(rows), max(lengths)
        shape = (num_pages + 1, PAGE_SIZE, NUM_KV_HEADS, DIM)
        self.k, self.v = normal(generator, *shape), normal(generator, *shape)
        order = (torch.randperm(num_pages, generator=generator) + 1).tolist()
        table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
        for h, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            pages, order = order[:count], order[count:]
            table[h, :count] = torch.tensor(pages, dtype=torch.int32)
            for states in (self.k, self.v):
                if length % PAGE_SIZE:
                    states[pages[-1], length % PAGE_SIZE :] = torch.nan
        self.table, starts = table.cuda(), [0, *itertools.accumulate(rows)]
        self.starts = torch.tensor(starts, dtype=torch.int32).cuda()
        self.lengths = torch.tensor(lengths, dtype=torch.int32).cuda()
        self.slots = torch.randperm(self.num_rows, generator=generator).to(torch.int32).cuda()
        self.q = normal(generator, self.num_rows, NUM_HEADS, DIM)
        own = (self.num_rows, NUM_OWN, NUM_KV_HEADS, DIM)
        self.own = normal(generator, *own), normal(generator, *own)

    def call(
        self,
        fn: Callable[..., torch.Tensor],
        q: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor],
        max_rows: int,
    ) -> torch.Tensor:
        """What fn finds; the host's lengths, which it may not read, are wrong."""
        history = (self.k, self.v, self.table, self.starts, self.lengths)
        bounds = (DIM**-0.5, max_rows, self.max_kv, (1,) * len(self.lengths))
        return fn(q, *history, *own, self.slots, NUM_OWN, *bounds)


@on_gpu
@pytest.mark.parametrize("name", SHARED_OUT)
def test_however_rows_are_shared_out(name: str, device: Device) -> None:
    rows, lengths = SHARED_OUT[name]
    found = provider(sum(rows), device)
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
@pytest.mark.parametrize("name", ["uneven, one without rows", "one beam each", "alone and few"])
def test_queries_and_own_tokens_come_from_the_kernel_in_front(name: str, device: Device) -> None:
    """Layers one right behind the other: each takes what the one before has found as queries and as own keys and values."""
    rows, lengths = SHARED_OUT[name]
    found = provider(sum(rows), device)
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
