"""The Ascend beam providers against plain Python over fp32 scalars: ties, hubs, widths, dead rows, both layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import xgr_ops.ascend.beam
import xgr_ops.ascend.level_edges
from hypothesis import given, settings
from hypothesis import strategies as st
from xgr_ops.ascend.beam import select_beams_by_two_sorts

from tests.ascend.beam_rounds import single, tiles_of
from tests.ascend.providers import copied, fill
from tests.helpers.strict_device import StrictDevice
from tests.ops.beam_cases import (
    DEAD,
    INF,
    NAN,
    Case,
    bits,
    empty_rows,
    f32,
    oracle_select,
    outcome,
    random_case,
    run_select,
)
from xgr_runtime.hal.ops.beam import LevelTrie, select_beams

SEEDS = st.integers(0, 2**32 - 1)
ONE_TILE = xgr_ops.ascend.beam.TILE_CANDIDATES


def with_wide_offsets(trie: LevelTrie) -> LevelTrie:
    assert trie.offsets is not None
    return dataclasses.replace(trie, offsets=trie.offsets.long())


def assert_selects_like_the_oracle(case: Case) -> None:
    want = oracle_select(case)
    tries = case.tries()
    tries["csr, int64 offsets"] = with_wide_offsets(tries["csr"])
    for layout, trie in tries.items():
        got = run_select(select_beams_by_two_sorts, case, trie)
        assert got == want, layout
        assert got.counters == run_select(select_beams, case, trie).counters, layout


@given(SEEDS, st.sampled_from([5, 40, ONE_TILE]))
def test_random_rounds(seed: int, tile: int) -> None:
    with tiles_of(tile):
        assert_selects_like_the_oracle(random_case(seed))


@settings(max_examples=25)
@given(SEEDS, st.sampled_from([64, 200, ONE_TILE]))
def test_random_hubs_with_rows_that_are_cut(seed: int, tile: int) -> None:
    """More codes than child rows, with ties all over: each row is sorted and cut before rows are merged."""
    case = random_case(
        seed, num_codes=40, share=0.9, widths=[12, 0, 9], child_widths=[7, 3, 8], child_padding=1
    )
    with tiles_of(tile):
        assert_selects_like_the_oracle(case)


@pytest.mark.parametrize("width", [1, 9, 512, 1000])
@pytest.mark.parametrize("values", [0, 3])
def test_growing_and_shrinking_widths(width: int, values: int) -> None:
    case = random_case(
        width,
        num_codes=64,
        num_nodes=30,
        share=0.3,
        values=values,
        widths=[40, 3],
        child_widths=[width, 2],
    )
    assert_selects_like_the_oracle(case)


@pytest.mark.parametrize("child_width", [3, 50, 400])
@pytest.mark.parametrize("candidates", [1, 256, 1000, ONE_TILE])
def test_a_hub_beyond_a_tile(child_width: int, candidates: int) -> None:
    """Every row is larger than a tile, as large as one, or several fit; all scores are one of four, so ties decide."""
    rng = np.random.default_rng(child_width)
    logits = rng.integers(0, 4, (20, 256)).astype(np.float32)
    case = single(logits.tolist(), child_widths=[child_width])
    with tiles_of(candidates):
        assert_selects_like_the_oracle(case)


@pytest.mark.parametrize(("child_width", "num_merged"), [(3, 20 * 3), (256, 20 * 256)])
def test_rows_below_a_hub_are_cut_before_they_are_merged(
    child_width: int, num_merged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = []
    merge = xgr_ops.ascend.beam._merge

    def counted(best: Any, tile: Any, *rest: Any) -> Any:
        merged.append(tile.scores.shape[0])
        return merge(best, tile, *rest)

    monkeypatch.setattr(xgr_ops.ascend.beam, "_merge", counted)
    case = single(np.zeros((20, 256)).tolist(), child_widths=[child_width])
    run_select(select_beams_by_two_sorts, case, case.csr())
    assert merged == [num_merged]


def test_ties_go_by_parent_row_and_then_by_code() -> None:
    case = single([[0.0] * 30 for _ in range(40)], child_widths=[35])
    got = run_select(select_beams_by_two_sorts, case, case.csr())
    assert got.parents == [0] * 30 + [1] * 5
    assert got.codes == [*range(30), *range(5)]
    cut = single([[2, 3, 3], [3, 2, 3]], child_widths=[2])
    got = run_select(select_beams_by_two_sorts, cut, cut.dense())
    assert (got.parents, got.codes) == ([0, 0], [1, 2])


def test_zeros_of_either_sign_tie_and_come_out_positive() -> None:
    case = single([[-0.0, 0.0, -0.0]], parents=[-0.0], child_widths=[3])
    got = run_select(select_beams_by_two_sorts, case, case.csr())
    assert (got.codes, got.scores) == ([0, 1, 2], bits([0.0, 0.0, 0.0]))


def test_each_operation_is_rounded_in_order() -> None:
    logits, lse, parent = np.float32(0.1), np.float32(10.3), np.float32(-0.37)
    case = single([[logits]], lse=np.array([lse]), parents=[float(parent)], child_widths=[1])
    assert parent + (logits - lse) != (parent + logits) - lse
    assert_selects_like_the_oracle(case)


@pytest.mark.parametrize("bad", [NAN, INF, DEAD])
def test_a_bad_logit_normaliser_or_parent_never_comes_through(bad: float) -> None:
    for case in (
        single([[1, bad], [bad, 2]]),
        single([[1, 2], [1, 2]], lse=f32([bad, 0])),
        single([[1, 2], [1, 2]], parents=[0.0, bad]),
        single([[bad, bad]], child_widths=[2]),
        single([[1e30, -1e30, 3e38, -3e38]], lse=f32([3e38])),
    ):
        assert_selects_like_the_oracle(case)
        got = run_select(select_beams_by_two_sorts, case, case.csr())
        scores = np.array(got.scores, np.int32).view(np.float32)
        assert not np.isnan(scores).any()
        assert (scores < INF).all()


def test_padding_full_of_garbage_takes_no_place() -> None:
    """One search (no sort by search) and several; padding rows whose scores would win."""
    for widths, rules in (([2], [0]), ([1, 1], [0, 0])):
        case = single(
            [[1, 0], [3, 1], [9, 9], [9, 9]],
            widths=widths,
            rule_row=rules,
            child_widths=[3] * len(widths),
            parents=[0.0, 0.0, 1e3, NAN],
            nodes=[0, 0, 1 << 30, 1 << 30],
            lse=np.zeros(4, np.float32),
            padding=2,
            child_padding=3,
        )
        for candidates in (1, 4, ONE_TILE):
            with tiles_of(candidates):
                assert_selects_like_the_oracle(case)


def test_no_rows_no_children_and_nothing_alive() -> None:
    assert_selects_like_the_oracle(single([[1, 2, 3]], alive=[[False] * 3]))
    assert_selects_like_the_oracle(single([[1, 2, 3]], child_widths=[0]))
    no_rows: dict[str, Any] = {
        "logits": np.zeros((0, 2), np.float32),
        "lse": np.zeros(0, np.float32),
    }
    rowless = dataclasses.replace(single([[1, 2]]), widths=[0], parents=[], nodes=[], **no_rows)
    assert_selects_like_the_oracle(rowless)


@pytest.mark.parametrize("seed", range(4))
def test_indices_of_either_width_give_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xgr_ops.ascend.level_edges, "INT32_MAX", 0)
    case = random_case(seed)
    assert_selects_like_the_oracle(case)
    level = xgr_ops.ascend.level_edges.LevelEdges(case.parent_rows(), case.rules(), case.csr())
    assert level.index_dtype == torch.int64


def test_a_table_of_more_than_2_to_the_31_edges() -> None:
    """A dense table of which only the last entries are true; untouched zero pages take no memory."""
    num_codes, num_nodes = 4, (1 << 29) + 3
    size = num_codes * num_nodes
    alive_RE = torch.from_numpy(np.zeros((1, size), np.bool_))
    alive_RE[0, -4:] = True
    child_node = torch.from_numpy(np.zeros(size, np.int32))
    child_node[-3:-1] = torch.tensor([6, 7], dtype=torch.int32)
    trie = LevelTrie(num_codes, 4, True, None, None, child_node, alive_RE)
    parents, children = empty_rows([1]), empty_rows([2])
    parents.scores_N.zero_()
    parents.nodes_N.fill_(num_nodes - 1)
    logits_NC, rules = torch.tensor([[0.0, 2.0, 1.0, -1.0]]), torch.zeros(1, dtype=torch.int32)
    counters = torch.zeros(2, dtype=torch.int64)
    select_beams_by_two_sorts(logits_NC, torch.zeros(1), parents, rules, trie, children, counters)
    assert (children.codes_N.tolist(), children.nodes_N.tolist()) == ([1, 2], [6, 7])


@pytest.mark.parametrize("layout", ["csr", "dense"])
def test_one_capture_serves_other_values(layout: str) -> None:
    """Rounds of the same shapes and other logits, beams and rules in the buffers of a captured call."""
    changes: dict[str, Any] = {
        "num_codes": 12,
        "num_nodes": 5,
        "num_rules": 2,
        "share": 1.0,
        "widths": [6, 7],
        "child_widths": [9, 3],
        "padding": 2,
        "child_padding": 1,
        "slack": 0,
    }
    cases = [random_case(seed, values=seed % 4, **changes) for seed in range(6)]
    args = [arguments(case, layout) for case in cases]
    buffers = copied(args[0])
    with tiles_of(40):
        graph = StrictDevice().capture("select", lambda: select_beams_by_two_sorts(**buffers))
        for case, values in zip(cases, args, strict=True):
            fill(buffers, values)
            graph.replay()
            assert outcome(buffers["children"], buffers["counters"]) == oracle_select(case)


def arguments(case: Case, layout: str) -> dict[str, Any]:
    return {
        "logits_NC": torch.from_numpy(case.logits),
        "lse_N": torch.from_numpy(case.lse),
        "parents": case.parent_rows(),
        "rule_row_S": case.rules(),
        "trie": case.tries()[layout],
        "children": empty_rows(case.child_widths, case.child_padding),
        "counters": torch.zeros(2, dtype=torch.int64),
    }
