"""A round of the search behind the product that its logits come from: kernels that start while those in front of them still run.

Head product, normaliser, failure flags and selection in one captured graph, with nothing between them, as a round has them.
What must hold beside parity: each reads what this replay wrote in front of it. Factors are small whole numbers, so that logits
are exact whatever the order of the product's sums. Without a GPU: what is started early takes the same arguments.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from xgr_runtime.hal.ops.beam import (
    BeamRows,
    LevelTrie,
    children_logsumexp,
    flag_failed_searches,
    flagged_level_logsumexp,
    level_logsumexp,
    select_beams,
)
from xgr_runtime.hal.ops.head import head_logits
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Impl, Op

on_gpu = pytest.mark.device("cuda")
HIDDEN, CODES, NUM_NODES, NUM_RULES, ROUND, NUM_REPLAYS = 1024, 8192, 50, 3, 1, 50
WEIGHT_SCALE = 2.0**-4
# searches, parent rows and children of each, children of a node (None: one node, dense)
FIRST_ROWS, FEW, MANY, WIDE = (3, 1, 64, None), (2, 32, 64, 8), (4, 96, 96, 40), (1, 200, 300, None)
CHAINS = ("flagged", "level", "children")


def found(op: Op[..., Any], provider: str) -> Impl[..., Any]:
    load_providers("cuda")
    return next(i for i in op.impls if (i.provider, i.device_kind) == (provider, "cuda"))


def trie_of(fanout: int | None, to: torch.device) -> LevelTrie:
    """Some codes of each node; a fifth of the edges are dead for each rule."""
    generator = torch.Generator().manual_seed(1)
    num_edges = CODES if fanout is None else NUM_NODES * fanout
    alive_RE = torch.rand(NUM_RULES, num_edges, generator=generator) < 0.8
    if fanout is None:
        is_child = torch.rand(CODES, generator=generator) < 0.7
        child = torch.where(is_child, is_child.cumsum(0) - 1, -1).to(torch.int32)
        return LevelTrie(CODES, CODES, True, None, None, child.to(to), (alive_RE & is_child).to(to))
    codes = [
        torch.randperm(CODES, generator=generator)[:fanout].sort().values for _ in range(NUM_NODES)
    ]
    offsets = torch.arange(0, num_edges + 1, fanout, dtype=torch.int32)
    return LevelTrie(
        CODES, fanout, False, offsets.to(to), torch.cat(codes).int().to(to), None, alive_RE.to(to)
    )


def rows_of(num_searches: int, width: int, to: torch.device) -> BeamRows:
    num_rows = num_searches * width
    search = torch.arange(num_searches, dtype=torch.int32).repeat_interleave(width)
    starts = torch.arange(0, num_rows + 1, width, dtype=torch.int32)
    nodes, parents, codes = (torch.full((num_rows,), -7, dtype=torch.int32) for _ in range(3))
    arrays = (torch.full((num_rows,), torch.nan), nodes, parents, codes, starts, search)
    return BeamRows(*(array.to(to) for array in arrays))


class Round:
    """A head's rows, a level and beams that can be set anew."""

    def __init__(self, sizes: tuple[int, int, int, int | None], to: torch.device) -> None:
        num_searches, width, child_width, fanout = sizes
        generator = torch.Generator().manual_seed(2)
        weight = torch.randint(-2, 3, (CODES, HIDDEN), generator=generator) * WEIGHT_SCALE
        self.weight_CM = weight.to(torch.bfloat16).to(to)
        self.trie = trie_of(fanout, to)
        self.num_nodes = 1 if fanout is None else NUM_NODES
        self.rows, self.children = (rows_of(num_searches, n, to) for n in (width, child_width))
        self.hidden_NM = torch.zeros(num_searches * width, HIDDEN, dtype=torch.bfloat16, device=to)
        self.rule_S = torch.zeros(num_searches, dtype=torch.int32, device=to)
        self.status_S1 = torch.zeros(num_searches + 1, dtype=torch.int32, device=to)
        self.counters = torch.zeros(2, dtype=torch.int64, device=to)

    def set(self, seed: int) -> None:
        """Other beams, some of them dead; of every third seed a search fails, of others one has failed before."""
        generator = torch.Generator().manual_seed(1000 + seed)
        num_rows, num_searches = len(self.hidden_NM), len(self.rule_S)
        hidden = torch.randint(-2, 3, (num_rows, HIDDEN), generator=generator).float()
        scores = -torch.rand(num_rows, generator=generator) * 5
        nodes = torch.randint(self.num_nodes, (num_rows,), generator=generator)
        scores[torch.rand(num_rows, generator=generator) < 0.1] = -torch.inf
        status = torch.zeros(num_searches + 1, dtype=torch.int32)
        if seed % 3 == 1:
            failed = int(torch.randint(num_rows, (1,), generator=generator))
            hidden[failed], scores[failed] = torch.nan, 0.0
        if seed % 3 == 2:
            status[torch.randint(num_searches, (1,), generator=generator)] = ROUND
        self.hidden_NM.copy_(hidden)
        self.rule_S.copy_(torch.randint(NUM_RULES, (num_searches,), generator=generator))
        self.rows.scores_N.copy_(scores)
        self.rows.nodes_N.copy_(nodes)
        self.status_S1.copy_(status)
        self.counters.zero_()

    def run(self, chain: str, fn: Callable[[Op[..., Any]], Any]) -> list[torch.Tensor]:
        """Logits and their normalisers; fn: the function of an op."""
        logits_NC = fn(head_logits)(self.hidden_NM, self.weight_CM, 1.0)
        flags = (self.rows, self.status_S1, ROUND)
        lse_N = self.normalise(chain, fn, logits_NC, flags)
        self.select(fn, logits_NC, lse_N)
        return [logits_NC, lse_N]

    def normalise(
        self, chain: str, fn: Callable[[Op[..., Any]], Any], logits_NC: torch.Tensor, flags: Any
    ) -> torch.Tensor:
        lse_N: torch.Tensor
        if chain == "flagged":
            lse_N = fn(flagged_level_logsumexp)(logits_NC, *flags)
            return lse_N
        if chain == "level":
            lse_N = fn(level_logsumexp)(logits_NC)
        else:
            lse_N = fn(children_logsumexp)(logits_NC, self.rows, self.rule_S, self.trie)
        fn(flag_failed_searches)(lse_N, *flags)
        return lse_N

    def select(
        self, fn: Callable[[Op[..., Any]], Any], logits_NC: torch.Tensor, lse_N: torch.Tensor
    ) -> None:
        arrays = (logits_NC, lse_N, self.rows, self.rule_S, self.trie)
        fn(select_beams)(*arrays, self.children, self.counters)

    def written(self) -> list[torch.Tensor]:
        """Copies of what a round writes in place; the reference skips no rows, so their count is left out."""
        children = self.children
        names = (children.scores_N, children.nodes_N, children.parents_N, children.codes_N)
        arrays = (self.rows.scores_N, self.status_S1, self.counters[0], *names)
        return [array.clone() for array in arrays]

    def forget(self, held: list[torch.Tensor]) -> None:
        """What a replay has to write, as none would."""
        for array in (*held, self.children.scores_N):
            array.fill_(torch.nan)
        for array in (self.children.nodes_N, self.children.parents_N, self.children.codes_N):
            array.fill_(-7)


