"""The normalisers against float64, and the failure of searches that read NaN or +inf."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import xgr_ops.cpu.beam
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.beam_cases import (
    CHILDREN_LSE,
    DEAD,
    FLAG,
    INF,
    LEVEL_LSE,
    NAN,
    PROVIDERS,
    SELECT,
    Case,
    bits,
    empty_rows,
    f32,
    oracle_lse,
    outcome,
    random_case,
    tiles_of,
)
from xgr_runtime.hal.tolerances import TOLERANCES

SEEDS = st.integers(0, 2**32 - 1)


def assert_close(got: torch.Tensor, want: list[float]) -> None:
    limit = TOLERANCES[torch.float32]
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(),
        torch.tensor(want, dtype=torch.float64),
        rtol=limit.rtol,
        atol=limit.atol,
        equal_nan=True,
    )


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("tile", [3, 64, 1 << 20])
def test_level_logsumexp(provider: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgr_ops.cpu.beam, "CHUNK_ELEMENTS", tile)
    rows = [
        [0.0, 1.0, 2.0],
        [DEAD, 1.0, DEAD],
        [DEAD, DEAD, DEAD],
        [NAN, 1.0, DEAD],
        [INF, 1.0, DEAD],
        [INF, NAN, 0.0],
        [1e30, 1e30, -1e30],
        [-1e30, -1e30, -1e30],
        [3e38, -3e38, 3e38],
        [65504.0, -65504.0, 65504.0],
        [-0.0, 0.0, -0.0],
        [INF, INF, INF],
        [88.0, 88.0, 88.0],
        [-88.0, -89.0, -90.0],
        [-100.0, 60.0, DEAD],
        [-45.0, -46.0, -104.0],
    ]
    with tiles_of(tile):
        got = LEVEL_LSE[provider](torch.tensor(rows))
    assert_close(got, [oracle_lse(row) for row in rows])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 8192), (7, 31), (33, 513), (0, 5)])
def test_level_logsumexp_shapes(provider: str, shape: tuple[int, int]) -> None:
    logits = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 5
    got = LEVEL_LSE[provider](torch.from_numpy(logits))
    assert_close(got, [oracle_lse(row) for row in logits.tolist()])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_level_logsumexp_of_strided_rows(provider: str) -> None:
    logits = torch.arange(40.0).reshape(5, 8).T[::2]
    assert_close(LEVEL_LSE[provider](logits), [oracle_lse(row) for row in logits.tolist()])


@given(SEEDS, st.sampled_from([5, 40, 1 << 20]))
def test_children_logsumexp(seed: int, tile: int) -> None:
    """Over the living children of live rows only; everything else gives -inf."""
    case = random_case(seed)
    want = []
    ends = np.cumsum([len(codes) for codes in case.children])
    searches = np.repeat(np.arange(len(case.widths)), case.widths).tolist()
    for row, search in enumerate(searches):
        if not case.parents[row] > DEAD:
            want.append(DEAD)
            continue
        codes = case.children[case.nodes[row]]
        edges = range(ends[case.nodes[row]] - len(codes), ends[case.nodes[row]])
        alive = case.alive[case.rule_row[search]]
        values = [case.logits[row, c] for c, e in zip(codes, edges, strict=True) if alive[e]]
        want.append(oracle_lse(values))
    want += [DEAD] * case.padding
    with tiles_of(tile):
        for trie in case.tries().values():
            for provider in CHILDREN_LSE.values():
                got = provider(
                    torch.from_numpy(case.logits), case.parent_rows(), case.rules(), trie
                )
                assert_close(got, want)


# flag_failed_searches


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("normaliser", ["level", "valid", "vocab"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_nan_and_infinity_fail_their_search_alone(
    bad: float, normaliser: str, provider: str
) -> None:
    """Three searches of two rows; only what a live row's normaliser reads fails, and names the round."""
    children = [[0, 1], [1, 2]]
    case = Case(
        num_codes=4,
        children=children,
        alive=[[True, True, True, False]],
        rule_row=[0, 0, 0],
        widths=[2, 2, 2],
        child_widths=[2, 2, 2],
        parents=[0.0, -1.0] * 3,
        nodes=[0, 1] * 3,
        logits=np.tile(f32([1, 0, -1, -2]), (7, 1)),
        lse=np.zeros(7, np.float32),
        padding=1,
    )
    case.logits[2, 3] = bad  # no child of any row
    case.logits[3, 2] = bad  # a child that is not alive
    case.logits[5, 1] = bad  # a living child
    case.logits[6] = bad  # padding
    case = dataclasses.replace(case, parents=[*case.parents, NAN], nodes=[*case.nodes, 0])
    logits_NC, rows = torch.from_numpy(case.logits), case.parent_rows()
    if normaliser == "level":
        lse_N = LEVEL_LSE[provider](logits_NC)
    elif normaliser == "valid":
        lse_N = CHILDREN_LSE[provider](logits_NC, rows, case.rules(), case.csr())
    else:
        wider = torch.cat((logits_NC, torch.zeros(7, 3)), dim=1)
        wider[0, 5] = bad  # a token outside the catalogue
        lse_N = torch.logsumexp(wider, dim=1)
    status_S1 = torch.zeros(4, dtype=torch.int32)
    FLAG[provider](lse_N, rows, status_S1, 1)
    failed = {"level": [0, 2, 2, 0], "valid": [0, 0, 2, 0], "vocab": [2, 2, 2, 0]}[normaliser]
    assert status_S1.tolist() == failed
    for search in range(3):
        own = rows.scores_N[2 * search : 2 * search + 2].tolist()
        assert own == ([DEAD, DEAD] if failed[search] else [0.0, -1.0])
    children_rows, counters = empty_rows(case.child_widths), torch.zeros(2, dtype=torch.int64)
    SELECT[provider](logits_NC, lse_N, rows, case.rules(), case.csr(), children_rows, counters)
    live = outcome(children_rows, counters).scores
    for search in range(3):
        is_dead = [score == bits([DEAD])[0] for score in live[2 * search : 2 * search + 2]]
        assert is_dead == [bool(failed[search])] * 2
    assert counters.tolist()[0] == 2 * failed[:3].count(0)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_first_failed_round_stays_and_dead_rows_do_not_fail(provider: str) -> None:
    rows = empty_rows([2, 1, 1], 1)
    rows.scores_N.copy_(torch.tensor([0.0, DEAD, 0.0, 0.0, NAN]))
    status_S1 = torch.tensor([0, 1, 0, 0], dtype=torch.int32)
    FLAG[provider](torch.tensor([0.0, NAN, NAN, DEAD, NAN]), rows, status_S1, 2)
    assert status_S1.tolist() == [0, 1, 0, 0]
    assert rows.scores_N[:4].tolist() == [0.0, DEAD, DEAD, 0.0]
