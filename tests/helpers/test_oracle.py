"""The oracles agree with each other and with numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.catalogs import TAGS, catalogs
from tests.helpers.oracle import (
    Catalog,
    Item,
    Logits,
    Rules,
    Sid,
    TableModel,
    beam_search,
    brute_force,
    expand_items,
    logsumexp,
    step_score,
)

NORMALIZATIONS = st.sampled_from(["vocab", "level", "valid"])


def two_level_catalog() -> Catalog:
    sids = [(0, 0), (0, 1), (1, 0), (1, 1)]
    return Catalog(tuple(Item(10 + i, sid) for i, sid in enumerate(sids)), ((0, 1, -1), (2, 3)))


def logits_by_hand(prefix: Sid) -> Logits:
    table: dict[Sid, list[float]] = {
        (): [0.75, 0.25, 0, 0],
        (0,): [0, 0, 0.25, 0.25],
        (1,): [0, 0, 0.5, 0.125],
    }
    with np.errstate(divide="ignore"):
        logits: Logits = np.log(np.array(table[prefix]))
    return logits


def test_scores_by_hand() -> None:
    scores = dict(brute_force(two_level_catalog(), logits_by_hand, "vocab"))
    expected = {(0, 0): 0.375, (0, 1): 0.375, (1, 0): 0.2, (1, 1): 0.05}
    assert {sid: math.exp(score) for sid, score in scores.items()} == pytest.approx(expected)


def test_ties_go_to_the_better_parent_then_to_the_smaller_code() -> None:
    flat = TableModel(4, 0, fixed={(): np.zeros(4), (0,): np.zeros(4), (1,): np.zeros(4)})
    answer = beam_search(two_level_catalog(), flat, 3)
    assert answer.sids == [(0, 0), (0, 1), (1, 0)]
    flat.fixed[()] = np.array([0.0, 0.5, 0.0, 0.0])
    assert beam_search(two_level_catalog(), flat, 3).sids == [(1, 0), (1, 1), (0, 0)]


def test_a_narrow_middle_level_loses_the_better_item() -> None:
    fixed = {
        (): np.array([1.0, 0.9, -50, -50]),
        (0,): np.array([-50, -50, 0.0, 0.0]),
        (1,): np.array([-50, -50, 9.0, 0.0]),
    }
    model = TableModel(4, 0, fixed=fixed)
    assert brute_force(two_level_catalog(), model)[0][0] == (1, 0)
    assert beam_search(two_level_catalog(), model, [1, 4]).sids == [(0, 0), (0, 1)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_number_fails_where_the_normalizer_reads_it(bad: float) -> None:
    fixed: dict[Sid, Logits] = {(1,): np.array([bad, 0.0, 0.0, 0.0])}
    model = TableModel(4, 0, fixed=fixed)
    assert beam_search(two_level_catalog(), model, 4, "vocab").failed_round == 1
    assert beam_search(two_level_catalog(), model, 4, "level").failed_round is None
    assert beam_search(two_level_catalog(), model, 4, "valid").num_valid == 4


def test_a_minus_infinite_row_is_a_dead_beam() -> None:
    model = TableModel(4, 0, fixed={(1,): np.full(4, -math.inf)})
    assert set(beam_search(two_level_catalog(), model, 4).sids) == {(0, 0), (0, 1)}
    assert {sid for sid, _ in brute_force(two_level_catalog(), model)} == {(0, 0), (0, 1)}


@given(catalogs(), NORMALIZATIONS, st.integers(0, 9))
def test_a_wide_beam_search_is_the_brute_force(
    catalog: Catalog, normalization: str, seed: int
) -> None:
    model = TableModel(32, seed)
    exact = brute_force(catalog, model, normalization)  # type: ignore[arg-type]
    answer = beam_search(catalog, model, len(catalog.items), normalization)  # type: ignore[arg-type]
    assert answer.rows == tuple(exact)


@given(catalogs(may_hide=False), st.integers(0, 9))
def test_probabilities_of_a_valid_normalization_sum_to_one(catalog: Catalog, seed: int) -> None:
    scores = [score for _, score in brute_force(catalog, TableModel(32, seed), "valid")]
    assert math.exp(logsumexp(scores)) == pytest.approx(1.0)


def test_items_inside_a_sid_go_by_weight_then_id() -> None:
    items = (
        Item(5, (0,)),
        Item(3, (0,)),
        Item(9, (0,), 2.0),
        Item(1, (1,)),
        Item(2, (0,), 9.0, servable=False),
    )
    catalog = Catalog(items, ((0, 1),))
    rows = [((1,), -1.0), ((0,), -2.0)]
    assert [row.item_id for row in expand_items(rows, catalog, 10)] == [1, 9, 3, 5]
    assert [row.item_id for row in expand_items(rows, catalog, 10, 2)] == [1, 9, 3]
    assert [row.item_id for row in expand_items(rows, catalog, 2)] == [1, 9]


def test_rules() -> None:
    items = (
        Item(1, (0,), tags=frozenset(TAGS[:1])),
        Item(2, (0,), tags=frozenset({TAGS[0], TAGS[2]})),
        Item(3, (1,), tags=frozenset({TAGS[1], TAGS[2]}), key="k"),
    )
    catalog = Catalog(items, ((0, 1),))

    def kept(rules: Rules) -> list[int]:
        return [item.item_id for item in catalog.keep(rules).items]

    assert kept(Rules(require=[TAGS[:2], TAGS[2:3]])) == [2, 3]
    assert kept(Rules(exclude_tags=[TAGS[2]])) == [1]
    assert kept(Rules(exclude_item_ids=[1], exclude_keys=["k"])) == [2]


def test_the_float32_step_rounds_twice() -> None:
    parent, logit, lse = -1.0, 16777216.0, -1.0
    assert step_score(parent, logit, lse, "float32") == 16777215.0
    assert step_score(parent, logit, lse, "float64") == 16777216.0
    assert step_score(0.0, -3e38, 3e38, "float32") == -math.inf
