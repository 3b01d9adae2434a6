"""The reorder against `cache[parents]` in plain indexing, for multisets of parents that break a careless one.

Beside what the children read, everything else of the cache has to be what it was: a kernel that moves slots in place has no
other memory to spoil. Programs of a device run in any order, an interpreter's in one; so the same moves are also made one launch
a row in random order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xgr_runtime.hal.ops.cache import plan_reorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tools._ladder.l4_report import Report

NUM_RANDOM = 60
W = 12
# Of a child row: its slot as fp32, which a plan may sort by, and its place in that order. One row's tokens are more.
_PLAN_BYTES = 8
NAMED = {
    "all equal": [4] * W,
    "reversed": list(range(W))[::-1],
    "identity": list(range(W)),
    "one long cycle": [*range(1, W), 0],
    "disjoint 2-cycles": [i ^ 1 for i in range(W)],
    "cycle with a tail": [1, 2, 3, 4, 0, 4, 5, 6, 7, 8, 9, 10],
    "halves": [i // 2 for i in range(W)],
}


@dataclass(frozen=True)
class Case:
    """parents[s]: parent rank of each child of search s. num_parents[s]: its parent rows."""

    label: str
    parents: list[list[int]]
    num_parents: list[int]
    num_layers: int = 2
    max_tokens: int = 3
    num_tokens: int = 3
    padding: int = 2

    def args(self, dtype: torch.dtype, seed: int) -> dict[str, Any]:
        """Arguments of the op, slots at random places of each search's range."""
        rng = np.random.default_rng(seed)
        widths = [max(len(p), n) for p, n in zip(self.parents, self.num_parents, strict=True)]
        starts = np.concatenate(([0], np.cumsum(widths)))
        first = np.concatenate(([0], np.cumsum(self.num_parents)))
        slots = [
            starts[s] + rng.permutation(widths[s])[:number]
            for s, number in enumerate(self.num_parents)
        ]
        parents = [first[s] + np.asarray(p, np.int64) for s, p in enumerate(self.parents)]
        search = [np.full(len(p), s) for s, p in enumerate(self.parents)]
        shape = (2 * self.num_layers, int(starts[-1]) + 1, self.max_tokens, 2, 5)
        parents.append(rng.integers(0, 9999, self.padding))
        search.append(np.full(self.padding, len(self.parents)))
        return {
            "kv_rows": torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtype),
            "parents_N": _int32(np.concatenate(parents)),
            "slot_in_N": _int32(np.concatenate(slots)),
            "search_of_row_N": _int32(np.concatenate(search)),
            "slot_start_S1": _int32(starts),
            "num_tokens": self.num_tokens,
            "slot_out_N": torch.full((sum(map(len, self.parents)) + self.padding,), -7).int(),
            "tile": torch.full((shape[0], 2, *shape[2:]), torch.nan, dtype=dtype),
        }


class FloatBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of new floating tensors: a reorder needs none but those of its plan."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.new_bytes = 0
        # Kept until the end, so that no address comes twice.
        self._known = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._known[storage.data_ptr()] = storage
                self.new_bytes += storage.nbytes()
        return output


def cases() -> Iterator[Case]:
    """The named multisets, widths that grow, shrink and vanish, and random ones."""
    for label, parents in NAMED.items():
        for num_tokens in (1, 3):
            yield Case(f"{label}, {num_tokens} tokens", [parents], [W], num_tokens=num_tokens)
    yield Case("growing, shrinking, empty", [[0] * 20, [3, 3, 1], [], [0]], [2, 9, 4, 1])
    # layers in groups, the last of them smaller
    yield Case("few rows, many layers", [[1, 0, 0]], [2], num_layers=13, max_tokens=1, num_tokens=1)
    rng = np.random.default_rng(11)
    for trial in range(NUM_RANDOM):
        num_parents = [int(n) for n in rng.integers(1, 9, 3)]
        widths = rng.integers(0, 9, 3)
        parents = [
            [int(p) for p in rng.integers(0, n, w)]
            for n, w in zip(num_parents, widths, strict=True)
        ]
        kept, padding = int(rng.integers(1, 3)), int(rng.integers(0, 3))
        yield Case(f"random {trial}", parents, num_parents, 1, 2, kept, padding)


def check_reorder(reorder: Callable[..., None], dtype: torch.dtype, report: Report) -> None:
    """Run every case; what is wrong goes to the report."""
    for seed, case in enumerate(cases()):
        args = case.args(dtype, seed)
        cache = _with_guard(args)
        before = cache.clone()
        with FloatBytes([cache, args["tile"]]) as counted:
            reorder(**args)
        where = f"reorder_unshared_kv, {case.label}, {dtype}"
        report.count("reorders")
        allowed = _PLAN_BYTES * args["parents_N"].shape[0]
        report.require(counted.new_bytes <= allowed, f"{where}: {counted.new_bytes} new bytes")
        _check_content(args, cache, before, where, report)


def check_any_order(
    move: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None],
    dtype: torch.dtype,
    report: Report,
) -> None:
    """The moves of the named cases, one launch a row in random order."""
    rng = np.random.default_rng(5)
    for seed, case in enumerate(cases()):
        if case.label.startswith("random"):
            continue
        args = case.args(dtype, seed)
        cache = _with_guard(args)
        kv, before = args["kv_rows"], cache.clone()
        src_N, dst_N = plan_reorder(
            args["parents_N"],
            args["slot_in_N"],
            args["search_of_row_N"],
            args["slot_start_S1"],
            kv.shape[1],
        )
        for row in rng.permutation(src_N.shape[0]):
            move(kv, src_N[row : row + 1], dst_N[row : row + 1], case.num_tokens)
        args["slot_out_N"].copy_(dst_N)
        report.count("reorders in random order")
        _check_content(
            args, cache, before, f"move_slots in any order, {case.label}, {dtype}", report
        )


def _with_guard(args: dict[str, Any]) -> torch.Tensor:
    """Replace the cache by the front of a larger one, which is returned: a layer too many would be moved there unseen."""
    cache = torch.cat((args["kv_rows"], args["kv_rows"][:1]))
    args["kv_rows"] = cache[:-1]
    return cache


def _check_content(
    args: dict[str, Any], cache: torch.Tensor, before: torch.Tensor, where: str, report: Report
) -> None:
    """Children hold their parents' tokens, in distinct slots; everything else is as it was."""
    num_searches, num_tokens = args["slot_start_S1"].shape[0] - 1, args["num_tokens"]
    count = int((args["search_of_row_N"] < num_searches).sum())
    out, dummy = args["slot_out_N"].long(), before.shape[1] - 1
    report.require(out[:count].unique().numel() == count, f"{where}: two children share a slot")
    report.require(bool((out[count:] == dummy).all()), f"{where}: a padding row got a slot")
    source = args["slot_in_N"].long()[args["parents_N"][:count].long()]
    expected = before.clone()
    expected[:-1, out[:count], :num_tokens] = before[:-1, source, :num_tokens]
    report.require(torch.equal(cache, expected), f"{where}: other content")


def _int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.int32))