def check_round(case: Round, chain: str, seed: int, held: list[torch.Tensor]) -> None:
    """What a round of this seed gave, against references that are handed what their kernels have to have read."""
    logits_NC, lse_N = held
    got = case.written()
    case.set(seed)
    logits_of_reference_NC = head_logits.reference(case.hidden_NM, case.weight_CM, 1.0)
    torch.testing.assert_close(logits_NC, logits_of_reference_NC, atol=0, rtol=0, equal_nan=True)

    def reference(op: Op[..., Any]) -> Callable[..., Any]:
        return op.reference

    flags = (case.rows, case.status_S1, ROUND)
    want_N = case.normalise(chain, reference, logits_NC, flags)
    atol, rtol = TOLERANCES[torch.float32].atol, TOLERANCES[torch.float32].rtol
    torch.testing.assert_close(lse_N, want_N, atol=atol, rtol=rtol, equal_nan=True)
    case.select(reference, logits_NC, lse_N)
    for got_array, want in zip(got, case.written(), strict=True):
        torch.testing.assert_close(got_array, want, atol=0, rtol=0)


@on_gpu
@pytest.mark.parametrize("sizes", [FIRST_ROWS, FEW, MANY, WIDE])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("provider", ["triton-pdl", "triton"])
def test_a_round_reads_what_its_own_product_wrote(
    provider: str, chain: str, sizes: tuple[int, int, int, int | None], device: Device
) -> None:
    spec = OpSpec("cuda", torch.float32, device.capability)
    reason = found(select_beams, provider).accepts(spec)
    if provider == "triton-pdl" and device.capability != "sm_90":
        assert reason is not None
        return
    assert reason is None, reason

    def fn(op: Op[..., Any]) -> Callable[..., Any]:
        return found(op, "torch" if op is head_logits else provider).fn

    case, held = Round(sizes, device.torch_device), list[torch.Tensor]()

    def run() -> None:
        held[:] = case.run(chain, fn)

    case.set(0)
    run()  # compiles
    torch.cuda.synchronize()
    graph = device.capture("round", run)
    for seed in range(NUM_REPLAYS):
        case.set(seed)
        case.forget(held)
        torch.cuda.synchronize()
        with device.segment("round"):
            graph.replay()
        device.synchronize()
        check_round(case, chain, seed, held)


