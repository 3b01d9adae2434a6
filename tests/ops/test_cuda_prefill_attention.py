"""A prefill of few tokens starts before the kernel in front has ended, and takes from it queries and new tokens' keys.

What is cached it reads earlier: whole tiles of keys before the first new token, while that kernel still writes the others. One of
more tokens, whose keys two warpgroups divide, reads lengths alone so early.
"""

from __future__ import annotations

import itertools
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from xgr_runtime.hal.ops.attention import prefill_attention
from xgr_runtime.hal.ops.fused_attention import linear_rope_write_shared_kv
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Impl, Op

on_gpu = pytest.mark.device("cuda")
NUM_HEADS, DIM, PAGE_SIZE = 8, 128, 128
NUM_LAYERS, NUM_REPLAYS = 5, 50
BUCKET_ROWS = 128
# Of the queries' norm: a token then attends to itself about as much as to all that is cached.
QUERY_NORM, EPS = 0.7, 1e-6


def provider(op: Op[..., Any], name: str, device: Device, **dims: int) -> Impl[..., Any] | None:
    """The provider of that name, or none where the GPU is of another generation, which it has to say itself."""
    load_providers("cuda")
    found = next(i for i in op.impls if (i.provider, i.device_kind) == (name, "cuda"))
    dims = {"Q": NUM_HEADS, "G": NUM_HEADS, "D": DIM, "page_size": PAGE_SIZE} | dims
    reason = found.accepts(OpSpec("cuda", torch.bfloat16, device.capability, dims))
    if device.capability != "sm_90":
        assert reason is not None
        return None
    assert reason is None, reason
    return found


def check_replays(
    device: Device,
    run: Callable[[], None],
    held: list[torch.Tensor],
    want: list[torch.Tensor],
    forget: Callable[[], None],
) -> None:
    """run, captured, puts results into `held`, and these are `want` at every replay. forget: what a replay has to write anew."""
    graph = device.capture("attention", run)
    for _ in range(NUM_REPLAYS):
        for states in held:
            states.fill_(torch.nan)
        forget()
        torch.cuda.synchronize()
        with device.segment("attention"):
            graph.replay()
        device.synchronize()
        assert all(torch.equal(got, expected) for got, expected in zip(held, want, strict=True))


