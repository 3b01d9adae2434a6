"""The comparison catches what it has to catch and accepts what a right run may do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.catalogs import contiguous_tokens, random_catalog
from tests.helpers.oracle import Catalog, Item, TableModel, beam_search
from xgr_runtime.conformance.same_answer import (
    Answer,
    BeamTrace,
    Reference,
    SameAnswerTotals,
    assert_same_answer,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from tests.helpers.oracle import Sid

    LogProbs = dict[Sid, dict[int, float]]

T = 0.01


def reference(log_probs: LogProbs) -> Reference:
    def child_log_probs(prefixes: Sequence[Sid]) -> list[npt.NDArray[np.float64]]:
        return [np.array(list(log_probs[prefix].values())) for prefix in prefixes]

    depth = 1 + max(map(len, log_probs))
    return Reference(depth, lambda prefix: list(log_probs[prefix]), child_log_probs)


def model_reference(catalog: Catalog, model: TableModel) -> Reference:
    def child_log_probs(prefixes: Sequence[Sid]) -> list[npt.NDArray[np.float64]]:
        rows = []
        for prefix in prefixes:
            logits = model(prefix).astype(np.float64)
            tokens = [catalog.token_of[len(prefix)][code] for code in catalog.children[prefix]]
            rows.append(logits[tokens] - np.logaddexp.reduce(logits))
        return rows

    return Reference(catalog.num_levels, lambda p: catalog.children[p], child_log_probs)


LOG_PROBS: LogProbs = {
    (): {0: -1.0, 1: -1.5, 2: -2.0, 3: -4.0},
    (0,): {0: -1.0, 1: -1.3, 2: -3.0},
    (1,): {0: -0.6, 1: -2.2},
    (2,): {0: -0.4, 1: -1.9},
    (3,): {0: -0.1},
}
WIDTHS = [3, 4]
# scores: (0,0) -2.0 | (1,0) -2.1 | (0,1) -2.3 | (2,0) -2.4 || (1,1) -3.7 | (2,1) -3.9 | (0,2) -4.0 | (3,0) -4.1


def right_answer() -> Answer:
    return Answer.from_trace(reference(LOG_PROBS).search(WIDTHS))


def with_rows(rows: Sequence[tuple[Sid, float]], *, keep_trace: bool = False) -> Answer:
    trace = BeamTrace([right_answer().trace.levels[0], rows]) if keep_trace else None  # type: ignore[union-attr]
    return Answer(rows, len(rows), trace)


def check(got: Answer, t: float = T) -> None:
    assert_same_answer(got, reference(LOG_PROBS), t, WIDTHS)


def test_the_reference_itself_is_right() -> None:
    got = right_answer()
    assert [sid for sid, _ in got.rows] == [(0, 0), (1, 0), (0, 1), (2, 0)]
    stats = assert_same_answer(got, reference(LOG_PROBS), T, WIDTHS)
    assert stats.num_safe == stats.num_rows == stats.num_common == 4
    assert stats.is_identical
    assert stats.possible_checked


def test_catches_a_wrong_order() -> None:
    rows = list(right_answer().rows)
    swapped = [(rows[1][0], rows[0][1]), (rows[0][0], rows[1][1]), *rows[2:]]
    with pytest.raises(AssertionError, match=r"\(ii\)"):
        check(with_rows(swapped), t=0.04)
    check(with_rows(swapped), t=0.11)


def test_catches_rows_not_sorted_by_their_own_score() -> None:
    rows = list(right_answer().rows)
    with pytest.raises(AssertionError, match="not sorted"):
        check(with_rows([rows[1], rows[0], *rows[2:]]), t=0.06)


def test_catches_a_missing_safe_row() -> None:
    log_probs: LogProbs = {(): {0: -1.0, 1: -2.0, 2: -2.005}}
    rows = [((1,), -2.0), ((2,), -2.005)]
    with pytest.raises(AssertionError, match=r"must survive are missing: \(0,\)"):
        assert_same_answer(Answer(rows, 2), reference(log_probs), T, [2])


def test_catches_an_impossible_row() -> None:
    log_probs: LogProbs = {(): {c: -1.0 - 0.01 * c for c in range(4)} | {9: -9.0}}
    near = [((0,), -1.0), ((9,), -9.0)]
    with pytest.raises(AssertionError, match="cannot survive"):
        assert_same_answer(Answer(near, 2), reference(log_probs), 0.1, [2])


def test_catches_a_duplicate() -> None:
    rows = list(right_answer().rows)
    with pytest.raises(AssertionError, match="twice"):
        check(with_rows([rows[0], rows[0], *rows[1:3]]))


@pytest.mark.parametrize("sid", [(0, 7), (8, 0)])
def test_catches_an_invalid_sid(sid: Sid) -> None:
    rows = list(right_answer().rows)
    with pytest.raises(AssertionError, match="not a valid prefix"):
        check(with_rows([*rows[:3], (sid, -2.4)]))


def test_catches_a_wrong_score() -> None:
    rows = [(sid, score - 2 * T) for sid, score in right_answer().rows]
    with pytest.raises(AssertionError, match=r"\(i\)"):
        check(with_rows(rows))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_catches_a_score_that_is_not_finite(bad: float) -> None:
    rows = list(right_answer().rows)
    with pytest.raises(AssertionError, match="finite"):
        check(with_rows([*rows[:3], (rows[3][0], bad)]))


def test_catches_a_dropped_better_child_at_a_middle_level() -> None:
    first = [((0,), -1.0), ((1,), -1.5), ((3,), -4.0)]
    last = [((0, 0), -2.0), ((1, 0), -2.1), ((0, 1), -2.3), ((1, 1), -3.7)]
    with pytest.raises(AssertionError, match=r"\(iii\) level 0: dropped \(2,\)"):
        check(Answer.from_trace(BeamTrace([first, last])))


def test_catches_a_beam_that_is_not_filled_in_a_middle_level() -> None:
    first = right_answer().trace.levels[0][:2]  # type: ignore[union-attr]
    with pytest.raises(AssertionError, match="level 0: expected 3 beams of 4"):
        check(Answer(right_answer().rows, 4, BeamTrace([first, right_answer().rows])))


def test_catches_a_wrong_num_valid() -> None:
    got = right_answer()
    with pytest.raises(AssertionError, match="num_valid is 3"):
        check(replace(got, num_valid=3))
    with pytest.raises(AssertionError, match="num_valid: expected 4, got 3"):
        check(Answer(got.rows[:3], 3))


def test_accepts_a_near_tie_in_either_order() -> None:
    log_probs: LogProbs = {(): {0: -1.0, 1: -1.005, 2: -3.0}}
    swapped = Answer.from_trace(BeamTrace([[((1,), -0.999), ((0,), -1.004)]]))
    stats = assert_same_answer(swapped, reference(log_probs), T, [2])
    assert not stats.is_identical
    assert stats.num_safe == 2


def test_accepts_either_side_of_a_near_tie_at_the_boundary() -> None:
    log_probs: LogProbs = {(): {0: -1.0, 1: -2.0, 2: -2.01}}
    for second in (1, 2):
        rows = [((0,), -1.0), ((second,), -2.005)]
        stats = assert_same_answer(
            Answer.from_trace(BeamTrace([rows])), reference(log_probs), T, [2]
        )
        assert (stats.num_safe, stats.num_possible) == (1, 3)


def test_a_near_tie_may_decide_how_many_rows_there_are() -> None:
    log_probs: LogProbs = {
        (): {0: -1.0, 1: -1.005},
        (0,): {0: -1.0},
        (1,): {0: -1.0, 1: -1.1},
    }
    one = BeamTrace([[((0,), -1.0)], [((0, 0), -2.0)]])
    two = BeamTrace([[((1,), -1.0)], [((1, 0), -2.0), ((1, 1), -2.1)]])
    for trace in (one, two):
        assert_same_answer(Answer.from_trace(trace), reference(log_probs), T, [1, 2])
    cut = BeamTrace([two.levels[0], two.levels[1][:1]])
    with pytest.raises(AssertionError, match="level 1: expected 2 beams of 2"):
        assert_same_answer(Answer.from_trace(cut), reference(log_probs), T, [1, 2])


def test_a_too_large_possible_set_is_left_out_and_counted() -> None:
    log_probs: LogProbs = {(): {code: -1.0 - 0.001 * code for code in range(20)}}
    got = Answer([((19,), -1.019)], 1)
    totals = SameAnswerTotals()
    totals.add(assert_same_answer(got, reference(log_probs), 0.2, [1], possible_limit=4))
    assert totals.share_possible_checked == 0.0
    assert totals.share_safe_rows == 0.0


def test_an_empty_answer() -> None:
    assert_same_answer(Answer([], 0), reference({(): {}}), T, [3])
    with pytest.raises(AssertionError, match="num_valid"):
        assert_same_answer(Answer([], 0), reference({(): {0: -1.0}}), T, [3])


def test_dead_children_do_not_exist() -> None:
    log_probs: LogProbs = {(): {0: -1.0, 1: -np.inf}}
    assert_same_answer(Answer([((0,), -1.0)], 1), reference(log_probs), T, [2])


@given(st.integers(0, 200), st.sampled_from([[3, 5, 7], [8, 8, 8], [7, 3, 40], [1, 1, 1]]))
def test_accepts_every_run_on_slightly_different_logits(seed: int, widths: list[int]) -> None:
    catalog = random_catalog(seed, 60, contiguous_tokens([8, 8, 8]))
    model = TableModel(24, seed, scale=0.5)
    rng = np.random.default_rng(seed)
    t = 0.05

    def shaken(prefix: Sid) -> npt.NDArray[np.float64]:
        return model(prefix) + rng.uniform(-t / 6, t / 6, 24)

    got = beam_search(catalog, shaken, widths)
    answer = Answer.from_trace(BeamTrace(got.levels))
    assert_same_answer(answer, model_reference(catalog, model), t, widths)


def test_the_helper_and_the_plain_beam_search_agree() -> None:
    catalog = Catalog(tuple(Item(i, (i % 5, i % 7)) for i in range(35)), contiguous_tokens([5, 7]))
    model = TableModel(12, 3)
    trace = model_reference(catalog, model).search([3, 9])
    plain = beam_search(catalog, model, [3, 9])
    assert [[p for p, _ in level] for level in trace.levels] == [
        [p for p, _ in level] for level in plain.levels
    ]
