"""What only a GPU can show of its providers: lengths that change between replays, split keys, searches of uneven width.

Plain parity is in `test_parity.py`. Where Triton is absent the provider modules fail to load with that reason.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from xgr_runtime.hal.ops.attention import prefill_attention, shared_attention
from xgr_runtime.hal.ops.fused_attention import beam_attention
from xgr_runtime.hal.providers import PROVIDER_MODULES, load_providers
from xgr_runtime.hal.registry import OpSpec
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Impl, Op

SMALL = (4, 2, 32, 16)  # query heads, KV heads, head dim, page size
NUM_OWN = 2  # own tokens of a beam
MAX_KV, MAX_ROWS = 1100, 70
on_gpu = pytest.mark.device("cuda")


def provider(op: Op[..., Any], name: str) -> Impl[..., Any]:
    load_providers("cuda")
    return next(i for i in op.impls if (i.provider, i.device_kind) == (name, "cuda"))


class Inputs:
    """Three histories in pages on the GPU, whose lengths and row starts can be set anew."""

    def __init__(
        self, dtype: torch.dtype, num_rows: int, sizes: tuple[int, int, int, int] = SMALL
    ) -> None:
        num_heads, num_kv_heads, dim, page_size = sizes
        generator = torch.Generator().manual_seed(3)
        pages_each = -(-MAX_KV // page_size)
        shape = (3 * pages_each + 1, page_size, num_kv_heads, dim)
        self.q = torch.randn(num_rows, num_heads, dim, generator=generator).to(dtype).cuda()
        self.k = torch.randn(shape, generator=generator).to(dtype).cuda()
        self.v = torch.randn(shape, generator=generator).to(dtype).cuda()
        order = torch.randperm(3 * pages_each, generator=generator) + 1
        self.table = order.view(3, pages_each).to(torch.int32).cuda()
        own = torch.randn(2, num_rows, NUM_OWN, num_kv_heads, dim, generator=generator)
        slots = torch.randperm(num_rows, generator=generator).to(torch.int32).cuda()
        self.own = (*own.to(dtype).cuda(), slots, NUM_OWN)
        self.starts = torch.zeros(4, dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(3, dtype=torch.int32, device="cuda")

    def set(self, starts: list[int], lengths: list[int]) -> None:
        self.starts.copy_(torch.tensor(starts))
        self.lengths.copy_(torch.tensor(lengths))

    def call(self, fn: Callable[..., Any], op: Op[..., Any]) -> list[torch.Tensor]:
        """Results; the host's numbers, which a GPU's kernels may not read, are wrong ones."""
        host: tuple[tuple[int, ...], ...] = ((1, 1, 1),)
        if op is prefill_attention:
            host = ((0, 1, 2, 3), *host)
        arrays = (self.q, self.k, self.v, self.table, self.starts, self.lengths)
        own = self.own if op is beam_attention else ()
        result = fn(*arrays, *own, self.q.shape[2] ** -0.5, MAX_ROWS, MAX_KV, *host)
        return [result] if isinstance(result, torch.Tensor) else list(result)


LENGTHS = (
    ([0, 70, 140, 200], [1100, 1100, 1100]),
    ([0, 1, 71, 90], [1, 777, 0]),
    ([0, 0, 0, 3], [64, 0, 512]),
)


# Kernels for warpgroups take these: a prefill with work for every core, and so much that programs have several items, and of few;
# beams likewise, where keys are split.
MOST_ITEMS = (64, 64, 64, 128)
MANY_ITEMS, FEW_ITEMS, ONE_KV_HEAD = (64, 32, 64, 128), (4, 2, 128, 128), (8, 1, 64, 64)
REPLAYS = [
    *((op, "triton", SMALL, dtype) for op in (shared_attention, prefill_attention, beam_attention)
      for dtype in (torch.float32, torch.bfloat16)),
    (prefill_attention, "gluon", MANY_ITEMS, torch.bfloat16),
    (prefill_attention, "gluon", MOST_ITEMS, torch.bfloat16),
    (prefill_attention, "gluon-short", FEW_ITEMS, torch.bfloat16),
    (prefill_attention, "gluon-short", ONE_KV_HEAD, torch.float16),
    (beam_attention, "gluon", MANY_ITEMS, torch.bfloat16),
    (beam_attention, "gluon", FEW_ITEMS, torch.bfloat16),
    (beam_attention, "gluon-short", FEW_ITEMS, torch.bfloat16),
    (beam_attention, "gluon-short", ONE_KV_HEAD, torch.float16),
]  # fmt: skip


@on_gpu
@pytest.mark.parametrize(("op", "name", "sizes", "dtype"), REPLAYS)
def test_a_captured_graph_replays_with_other_lengths(
    op: Op[..., Any],
    name: str,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: Device,
) -> None:
    inputs, found = Inputs(dtype, 200, sizes), provider(op, name)
    dims = dict(zip(("Q", "G", "D", "page_size"), sizes, strict=True))
    dims |= {"T" if op is prefill_attention else "N": 200, "H": 3}
    reason = found.accepts(OpSpec("cuda", dtype, device.capability, dims))
    if name.startswith("gluon") and device.capability != "sm_90":
        assert reason is not None
        return
    assert reason is None, reason
    held = list[torch.Tensor]()

    def run() -> None:
        held[:] = inputs.call(found.fn, op)

    inputs.set(*LENGTHS[0])
    torch.cuda.synchronize()
    graph = device.capture("attention", run)
    tolerance = TOLERANCES[dtype]
    for starts, lengths in LENGTHS:
        if op is prefill_attention:  # a history has at least its new tokens, or none at all
            new = [end - start for start, end in itertools.pairwise(starts)]
            lengths = [max(n, m) if n else 0 for n, m in zip(lengths, new, strict=True)]
        inputs.set(starts, lengths)
        for result in held:
            result.fill_(torch.nan)
        torch.cuda.synchronize()
        with device.segment("attention"):
            graph.replay()
        device.synchronize()
        specified = starts[-1] if op is beam_attention else len(inputs.q)
        for got, expected in zip(held, inputs.call(op.reference, op), strict=True):
            torch.testing.assert_close(
                got[:specified], expected[:specified], atol=tolerance.atol, rtol=tolerance.rtol
            )


@on_gpu
@pytest.mark.parametrize("is_causal", [False, True])
def test_split_keys_give_what_whole_ones_give(is_causal: bool, device: Device) -> None:
    launch = import_module("xgr_ops.triton.history_attention")
    rules = import_module("xgr_ops.cuda.launch_rules").RULES
    inputs = Inputs(torch.float32, 8)
    inputs.set([0, 1, 4, 6], [1100, 1000, 2])  # the last two rows are padding
    op: Op[..., Any] = prefill_attention if is_causal else shared_attention
    results = []
    for num_programs in (1, 10_000):
        tiles = launch.HistoryTiles(16, 32, num_programs, min_split_keys=64)

        def run(*args: Any, tiles: Any = tiles) -> Any:
            *arrays, scale, max_rows, max_kv = args[:9]
            bounds = (scale, max_rows, max_kv, is_causal, True)
            return launch.launch_history_attention(*arrays, None, *bounds, tiles, rules)

        assert (tiles.num_splits(3, MAX_KV) > 1) == (num_programs > 1)
        results.append(inputs.call(run, op))
    expected = inputs.call(op.reference, op)
    for result in results:
        for got, want in zip(result, expected, strict=False):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_without_triton_every_module_says_so() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from xgr_runtime.hal.providers import load_providers\n"
        "print(*((f.module, 'triton' in f.reason) for f in load_providers('cuda')), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [f"('{module}', True)" for module in PROVIDER_MODULES["cuda"]]
    assert done.stdout.split("\n")[:-1] == expected
