"""The Ascend reorder against `cache[parents]`: any multiset of parents, in place, without memory of the cache's size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from xgr_ops.ascend.cache import reorder_unshared_kv_npu, write_unshared_kv_npu

from tests.ascend import vendor_ops
from tests.helpers.strict_device import StrictDevice
from tests.ops.test_reorder import SHAPES, Case, W

vendor_ops.define()


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_named_parents(name: str, num_tokens: int) -> None:
    Case([SHAPES[name]], [W]).run_and_check(reorder_unshared_kv_npu, num_tokens)


def random_batch(rng: np.random.Generator, seed: int, **options: Any) -> Case:
    num_parents = [int(n) for n in rng.integers(1, 9, 5)]
    widths = rng.integers(0, 9, 5)
    parents = [
        [int(p) for p in rng.integers(0, n, w)] for n, w in zip(num_parents, widths, strict=True)
    ]
    return Case(parents, num_parents, num_layers=1, max_tokens=2, seed=seed, **options)


def test_thousands_of_random_multisets() -> None:
    """600 batches of five searches, each its own multiset of parents, widths growing and shrinking."""
    rng = np.random.default_rng(17)
    for trial in range(600):
        padding, tile_rows = int(rng.integers(0, 3)), int(rng.integers(1, 8))
        case = random_batch(rng, trial, padding=padding, tile_rows=tile_rows)
        if case.parents.numel():
            case.run_and_check(reorder_unshared_kv_npu, int(rng.integers(1, 3)))


def test_growing_shrinking_empty_and_single_searches() -> None:
    Case([[0] * 20, [3, 3, 1], [], [0]], [2, 9, 4, 1]).run_and_check(reorder_unshared_kv_npu, 2)
    Case([[0]], [1], padding=0).run_and_check(reorder_unshared_kv_npu, 1)
    Case([[0]], [3], padding=2).run_and_check(reorder_unshared_kv_npu, 2)


def test_one_wide_search_beside_narrow_ones() -> None:
    rng = np.random.default_rng(5)
    parents = [[0, 0, 1], sorted(int(p) for p in rng.integers(0, 512, 512)), [1, 0]]
    Case(parents, [3, 512, 2], tile_rows=64).run_and_check(reorder_unshared_kv_npu, 3)


def test_slots_behind_the_last_range_stay_as_they_are() -> None:
    """A cache larger than the batch: several padding rows, and free slots that belong to no search."""
    case = Case([[1, 1, 0, 1], [0]], [3, 2], padding=4)
    kept = case.dummy
    case.kv = torch.cat((case.kv, torch.randn(case.kv.shape[0], 6, *case.kv.shape[2:])), dim=1)
    case.slot_in[case.slot_in == case.dummy] = case.dummy + 6
    case.dummy += 6
    before = case.kv.clone()
    case.run_and_check(reorder_unshared_kv_npu, 3)
    assert torch.equal(case.kv[:, kept:], before[:, kept:])


def test_only_the_kept_tokens_are_touched() -> None:
    case = Case([[0, 0, 0, 1]], [4])
    before = case.kv.clone()
    case.run_and_check(reorder_unshared_kv_npu, 1)
    assert torch.equal(case.kv[:, :, 1:], before[:, :, 1:])


def call(case: Case, num_tokens: int) -> None:
    reorder_unshared_kv_npu(
        case.kv,
        case.parents,
        case.slot_in,
        case.search,
        case.slot_start,
        num_tokens,
        case.slot_out,
        case.tile,
    )


def test_the_output_may_be_the_input_slots() -> None:
    case, aliased = (Case([[2, 2, 0, 2, 1]], [5], padding=0) for _ in range(2))
    case.run_and_check(reorder_unshared_kv_npu, 3)
    aliased.slot_out = aliased.slot_in
    call(aliased, 3)
    assert torch.equal(aliased.slot_out, case.slot_out)
    assert torch.equal(aliased.kv, case.kv)


def test_successive_rounds_keep_the_whole_ancestry() -> None:
    """Each row's tokens spell its ancestors, as a search writes them: position t holds the row's code of round t."""
    rng = np.random.default_rng(2)
    widths, max_width = [4, 9, 3, 8], 9
    kv, tile = torch.zeros(2, max_width + 1, 3, 1, 1), torch.zeros(2, 2, 3, 1, 1)
    starts = torch.tensor([0, max_width], dtype=torch.int32)
    slots = torch.arange(widths[0], dtype=torch.int32)
    paths = [[int(c)] for c in rng.integers(1, 1000, widths[0])]
    for round_ in range(1, 4):
        codes = torch.tensor([float(path[-1]) for path in paths]).view(-1, 1, 1)
        write_unshared_kv_npu(codes, -codes, kv[0], kv[1], slots, round_ - 1)
        parents = rng.integers(0, len(paths), widths[round_])
        out = torch.empty(widths[round_], dtype=torch.int32)
        search = torch.zeros(widths[round_], dtype=torch.int32)
        parents_N = torch.from_numpy(parents.astype(np.int32))
        reorder_unshared_kv_npu(kv, parents_N, slots, search, starts, round_, out, tile)
        slots = out
        read = kv[:, slots.long(), :round_, 0, 0]
        assert read[0].tolist() == [[float(c) for c in paths[p]] for p in parents]
        assert torch.equal(read[1], -read[0])
        paths = [[*paths[p], int(rng.integers(1, 1000))] for p in parents]


def test_one_capture_serves_other_parents() -> None:
    rng = np.random.default_rng(3)
    cases = [
        Case([[int(p) for p in rng.integers(0, 8, 12)], [0, 1, 0]], [8, 2], seed=seed)
        for seed in range(8)
    ]
    held = cases[0]
    graph = StrictDevice().capture("reorder", lambda: call(held, 2))
    for case in cases[1:]:
        for name in ("kv", "parents", "slot_in", "search", "slot_start", "slot_out", "tile"):
            getattr(held, name).copy_(getattr(case, name))
        held.run_and_check(lambda *_: graph.replay(), 2)


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest storage that an op returns and that was not there before, in bytes."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.num_seen = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self.num_seen += 1
                    self.largest = max(self.largest, storage.nbytes())
        return result


def wide_case() -> Case:
    rng = np.random.default_rng(1)
    return Case([[int(p) for p in rng.integers(0, 400, 400)]], [400], num_layers=16, tile_rows=16)


def test_nothing_of_the_size_of_the_cache_is_allocated() -> None:
    """Neither by an op's result (dispatch mode) nor inside an op (the profiler's record of the allocator)."""
    case = wide_case()
    assert case.tile.nbytes * 20 < case.kv.nbytes
    with _Allocations([case.kv, case.tile]) as counted:
        call(case, 2)
    assert counted.num_seen > 10
    assert counted.largest <= case.tile.nbytes

    case = wide_case()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        call(case, 2)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest <= case.tile.nbytes, "an op allocated more than its indices"


def test_a_cache_with_gaps_is_refused_rather_than_copied() -> None:
    case = Case([[0, 0]], [2])
    case.kv = case.kv[:, :, :2]
    with pytest.raises(RuntimeError, match="view"):
        call(case, 1)
