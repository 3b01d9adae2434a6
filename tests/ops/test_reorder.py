"""reorder_unshared_kv against `cache[parents]` read through the slots, in plain indexing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xgr_runtime.hal.ops.cache import reorder_unshared_kv, write_shared_kv, write_unshared_kv
from xgr_runtime.hal.providers import load_providers

Reorder = Callable[..., None]


def implementations() -> list[Any]:
    """The reference and every CPU provider."""
    assert not load_providers("cpu")
    own = [i for i in reorder_unshared_kv.impls if i.device_kind == "cpu"]
    return [
        pytest.param(reorder_unshared_kv.reference, id="reference"),
        *(pytest.param(i.fn, id=i.provider) for i in own),
    ]


class Case:
    """Searches with parents[s] = parent rank of each child of search s, in slots at random places of their range."""

    def __init__(
        self,
        parents: list[list[int]],
        num_parents: list[int],
        *,
        padding: int = 2,
        num_layers: int = 2,
        max_tokens: int = 3,
        tile_rows: int = 3,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        widths = [max(len(p), n) for p, n in zip(parents, num_parents, strict=True)]
        starts = np.concatenate(([0], np.cumsum(widths)))
        first_parent = np.concatenate(([0], np.cumsum(num_parents)))
        self.dummy = int(starts[-1])
        slot_in = [
            starts[s] + rng.permutation(widths[s])[: num_parents[s]] for s in range(len(parents))
        ]
        rows = [first_parent[s] + np.asarray(p, np.int64) for s, p in enumerate(parents)]
        search = [np.full(len(p), s) for s, p in enumerate(parents)]
        pad_search, pad_parent = np.full(padding, len(parents)), rng.integers(0, 9999, padding)
        self.parents = _int32(np.concatenate([*rows, pad_parent]))
        self.search = _int32(np.concatenate([*search, pad_search]))
        self.slot_in = _int32(np.concatenate([*slot_in, np.full(padding, self.dummy)]))
        self.slot_start = _int32(starts)
        self.num_children = sum(len(p) for p in parents)
        shape = (2 * num_layers, self.dummy + 1, max_tokens, 2, 3)
        self.kv = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
        self.tile = torch.full((shape[0], tile_rows, *shape[2:]), torch.nan)
        self.slot_out = torch.full_like(self.parents, -7)

    def run_and_check(self, reorder: Reorder, num_tokens: int) -> None:
        before = self.kv.clone()
        reorder(
            self.kv,
            self.parents,
            self.slot_in,
            self.search,
            self.slot_start,
            num_tokens,
            self.slot_out,
            self.tile,
        )
        count = self.num_children
        expected = before[:, self.slot_in.long()][:, self.parents[:count].long()]
        got = self.kv[:, self.slot_out[:count].long()]
        assert torch.equal(got[:, :, :num_tokens], expected[:, :, :num_tokens])
        self._check_slots()

    def _check_slots(self) -> None:
        out, search = self.slot_out.tolist(), self.search.tolist()
        starts, count = self.slot_start.tolist(), self.num_children
        assert len(set(out[:count])) == count, "two children share a slot"
        assert all(
            starts[s] <= o < starts[s + 1] for o, s in zip(out, search[:count], strict=False)
        )
        assert out[count:] == [self.dummy] * (len(out) - count)
        slot_in, parents = self.slot_in.tolist(), self.parents.tolist()
        seen: set[int] = set()
        for child in range(count):
            if parents[child] not in seen:
                assert out[child] == slot_in[parents[child]], "a first child moved"
            seen.add(parents[child])


def _int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.int32))


W = 12
SHAPES = {
    "all-equal": [4] * W,
    "reversed": list(range(W))[::-1],
    "identity": list(range(W)),
    "one-long-cycle": [*range(1, W), 0],
    "disjoint-2-cycles": [i ^ 1 for i in range(W)],
    "cycle-with-a-tail": [1, 2, 3, 4, 0, 4, 5, 6, 7, 8, 9, 10],
    "halves": [i // 2 for i in range(W)],
}


@pytest.mark.parametrize("reorder", implementations())
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_named_parents(reorder: Reorder, name: str, num_tokens: int) -> None:
    Case([SHAPES[name]], [W]).run_and_check(reorder, num_tokens)


@pytest.mark.parametrize("reorder", implementations())
def test_ten_thousand_random_multisets(reorder: Reorder) -> None:
    """2,000 batches of five searches, each its own multiset of parents, widths growing and shrinking."""
    rng = np.random.default_rng(11)
    for trial in range(2000):
        num_parents = [int(n) for n in rng.integers(1, 9, 5)]
        widths = rng.integers(0, 9, 5)
        parents = [
            [int(p) for p in rng.integers(0, n, w)]
            for n, w in zip(num_parents, widths, strict=True)
        ]
        case = Case(
            parents,
            num_parents,
            padding=int(rng.integers(0, 3)),
            num_layers=1,
            max_tokens=2,
            tile_rows=int(rng.integers(1, 8)),
            seed=trial,
        )
        case.run_and_check(reorder, int(rng.integers(1, 3)))


@pytest.mark.parametrize("reorder", implementations())
def test_growing_shrinking_and_empty_searches(reorder: Reorder) -> None:
    Case([[0] * 20, [3, 3, 1], [], [0]], [2, 9, 4, 1]).run_and_check(reorder, 2)


@pytest.mark.parametrize("reorder", implementations())
def test_one_wide_search_beside_narrow_ones(reorder: Reorder) -> None:
    rng = np.random.default_rng(5)
    parents = [[0, 0, 1], sorted(int(p) for p in rng.integers(0, 512, 512)), [1, 0]]
    Case(parents, [3, 512, 2], tile_rows=64).run_and_check(reorder, 3)


@pytest.mark.parametrize("reorder", implementations())
def test_successive_rounds_keep_the_whole_ancestry(reorder: Reorder) -> None:
    """Each row's tokens spell its ancestors, as a search writes them: position t holds the row's code of round t."""
    rng = np.random.default_rng(2)
    widths, max_width = [4, 9, 3, 8], 9
    kv = torch.zeros(2, max_width + 1, 3, 1, 1)
    tile = torch.zeros(2, 2, 3, 1, 1)
    starts = _int32(np.array([0, max_width]))
    slots = torch.arange(widths[0], dtype=torch.int32)
    paths = [[int(c)] for c in rng.integers(1, 1000, widths[0])]
    for round_ in range(1, 4):
        codes = torch.tensor([float(path[-1]) for path in paths]).view(-1, 1, 1)
        write_unshared_kv.reference(codes, -codes, kv[0], kv[1], slots, round_ - 1)
        parents = rng.integers(0, len(paths), widths[round_])
        out = torch.empty(widths[round_], dtype=torch.int32)
        search = torch.zeros(widths[round_], dtype=torch.int32)
        reorder(kv, _int32(parents), slots, search, starts, round_, out, tile)
        slots = out
        read = kv[:, slots.long(), :round_, 0, 0]
        assert read[0].tolist() == [[float(c) for c in paths[p]] for p in parents]
        assert torch.equal(read[1], -read[0])
        paths = [[*paths[p], int(rng.integers(1, 1000))] for p in parents]


@pytest.mark.parametrize("reorder", implementations())
def test_the_output_may_be_the_input_slots(reorder: Reorder) -> None:
    case = Case([[2, 2, 0, 2, 1]], [5], padding=0)
    aliased = Case([[2, 2, 0, 2, 1]], [5], padding=0)
    case.run_and_check(reorder, 3)
    aliased.slot_out = aliased.slot_in
    reorder(
        aliased.kv,
        aliased.parents,
        aliased.slot_in,
        aliased.search,
        aliased.slot_start,
        3,
        aliased.slot_out,
        aliased.tile,
    )
    assert torch.equal(aliased.slot_out, case.slot_out)
    assert torch.equal(aliased.kv, case.kv)


@pytest.mark.parametrize("reorder", implementations())
def test_only_the_kept_tokens_are_touched(reorder: Reorder) -> None:
    case = Case([[0, 0, 0, 1]], [4])
    before = case.kv.clone()
    case.run_and_check(reorder, 1)
    assert torch.equal(case.kv[:, :, 1:], before[:, :, 1:])


class _FloatBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of float storages that ops return and that did not exist before."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.new_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self._known.add(storage.data_ptr())
                    self.new_bytes += storage.nbytes()
        return result


@pytest.mark.parametrize("reorder", implementations())
def test_no_keys_or_values_are_allocated(reorder: Reorder) -> None:
    """Neither by an op's result (dispatch mode) nor inside an op (the profiler's record of the allocator)."""
    rng = np.random.default_rng(1)
    case = Case([[int(p) for p in rng.integers(0, 400, 400)]], [400], num_layers=16, tile_rows=16)
    with _FloatBytes([case.kv, case.tile]) as counted:
        reorder(
            case.kv,
            case.parents,
            case.slot_in,
            case.search,
            case.slot_start,
            2,
            case.slot_out,
            case.tile,
        )
    assert counted.new_bytes == 0

    case.slot_in.copy_(case.slot_out)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        reorder(
            case.kv,
            case.parents,
            case.slot_in,
            case.search,
            case.slot_start,
            2,
            case.slot_out,
            case.tile,
        )
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest <= case.tile.nbytes, "an op allocated more than its indices"
    assert case.tile.nbytes * 20 < case.kv.nbytes


def test_writes_go_to_their_slots_and_nowhere_else() -> None:
    k_pages, v_pages = torch.zeros(4, 3, 2, 5), torch.zeros(4, 3, 2, 5)
    rows = torch.randn(4, 4, 5, generator=torch.Generator().manual_seed(0))
    k, v = (
        rows[:, :2],
        rows[:, 2:],
    )  # views with another stride over tokens, as a fused product gives
    write_shared_kv.reference(k, v, k_pages, v_pages, torch.tensor([10, 4, 0, 11]))
    expected = torch.zeros(12, 2, 5)
    expected[10], expected[4], expected[0], expected[11] = k[0], k[1], k[2], k[3]
    assert torch.equal(k_pages.view(12, 2, 5), expected)
    assert torch.equal(v_pages[3, 1], v[0])

    k_rows, v_rows = torch.zeros(6, 2, 2, 5), torch.zeros(6, 2, 2, 5)
    slots = torch.tensor([3, 0, 5, 5], dtype=torch.int32)
    write_unshared_kv.reference(k, v, k_rows, v_rows, slots, 1)
    assert torch.equal(k_rows[3, 1], k[0])
    assert torch.equal(v_rows[0, 1], v[1])
    assert k_rows[:, 0].count_nonzero() == 0
    assert k_rows[[1, 2, 4]].count_nonzero() == 0
