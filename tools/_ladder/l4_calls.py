"""Calls of all that is compiled in this way: every conformance case of every provider for CUDA, and rounds of the search of any size.

Which kernel a round of the search gets, and with which tiles, its sizes decide; the sizes are those of an engine: one row of each
search, then one of each beam; few and many children of a row; levels that list their children and levels that have all codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from xgr_runtime.conformance.op_cases import GENERATORS
from xgr_runtime.hal.ops.beam import BeamRows, LevelTrie
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec, all_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from xgr_runtime.hal.registry import Impl

KIND, CAPABILITY = "cuda", "sm_90"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# products of torch alone, one of which a CPU has no kernel for
NO_KERNEL_OF_TRITON = (("head_logits", "torch"), ("head_logsumexp", "torch"))
# Kernels that start early are those that a Hopper GPU binds; the others are the same behind no wait, and have the cases.
ROUND_PROVIDER = "triton-pdl"
FANOUTS = tuple(2**power for power in range(14))
Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
# Searches, widths, children of a row. One search alone has tiles of any number of rows; more share programs and lists.
ROUNDS: tuple[Sizes, ...] = (
    ((1,), (1, 2, 8, 32, 64, 256, 1024), FANOUTS),
    ((8, 64), (1, 16, 128), (8, 128, 2048)),
)
EVERY_ROUND: tuple[Sizes, ...] = (
    ((1, 2, 3, 8, 64), tuple(2**power for power in range(11)), FANOUTS),
)
MOST_ROWS = 8192
NUM_CODES, NUM_EDGES = 8192, 1000  # of a level that lists its children


@dataclass(frozen=True)
class Call:
    """A call of a provider's function that starts kernels."""

    caller: str
    label: str
    function: Callable[..., Any]
    args: Mapping[str, Any]


def cases() -> Iterator[Call]:
    """Every case that a provider takes, in every dtype."""
    for op_name, generator in GENERATORS.items():
        for impl in _impls(op_name):
            if (op_name, impl.provider) in NO_KERNEL_OF_TRITON:
                continue
            for dtype in DTYPES:
                for case in generator(dtype):
                    if impl.accepts(OpSpec(KIND, dtype, CAPABILITY, case.dims)) is None:
                        label = f"{case.label}, {dtype}"
                        yield Call(f"{op_name} by {impl.provider}", label, impl.fn, case.args)


def callers() -> set[str]:
    """Whose cases start kernels of Triton."""
    return {
        f"{op_name} by {impl.provider}"
        for op_name in GENERATORS
        for impl in _impls(op_name)
        if (op_name, impl.provider) not in NO_KERNEL_OF_TRITON
    }


def rounds(sizes: Sequence[Sizes] = ROUNDS) -> Iterator[Call]:
    """Selections, and normalisers of children, of rounds of these sizes."""
    for searches, widths, fanouts in sizes:
        for num_searches, width in product(searches, widths):
            if num_searches * width > MOST_ROWS:
                continue
            for rows_each in sorted({1, width}):
                for fanout, is_dense in product(fanouts, (False, True)):
                    yield from _round(num_searches, rows_each, width, fanout, is_dense)


def _round(
    num_searches: int, rows_each: int, width: int, fanout: int, is_dense: bool
) -> Iterator[Call]:
    num_rows = num_searches * rows_each
    trie = level(fanout, is_dense)
    given = {
        "logits_NC": nothing(num_rows, trie.num_codes, dtype=torch.float32),
        "parents": rows_of(num_rows, num_searches),
        "rule_row_S": nothing(num_searches),
        "trie": trie,
    }
    selection = {
        "lse_N": nothing(num_rows, dtype=torch.float32),
        "children": rows_of(num_searches * width, num_searches),
        "counters": nothing(2, dtype=torch.int64),
    }
    layout = "dense" if is_dense else "csr"
    label = f"{num_searches} searches, {rows_each} rows and {width} children each, "
    label += f"{fanout} children of a row, {layout}"
    for op_name, args in (("children_logsumexp", given), ("select_beams", {**given, **selection})):
        impl = next(it for it in _impls(op_name) if it.provider == ROUND_PROVIDER)
        yield Call(f"{op_name} by {impl.provider}", label, impl.fn, args)


def level(fanout: int, is_dense: bool) -> LevelTrie:
    """A level without content: what a launcher knows of one. A dense one has as many codes as children."""
    num_edges = fanout if is_dense else NUM_EDGES
    alive_RE = nothing(2, num_edges, dtype=torch.bool)
    if is_dense:
        return LevelTrie(fanout, fanout, True, None, None, nothing(num_edges), alive_RE)
    offsets, codes = nothing(65), nothing(num_edges)
    return LevelTrie(NUM_CODES, fanout, False, offsets, codes, None, alive_RE)


def rows_of(num_rows: int, num_searches: int) -> BeamRows:
    """Rows without content."""
    scores_N = nothing(num_rows, dtype=torch.float32)
    nodes, parents, codes, search = (nothing(num_rows) for _ in range(4))
    return BeamRows(scores_N, nodes, parents, codes, nothing(num_searches + 1), search)


def nothing(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor that has no memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def _impls(op_name: str) -> list[Impl[..., Any]]:
    load_providers(KIND)
    return [impl for impl in all_ops()[op_name].impls if impl.device_kind == KIND]
