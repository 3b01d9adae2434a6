"""A prefill of few tokens starts before the kernel in front has ended, and takes from it queries and new tokens' keys."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from xgr_runtime.hal.ops.attention import prefill_attention
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.hal.device import Device

NUM_HEADS, DIM, PAGE_SIZE = 8, 128, 128
NUM_LAYERS, NUM_REPLAYS = 5, 50


@pytest.mark.device("cuda")
@pytest.mark.parametrize("lengths", [[128], [256], [256, 128], [640]])
def test_queries_and_new_tokens_come_from_the_kernel_in_front(
    lengths: list[int], device: Device
) -> None:
    """Layers one right behind the other, the results of each the next one's queries, keys and values: all tokens are new."""
    load_providers("cuda")
    found = next(i for i in prefill_attention.impls if i.provider == "gluon-short")
    num_tokens, starts = sum(lengths), [0, *itertools.accumulate(lengths)]
    dims = {"T": num_tokens, "H": len(lengths), "Q": NUM_HEADS, "G": NUM_HEADS, "D": DIM}
    dims["page_size"] = PAGE_SIZE
    reason = found.accepts(OpSpec("cuda", torch.bfloat16, device.capability, dims))
    if device.capability != "sm_90":
        assert reason is not None
        return
    assert reason is None, reason
    generator = torch.Generator().manual_seed(7)
    shape = (num_tokens, NUM_HEADS, DIM)
    first = torch.randn(shape, generator=generator).to(torch.bfloat16).cuda()
    table = torch.zeros(len(lengths), max(lengths) // PAGE_SIZE, dtype=torch.int32)
    for h, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        pages = range(start // PAGE_SIZE, (start + length) // PAGE_SIZE)
        table[h, : len(pages)] = torch.tensor(list(pages))
    arrays = (table, torch.tensor(starts), torch.tensor(lengths))
    sizes = [array.to(torch.int32).cuda() for array in arrays]
    bounds = (DIM**-0.5, max(lengths), max(lengths), tuple(starts), tuple(lengths))

    def attend(fn: Callable[..., torch.Tensor], states: torch.Tensor) -> torch.Tensor:
        pages = states.view(-1, PAGE_SIZE, NUM_HEADS, DIM)
        return fn(states, pages, pages, *sizes, *bounds)

    held = list[torch.Tensor]()

    def run(*, waits: bool) -> None:
        held.clear()
        states = first
        for _ in range(NUM_LAYERS):
            states = attend(found.fn, states)
            held.append(states)
            if waits:
                device.synchronize()

    run(waits=True)
    want = [states.clone() for states in held]
    again = attend(prefill_attention.reference, want[0])
    tolerance = TOLERANCES[torch.bfloat16]
    torch.testing.assert_close(want[1], again, atol=tolerance.atol, rtol=tolerance.rtol)
    graph = device.capture("attention", lambda: run(waits=False))
    for _ in range(NUM_REPLAYS):
        for states in held:
            states.fill_(torch.nan)
        torch.cuda.synchronize()
        with device.segment("attention"):
            graph.replay()
        device.synchronize()
        assert all(torch.equal(got, expected) for got, expected in zip(held, want, strict=True))