@pytest.mark.parametrize("sizes", [FIRST_ROWS, FEW])
@pytest.mark.parametrize("chain", CHAINS)
def test_a_stale_array_of_a_round_is_seen(
    chain: str, sizes: tuple[int, int, int, int | None], device: Device
) -> None:
    """The check itself, on the references: a round agrees with them, one that reads logits or normalisers of before does not."""
    case = Round(sizes, device.torch_device)

    def reference(op: Op[..., Any]) -> Callable[..., Any]:
        return op.reference

    case.set(0)
    before = case.run(chain, reference)
    for seed in (3, 4, 5):
        case.set(seed)
        held = case.run(chain, reference)
        check_round(case, chain, seed, held)
    case.set(6)
    held = case.run(chain, reference)
    case.set(6)
    case.select(reference, held[0], before[1])
    with pytest.raises(AssertionError):
        check_round(case, chain, 6, held)
    with pytest.raises(AssertionError):
        check_round(case, chain, 6, [held[0], before[1]])
    with pytest.raises(AssertionError):
        check_round(case, chain, 6, [before[0], held[1]])


EARLY_NAMES = (
    "level_logsumexp_kernel",
    "flagged_level_logsumexp_kernel",
    "children_logsumexp_kernel",
    "flag_failed_kernel",
    "group_bests_kernel",
    "threshold_kernel",
    "collect_kernel",
    "stream_kernel",
    "rank_kernel",
)


@pytest.mark.triton
@pytest.mark.parametrize("name", EARLY_NAMES)
def test_an_early_kernel_waits_and_passes_every_argument_on_in_its_place(name: str) -> None:
    module = import_module("xgr_ops.cuda.early_kernels")
    early, late = module.EARLY[name], getattr(module, name)
    assert early is not late
    assert early.arg_names == late.arg_names
    assert [p.is_constexpr for p in early.params] == [p.is_constexpr for p in late.params]
    assert early.do_not_specialize == late.do_not_specialize
    source = textwrap.dedent(inspect.getsource(early.fn))
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    _docstring, *body = function.body
    arguments = ", ".join(late.arg_names)
    assert [ast.unparse(part) for part in body] == [
        "wait_for_kernel_in_front()",
        f"{name}({arguments})",
    ]


@pytest.mark.triton
def test_every_kernel_of_the_search_that_is_early_is_looked_at() -> None:
    assert set(import_module("xgr_ops.cuda.early_kernels").EARLY) == set(EARLY_NAMES)