@on_gpu
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *(("gluon-short", lengths) for lengths in ([128], [256], [256, 128], [640])),
        *(("gluon", lengths) for lengths in ([1024], [1152], [896, 512], [3072, 1024])),
    ],
)
def test_queries_and_new_tokens_come_from_the_kernel_in_front(
    name: str, lengths: list[int], device: Device
) -> None:
    """Layers one right behind the other, the results of each the next one's queries, keys and values: all tokens are new."""
    num_tokens, starts = sum(lengths), [0, *itertools.accumulate(lengths)]
    sizes = {"T": num_tokens, "H": len(lengths)}
    found = provider(prefill_attention, name, device, **sizes)
    if found is None:
        return
    generator = torch.Generator().manual_seed(7)
    shape = (num_tokens, NUM_HEADS, DIM)
    first = torch.randn(shape, generator=generator).to(torch.bfloat16).cuda()
    table = torch.zeros(len(lengths), max(lengths) // PAGE_SIZE, dtype=torch.int32)
    for h, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        pages = range(start // PAGE_SIZE, (start + length) // PAGE_SIZE)
        table[h, : len(pages)] = torch.tensor(list(pages))
    arrays = (table, torch.tensor(starts), torch.tensor(lengths))
    arrays_there = [array.to(torch.int32).cuda() for array in arrays]
    bounds = (DIM**-0.5, max(lengths), max(lengths), tuple(starts), tuple(lengths))

    def attend(fn: Callable[..., torch.Tensor], states: torch.Tensor) -> torch.Tensor:
        pages = states.view(-1, PAGE_SIZE, NUM_HEADS, DIM)
        return fn(states, pages, pages, *arrays_there, *bounds)

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
    check_replays(device, lambda: run(waits=False), held, want, lambda: None)


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16).cuda()


class CachedLayers:
    """One history in pages of random order, new tokens behind cached ones; each layer has its own pages, as in a model.

    Values lie around another number in each page, and far off right in front of the new ones, so that it is seen when a tile or
    that token is left out.
    """

    def __init__(self, num_new: int, num_cached: int) -> None:
        generator = torch.Generator().manual_seed(3)
        length, size = num_cached + num_new, NUM_HEADS * DIM
        num_pages = -(-length // PAGE_SIZE)
        order = torch.randperm(num_pages, generator=generator) + 1
        self.slots = (order[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten().cuda()
        self.new, self.behind = self.slots[num_cached:length], self.slots[length:]
        shape = (NUM_LAYERS, num_pages + 1, PAGE_SIZE, NUM_HEADS, DIM)
        self.k, self.v = normal(generator, *shape), normal(generator, *shape)
        self.v += torch.linspace(-4.0, 4.0, num_pages + 1).view(-1, 1, 1, 1).cuda()
        self.v.flatten(1, 2)[:, self.slots[num_cached - 1]] = 300.0
        for states in (self.k, self.v):
            states.flatten(1, 2)[:, self.behind] = torch.nan
        self.forget()
        heads, values = (normal(generator, size, size, scale=size**-0.5) for _ in range(2))
        self.weight = torch.cat((heads, heads, values))  # keys like queries: a token finds itself
        norms = (torch.full((DIM,), scale).to(torch.bfloat16).cuda() for scale in (QUERY_NORM, 1.0))
        angles = torch.rand(num_new, DIM // 2, generator=generator).repeat(1, 2) * 30
        self.ending = (*norms, EPS, angles.cos().cuda(), angles.sin().cuda())
        self.x = normal(generator, num_new, size)
        self.sizes = [
            torch.tensor(numbers, dtype=torch.int32).cuda()
            for numbers in ([order.tolist()], [0, num_new], [length])
        ]
        self.bounds = (DIM**-0.5, num_new, length, (0, num_new), (length,))

    def forget(self) -> None:
        """New tokens' keys and values."""
        for states in (self.k, self.v):
            states.flatten(1, 2)[:, self.new] = torch.nan

    def attend(self, fn: Callable[..., torch.Tensor], q: torch.Tensor, layer: int) -> torch.Tensor:
        return fn(q, self.k[layer], self.v[layer], *self.sizes, *self.bounds)

    def run(
        self, project: Callable[..., torch.Tensor], attend: Callable[..., torch.Tensor]
    ) -> list[torch.Tensor]:
        """Queries and results of each layer; the results are the next one's input."""
        x, found = self.x, list[torch.Tensor]()
        for layer in range(NUM_LAYERS):
            q = project(x, self.weight, *self.ending, self.k[layer], self.v[layer], self.new)
            out = self.attend(attend, q, layer)
            x = out.flatten(1)
            found += (q, out)
        return found


@on_gpu
@pytest.mark.parametrize(
    ("name", "num_new", "num_cached"),
    [
        ("gluon-short", 24, 1000),
        ("gluon-short", 100, 900),
        ("gluon", 1030, 200),
        ("gluon", 3300, 200),
    ],
)
def test_cached_tokens_are_read_early_and_new_ones_when_they_are_there(
    name: str, num_new: int, num_cached: int, device: Device
) -> None:
    """The first new token lies inside a tile of keys; the kernel in front writes new tokens' keys and values, and queries."""
    dims = {"T": max(BUCKET_ROWS, num_new), "H": 1, "M": NUM_HEADS * DIM}
    project = provider(linear_rope_write_shared_kv, "gluon", device, **dims)
    found = provider(prefill_attention, name, device, **dims)
    if project is None or found is None:
        return
    layers, held = CachedLayers(num_new, num_cached), list[torch.Tensor]()
    fns: tuple[Callable[..., torch.Tensor], ...] = (project.fn, found.fn)

    def alone(fn: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        torch.cuda.synchronize()
        return fn(*args)

    want = layers.run(*(partial(alone, fn) for fn in fns))
    tolerance = TOLERANCES[torch.bfloat16]
    for layer, (q, out) in enumerate(zip(want[::2], want[1::2], strict=True)):
        expected = layers.attend(prefill_attention.reference, q, layer)
        torch.testing.assert_close(out, expected, atol=tolerance.atol, rtol=tolerance.rtol)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(want[1::2])), "layers differ"

    def run() -> None:
        held[:] = layers.run(*fns)

    check_replays(device, run, held, want, layers.forget)


# New tokens of each history, lengths, (query heads, KV heads, head dim), rows of no history.
DIVIDED: dict[str, tuple[list[int], list[int], tuple[int, int, int], int]] = {
    "a head alone": ([512], [640], (16, 16, 128), 0),
    "a group of 64": ([140], [200], (64, 1, 64), 2),
    "ends inside a tile": ([513], [513], (16, 8, 128), 127),
    "behind cached ones": ([700], [1003], (16, 8, 128), 0),
    "one empty": ([300, 0, 333], [400, 0, 1001], (16, 8, 128), 7),
    "short ones": ([1, 2, 63, 64, 65, 330], [1, 2, 63, 64, 65, 330], (16, 8, 128), 19),
    "many": ([13] * 40, [77] * 40, (16, 8, 64), 0),
}


@on_gpu
@pytest.mark.parametrize("name", DIVIDED)
def test_divided_prefills_of_any_shape(name: str, device: Device) -> None:
    """Against the reference; keys behind a history's end are NaN, rows of no history come back as zeros, repeats are alike."""
    new, lengths, (num_heads, num_kv_heads, dim), padding = DIVIDED[name]
    dims = {"T": sum(new) + padding, "H": len(new), "Q": num_heads, "G": num_kv_heads, "D": dim}
    if provider(prefill_attention, "gluon", device, **dims) is None:
        return
    launch = import_module("xgr_ops.cuda.divided_prefill")
    generator = torch.Generator().manual_seed(11)
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    shape = (sum(counts) + 1, PAGE_SIZE, num_kv_heads, dim)
    pages = [normal(generator, *shape) for _ in range(2)]
    order = torch.randperm(sum(counts), generator=generator) + 1
    table = torch.zeros(len(new), max(counts), dtype=torch.int32)
    for h, (count, own) in enumerate(zip(counts, torch.split(order, counts), strict=True)):
        table[h, :count] = own
        if lengths[h] % PAGE_SIZE:
            for states in pages:
                states[int(own[-1]), lengths[h] % PAGE_SIZE :] = torch.nan
    for states in pages:
        states[0] = torch.nan
    q = normal(generator, sum(new) + padding, num_heads, dim)
    starts = (0, *itertools.accumulate(new))
    sizes = [torch.tensor(n, dtype=torch.int32).cuda() for n in (table.tolist(), starts, lengths)]
    arrays = (q, pages[0], pages[1], sizes[0], sizes[1], sizes[2], dim**-0.5)
    results = [
        launch.launch_divided_prefill_attention(*arrays, launch.DividedTiles()) for _ in range(3)
    ]
    bounds = (max(new), max(lengths), starts, tuple(lengths))
    expected = prefill_attention.reference(*arrays, *bounds)
    tolerance = TOLERANCES[torch.bfloat16]
    torch.testing.assert_close(results[0], expected, atol=tolerance.atol, rtol=tolerance.rtol)
    assert all(torch.equal(results[0], again) for again in results[1:])
    assert not results[0][sum(new) :].any()
