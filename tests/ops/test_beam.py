"""The beam-selection ops against plain Python over fp32 scalars: reference and CPU provider, CSR and dense layouts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.beam_cases import (
    DEAD,
    INF,
    LEVEL_LSE,
    NAN,
    PROVIDERS,
    SELECT,
    Case,
    bits,
    empty_rows,
    f32,
    oracle_select,
    random_case,
    run_select,
    small_scans,
    tiles_of,
)
from xgr_runtime.hal.ops.beam import (
    children_logsumexp,
    flag_failed_searches,
    level_logsumexp,
    select_beams,
)
from xgr_runtime.hal.registry import OpSpec, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def scans() -> Iterator[None]:
    """Small cases take both ways through the CPU provider."""
    with small_scans():
        yield


def assert_selects_like_the_oracle(case: Case) -> None:
    want = oracle_select(case)
    for layout, trie in case.tries().items():
        for provider, select in SELECT.items():
            got = run_select(select, case, trie)
            assert got == want, (layout, provider)


def single(logits: list[list[float]], **changes: Any) -> Case:
    """One search whose rows stand on one hub (every code a child, everything alive), lse 0, parents 0."""
    rows, num_codes = len(logits), len(logits[0])
    case = Case(
        num_codes=num_codes,
        children=[list(range(num_codes))],
        alive=[[True] * num_codes],
        rule_row=[0],
        widths=[rows],
        child_widths=[4],
        parents=[0.0] * rows,
        nodes=[0] * rows,
        logits=np.array(logits, np.float32),
        lse=np.zeros(rows, np.float32),
    )
    return dataclasses.replace(case, **changes)


def chosen(case: Case) -> list[tuple[int, int]]:
    """(parent, code) of the live rows; all providers and layouts agree with the oracle first."""
    assert_selects_like_the_oracle(case)
    got = run_select(select_beams, case, case.csr())
    live = [score != bits([DEAD])[0] for score in got.scores]
    return [(p, c) for p, c, is_live in zip(got.parents, got.codes, live, strict=True) if is_live]


# select_beams: random rounds


@given(SEEDS, st.sampled_from([5, 40, 1 << 20]))
def test_random_rounds(seed: int, tile: int) -> None:
    with tiles_of(tile):
        assert_selects_like_the_oracle(random_case(seed))


@given(SEEDS)
def test_random_hubs(seed: int) -> None:
    case = random_case(seed, num_codes=40, share=0.9, widths=[12, 0, 9], child_widths=[7, 3, 20])
    assert_selects_like_the_oracle(case)


@pytest.mark.parametrize("width", [1, 9, 128, 512, 1000, 1024])
@pytest.mark.parametrize("values", [0, 3])
def test_widths(width: int, values: int) -> None:
    for seed in range(2):
        case = random_case(
            seed,
            num_codes=64,
            num_nodes=30,
            share=0.3,
            values=values,
            widths=[40, 3],
            child_widths=[width, 2],
        )
        assert_selects_like_the_oracle(case)


@given(SEEDS)
def test_a_batch_equals_each_search_alone(seed: int) -> None:
    case = random_case(seed)
    for provider, select in SELECT.items():
        together = run_select(select, case, case.csr())
        first, child = 0, 0
        for search, (width, child_width) in enumerate(
            zip(case.widths, case.child_widths, strict=True)
        ):
            rows = slice(first, first + width)
            alone = dataclasses.replace(
                case,
                rule_row=[case.rule_row[search]],
                widths=[width],
                child_widths=[child_width],
                parents=case.parents[rows],
                nodes=case.nodes[rows],
                logits=case.logits[rows],
                lse=case.lse[rows],
                padding=0,
                child_padding=0,
            )
            got = run_select(select, alone, case.csr())
            mine = slice(child, child + child_width)
            assert got.scores == together.scores[mine], provider
            assert got.codes == together.codes[mine], provider
            assert got.nodes == together.nodes[mine], provider
            assert [p + first for p in got.parents] == together.parents[mine], provider
            first, child = first + width, child + child_width


@pytest.mark.parametrize(
    ("num_levels", "widths"), [(1, [5]), (5, [3, 9, 4, 1, 12]), (3, [9, 3, 9])]
)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_whole_search_with_growing_and_shrinking_widths(
    num_levels: int, widths: list[int], provider: str
) -> None:
    """Round after round from the root, against a plain beam search that keeps codes, not nodes."""
    rng = np.random.default_rng(num_levels)
    sids = sorted({tuple(rng.integers(0, 4, num_levels).tolist()) for _ in range(60)})
    beams: list[tuple[tuple[int, ...], Any]] = [((), np.float32(0.0))]
    rows = empty_rows([1])
    rows.scores_N.zero_()
    rows.nodes_N.zero_()
    for level, width in enumerate(widths):
        prefixes = sorted({sid[:level] for sid in sids})
        children = [sorted({s[level] for s in sids if s[:level] == p}) for p in prefixes]
        alive = [[True] * sum(map(len, children))]
        logits = rng.standard_normal((len(rows.scores_N), 4)).astype(np.float32)
        lse = LEVEL_LSE[provider](torch.from_numpy(logits))
        case = Case(4, children, alive, [0], [], [], [], [], logits, lse.numpy())
        next_rows = empty_rows([width])
        arguments = (torch.from_numpy(logits), lse, rows, case.rules(), case.csr(), next_rows)
        SELECT[provider](*arguments, torch.zeros(2, dtype=torch.int64))
        found = [
            (-(score + (logits[row, code] - lse.numpy()[row])), row, code, (*prefix, code))
            for row, (prefix, score) in enumerate(beams)
            for code in children[prefixes.index(prefix)]
        ]
        beams = [(prefix, -score) for score, _, _, prefix in sorted(found)[:width]]
        rows = next_rows
        assert rows.scores_N.tolist()[: len(beams)] == [float(score) for _, score in beams]
        nodes = sorted({sid[: level + 1] for sid in sids})
        assert rows.nodes_N.tolist()[: len(beams)] == [nodes.index(p) for p, _ in beams]
        assert torch.isneginf(rows.scores_N[len(beams) :]).all()


# select_beams: ties and special values


def test_ties_in_a_row_go_by_code_and_across_rows_by_parent() -> None:
    case = single([[1, 2, 2, 2], [2, 2, 0, 2]], child_widths=[5])
    assert chosen(case) == [(0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_rows_tie_where_both_normalisers_are_bit_equal() -> None:
    case = single([[2, 3], [2, 3]], lse=np.array([1.5, 1.5], np.float32), child_widths=[3])
    assert chosen(case) == [(0, 1), (1, 1), (0, 0)]
    nearly = np.array([np.nextafter(np.float32(1.5), np.float32(2)), 1.5], np.float32)
    assert chosen(dataclasses.replace(case, lse=nearly)) == [(1, 1), (0, 1), (1, 0)]


def test_zeros_of_either_sign_are_one_tie_and_come_out_positive() -> None:
    case = single([[-0.0, 0.0, -0.0]], parents=[-0.0], child_widths=[3])
    assert chosen(case) == [(0, 0), (0, 1), (0, 2)]
    assert run_select(select_beams, case, case.csr()).scores == bits([0.0, 0.0, 0.0])


def test_each_operation_is_rounded_in_order() -> None:
    logits, lse, parent = np.float32(0.1), np.float32(10.3), np.float32(-0.37)
    case = single([[logits]], lse=np.array([lse]), parents=[float(parent)], child_widths=[1])
    in_order = parent + (logits - lse)
    assert in_order != (parent + logits) - lse
    assert_selects_like_the_oracle(case)
    assert run_select(select_beams, case, case.csr()).scores == bits([in_order])


def test_child_of_minus_infinity_is_dropped_and_a_row_of_nothing_else_is_dead() -> None:
    case = single([[DEAD, 1, DEAD], [DEAD] * 3, [0, DEAD, 0]], lse=f32([0, DEAD, 0]))
    assert chosen(case) == [(0, 1), (2, 0), (2, 2)]


def test_rows_without_candidates_are_dead_at_the_end_of_the_range() -> None:
    case = single(
        [[1, 0], [3, 1]],
        widths=[1, 1],
        child_widths=[4, 3],
        rule_row=[0, 0],
        child_padding=2,
    )
    for select in SELECT.values():
        got = run_select(select, case, case.dense())
        assert got.scores == bits([1, 0, DEAD, DEAD, 3, 1, DEAD, DEAD, DEAD])
        assert got.nodes == [0, 1, 0, 0, 0, 1, 0, 0, 0]
        assert got.parents == [0, 0, 0, 0, 1, 1, 1, 0, 0]
        assert got.codes == [0, 1, 0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("bad", [NAN, INF, DEAD])
def test_bad_normaliser_or_parent_kills_its_row_alone(bad: float) -> None:
    assert chosen(single([[1, 2], [1, 2]], lse=f32([bad, 0]))) == [(1, 1), (1, 0)]
    if bad != INF:
        assert chosen(single([[1, 2], [1, 2]], parents=[0.0, bad])) == [(0, 1), (0, 0)]


def test_extreme_finite_logits() -> None:
    case = single([[1e30, -1e30, 3e38, -3e38]], lse=f32([3e38]), child_widths=[4])
    assert chosen(case) == [(0, 2), (0, 0), (0, 1)]  # -3e38 - 3e38 is -inf


def test_wider_than_codes_and_than_all_candidates() -> None:
    assert len(chosen(single([[1, 2, 3]], child_widths=[4]))) == 3
    assert len(chosen(single([[1, 2, 3]] * 2, child_widths=[7]))) == 6


def test_chain_of_single_children() -> None:
    case = random_case(
        3, num_codes=1, num_nodes=1, widths=[1], child_widths=[5], values=3, padding=0
    )
    alive = dataclasses.replace(case, alive=[[True]], rule_row=[0], parents=[-2.0])
    assert chosen(alive) == [(0, 0)]


def test_everything_excluded_gives_no_beam() -> None:
    assert chosen(single([[1, 2, 3]], alive=[[False] * 3])) == []


def test_each_search_lives_by_its_own_rule_row() -> None:
    case = single(
        [[3, 2, 1], [3, 2, 1]],
        widths=[1, 1],
        child_widths=[2, 2],
        alive=[[True, False, True], [False, True, True]],
        rule_row=[1, 0],
    )
    assert chosen(case) == [(0, 1), (0, 2), (1, 0), (1, 2)]


# select_beams: early termination


def hub_case(spread: float, seed: int = 0, width: int = 32) -> Case:
    case = random_case(
        seed,
        num_codes=256,
        num_nodes=width,
        share=0.5,
        alive_share=0.9,
        values=3,
        widths=[width],
        child_widths=[width],
        padding=0,
        num_rules=1,
    )
    parents = np.linspace(0, -spread, width, dtype=np.float32)
    return dataclasses.replace(case, parents=parents.tolist(), nodes=list(range(width)))


@pytest.mark.parametrize("spread", [0.0, 6.0, 60.0])
def test_hub_skips_rows_and_stays_exact(spread: float) -> None:
    for seed in range(3):
        assert_selects_like_the_oracle(hub_case(spread, seed))


def test_counters_count_live_and_skipped_rows() -> None:
    case = hub_case(60.0)
    dead = dataclasses.replace(case, parents=[*case.parents[:-2], DEAD, NAN])
    for layout, trie in dead.tries().items():
        assert run_select(SELECT["reference"], dead, trie).counters == [100 + 30, 1000]
        live, skipped = run_select(SELECT["numpy"], dead, trie).counters
        assert live == 130, layout
        assert 1020 <= skipped <= 1029, layout


def test_row_whose_bound_equals_the_threshold_is_not_skipped() -> None:
    """All rows tie: whichever row is looked at first, the first parents and the lowest codes win."""
    rows = [[0.0] * 30 for _ in range(40)]
    case = single(rows, child_widths=[35])
    assert chosen(case) == [(0, code) for code in range(30)] + [(1, code) for code in range(5)]


def test_earlier_parent_wins_a_tie_with_rows_of_better_bounds() -> None:
    """Row 39 is looked at first and fills the beam; row 0 only ties with its last ones, and takes their places."""
    rows = [[0.0] * 30] + [[-5.0] * 30 for _ in range(38)] + [[1.0] + [0.0] * 29]
    case = single(rows, child_widths=[20])
    assert chosen(case) == [(39, 0)] + [(0, code) for code in range(19)]


def test_large_logits_of_codes_that_are_no_children_do_not_mislead_the_bound() -> None:
    case = hub_case(6.0)
    logits = case.logits.copy()
    for row, node in enumerate(case.nodes):
        foreign = [c for c in range(256) if c not in case.children[node]]
        logits[row, foreign[0]] = (1e30, NAN, INF, 50.0)[row % 4]
    assert_selects_like_the_oracle(dataclasses.replace(case, logits=logits))


# binding


def test_cpu_binds_the_numpy_provider() -> None:
    spec = OpSpec("cpu", torch.float32)
    assert resolve(select_beams, spec, allow_reference=False).provider == "numpy"
    assert resolve(level_logsumexp, spec, allow_reference=False).provider == "numpy"
    assert resolve(children_logsumexp, spec, allow_reference=False).provider == "numpy"
    assert resolve(flag_failed_searches, spec, allow_reference=False).provider == "numpy"
