"""The beam ops past 2^31 elements, on tensors that take no memory, and references that read no value."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.beam_cases import (
    CHILDREN_LSE,
    LEVEL_LSE,
    PROVIDERS,
    SELECT,
    empty_rows,
    f32,
    oracle_lse,
    oracle_select,
    random_case,
    run_select,
    tiles_of,
)
from xgr_runtime.hal.ops.beam import (
    BeamRows,
    LevelTrie,
    children_logsumexp,
    flag_failed_searches,
    level_logsumexp,
    select_beams,
)
from xgr_runtime.hal.tolerances import TOLERANCES


@pytest.mark.parametrize("provider", PROVIDERS)
def test_rows_times_codes_past_int32(provider: str) -> None:
    """2^31 logits that take no memory: every row is the same row, and children are few."""
    num_codes, num_rows = 8192, (1 << 18) + 5
    row = torch.linspace(-1.0, 1.0, num_codes)
    logits_NC = row.expand(num_rows, num_codes)
    assert logits_NC.numel() > 1 << 31
    codes = torch.tensor([7, 8000, 8191], dtype=torch.int32)
    trie = LevelTrie(
        num_codes, 3, False, torch.tensor([0, 3]), codes, None, torch.ones(1, 3, dtype=torch.bool)
    )
    zeros_N = torch.zeros(num_rows, dtype=torch.int32)
    parents = BeamRows(
        torch.full((num_rows,), -100.0),
        zeros_N,
        zeros_N,
        zeros_N,
        torch.tensor([0, num_rows], dtype=torch.int32),
        zeros_N,
    )
    parents.scores_N[-2:] = torch.tensor([-3.0, -2.0])
    children = empty_rows([5])
    counters = torch.zeros(2, dtype=torch.int64)
    lse_N = torch.zeros(num_rows)
    rules = torch.zeros(1, dtype=torch.int32)
    SELECT[provider](logits_NC, lse_N, parents, rules, trie, children, counters)
    assert children.codes_N.tolist() == [8191, 8000, 8191, 8000, 7]
    last = num_rows - 1
    assert children.parents_N.tolist() == [last, last, last - 1, last - 1, last]
    values = row.numpy()[[8191, 8000, 8191, 8000, 7]]
    assert children.scores_N.tolist() == (f32([-2, -2, -3, -3, -2]) + values).tolist()
    lse_N = CHILDREN_LSE[provider](logits_NC, parents, rules, trie)
    want = oracle_lse(row[[7, 8000, 8191]].tolist())
    assert float((lse_N - want).abs().max()) < TOLERANCES[torch.float32].atol


@pytest.mark.parametrize("provider", PROVIDERS)
def test_nodes_times_codes_past_int32(provider: str) -> None:
    """A dense table of 2^31 entries of which only the last are true; untouched zero pages take no memory."""
    num_codes, num_nodes = 4, (1 << 29) + 3
    size = num_codes * num_nodes
    child_node = torch.full((1,), 6, dtype=torch.int32).expand(size)
    alive_RE = torch.from_numpy(np.zeros((1, size), np.bool_))
    alive_RE[0, -4:] = True
    trie = LevelTrie(num_codes, 4, True, None, None, child_node, alive_RE)
    parents = empty_rows([1])
    parents.scores_N.zero_()
    parents.nodes_N.fill_(num_nodes - 1)
    children = empty_rows([2])
    logits_NC = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    rules, counters = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    SELECT[provider](logits_NC, torch.zeros(1), parents, rules, trie, children, counters)
    assert children.codes_N.tolist() == [1, 2]
    assert children.nodes_N.tolist() == [6, 6]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_level_logsumexp_of_expanded_rows(provider: str) -> None:
    row = torch.linspace(-3.0, 3.0, 1000)
    lse_N = LEVEL_LSE[provider](row.expand(3000, 1000))
    assert lse_N.shape == (3000,)
    assert float((lse_N - oracle_lse(row.tolist())).abs().max()) < TOLERANCES[torch.float32].atol


@pytest.mark.parametrize("share", [0.5, 0.02])
def test_the_switch_between_listing_and_scanning_changes_no_result(share: float) -> None:
    """65 rows of 1,024 codes, on both sides of the CPU provider's switch as it is."""
    case = random_case(
        5, num_codes=1024, num_nodes=65, share=share, values=3, widths=[65], child_widths=[100]
    )
    want = oracle_select(case)
    got = run_select(SELECT["numpy"], case, case.csr())
    assert got == want == run_select(select_beams, case, case.csr())
    assert (got.counters[1] > 1000) == (share == 0.5)


def on_meta(value: Any) -> Any:
    """The same tensors without values, inside the ops' own structures too."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, BeamRows | LevelTrie):
        fields = dataclasses.fields(value)
        return type(value)(**{f.name: on_meta(getattr(value, f.name)) for f in fields})
    return value


def test_references_read_no_values() -> None:
    """Tensors without values: a host read, a data-dependent shape or a branch on a value would raise."""

    case = random_case(1)
    logits_NC = torch.from_numpy(case.logits).to("meta")
    parents, rules = on_meta(case.parent_rows()), on_meta(case.rules())
    children = on_meta(empty_rows(case.child_widths, case.child_padding))
    status_S1 = torch.zeros(len(case.widths) + 1, dtype=torch.int32, device="meta")
    counters = torch.zeros(2, dtype=torch.int64, device="meta")
    lse_N = level_logsumexp(logits_NC)
    flag_failed_searches(lse_N, parents, status_S1, 0)
    for trie in map(on_meta, case.tries().values()):
        with tiles_of(40):
            assert children_logsumexp(logits_NC, parents, rules, trie).shape == lse_N.shape
            select_beams(logits_NC, lse_N, parents, rules, trie, children, counters)
