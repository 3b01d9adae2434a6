"""The engine's search on given logits against a plain beam search and brute force, through every part but the network.

The model is a table that finds its logits by the tokens it reads back from pages and slots, so these tests cover
prefill, rounds, reorder, rules, expansion and batching. With the `vocab` normaliser both sides round alike, and the
answer is compared bit for bit; elsewhere by `assert_same_answer`.
"""

from __future__ import annotations

import itertools
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.catalogs import TAGS, catalogs, random_catalog, scattered_tokens
from tests.helpers.oracle import (
    Catalog,
    Normalization,
    Rules,
    beam_search,
    brute_force,
    expand_items,
    logsumexp,
    read_by_normalizer,
)
from tests.helpers.product import (
    CPU_DEVICES,
    Prefixes,
    RecordedRuns,
    compile_catalog,
    items_of,
    one,
    prompt_request,
    recorded,
    rows_of,
    table_engine,
)
from tests.helpers.table_model import LogitTable, oracle_lse
from tests.xschedule.running import recommend_behind_one
from xgr_runtime import types
from xgr_runtime.conformance.same_answer import Reference, SameAnswerTotals, assert_same_answer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from tests.helpers.oracle import LogitsOf, Sid
    from xgr_runtime.xschedule.engine import Engine

VOCAB = 32
DEVICES = sorted(CPU_DEVICES)
NORMALIZATIONS: list[Normalization] = ["vocab", "level", "valid"]
T = 1e-4
SEEDS = st.integers(0, 1000)
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)
on_every_device = pytest.mark.parametrize("device", DEVICES)


@contextmanager
def engine_on(
    catalog: Catalog, table: LogitTable, device: str = "providers", *overrides: str
) -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder:
        path = compile_catalog(catalog, Path(folder) / "items.xgr")
        table.known = known_tokens(catalog)
        with table_engine(table, {"main": path}, *overrides, device=device) as engine:
            yield engine


def known_tokens(catalog: Catalog) -> set[tuple[int, ...]]:
    return {
        tuple(catalog.token_of[level][code] for level, code in enumerate(prefix))
        for prefix in catalog.children
    }


def float64_reference(
    catalog: Catalog, logits_of: LogitsOf, normalization: Normalization
) -> Reference:
    def child_log_probs(prefixes: Sequence[Sid]) -> list[npt.NDArray[np.float64]]:
        rows = []
        for prefix in prefixes:
            logits = np.asarray(logits_of(prefix), np.float64)
            lse = logsumexp(read_by_normalizer(catalog, prefix, logits, normalization))
            codes = catalog.children.get(prefix, ())
            rows.append(logits[[catalog.token_of[len(prefix)][code] for code in codes]] - lse)
        return rows

    return Reference(
        catalog.num_levels, lambda prefix: catalog.children.get(prefix, ()), child_log_probs
    )


@st.composite
def widths_for(draw: st.DrawFn, catalog: Catalog) -> tuple[int, ...]:
    return tuple(draw(st.integers(1, 12)) for _ in range(catalog.num_levels))


@st.composite
def rules_for(draw: st.DrawFn, catalog: Catalog) -> dict[str, Any]:
    ids = [item.item_id for item in catalog.items]
    keys = [item.key for item in catalog.items]
    tags = st.sampled_from([*TAGS[:4], "unknown"])
    return {
        "require": draw(st.lists(st.lists(tags, min_size=1, max_size=2).map(tuple), max_size=2)),
        "exclude_tags": draw(st.lists(tags, max_size=1)),
        "exclude_item_ids": draw(st.lists(st.sampled_from([*ids, 10**12]), max_size=6)),
        "exclude_keys": draw(st.lists(st.sampled_from([*keys, "no such key"]), max_size=2)),
    }


def product_rules(rules: dict[str, Any]) -> types.Rules:
    return types.Rules(
        require=tuple(rules["require"]),
        exclude_tags=tuple(rules["exclude_tags"]),
        exclude_item_ids=tuple(rules["exclude_item_ids"]),
        exclude_keys=tuple(rules["exclude_keys"]),
    )


@on_every_device
@settings(max_examples=40)
@given(st.data(), catalogs(), SEEDS, PROMPTS, st.sampled_from([0.0, 1.0]))
def test_a_vocab_search_is_the_plain_one_bit_for_bit(
    device: str, data: st.DataObject, catalog: Catalog, seed: int, prompt: list[int], quantum: float
) -> None:
    widths = data.draw(widths_for(catalog))
    table = LogitTable(VOCAB, seed, quantum=quantum)
    with engine_on(catalog, table, device) as engine:
        result = one(engine.recommend([prompt_request(prompt, beam_widths=widths)]))
    logits_of = table.logits_of(catalog, prompt)
    expected = beam_search(catalog, logits_of, widths, "vocab", "float32", oracle_lse(logits_of))
    assert rows_of(result) == list(expected.rows)
    assert result.num_valid == expected.num_valid
    items = expand_items(expected.rows, catalog, 4000)
    assert items_of(result) == [(row.item_id, row.sid, row.score) for row in items]


@on_every_device
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@settings(max_examples=25)
@given(st.data(), catalogs(), SEEDS, PROMPTS)
def test_every_normalization_gives_the_same_answer_as_float64(
    device: str,
    normalization: Normalization,
    data: st.DataObject,
    catalog: Catalog,
    seed: int,
    prompt: list[int],
) -> None:
    widths = data.draw(widths_for(catalog))
    table = LogitTable(VOCAB, seed)
    with engine_on(catalog, table, device) as engine, recorded(engine) as runs:
        request = prompt_request(prompt, "one", beam_widths=widths, normalization=normalization)
        result = one(engine.recommend([request]))
    answer = runs.answer("one", Prefixes(catalog), result.num_valid)
    assert [sid for sid, _ in answer.rows] == [sid for sid, _ in rows_of(result)]
    logits_of = table.logits_of(catalog, prompt)
    reference = float64_reference(catalog, logits_of, normalization)
    assert_same_answer(answer, reference, T, widths)


@on_every_device
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@settings(max_examples=25)
@given(catalogs(), SEEDS, PROMPTS)
def test_a_wide_search_is_the_brute_force(
    device: str, normalization: Normalization, catalog: Catalog, seed: int, prompt: list[int]
) -> None:
    table = LogitTable(VOCAB, seed)
    width = len(catalog.sids)
    with engine_on(catalog, table, device) as engine:
        request = prompt_request(prompt, beam_width=width, normalization=normalization)
        result = one(engine.recommend([request]))
    exact = dict(brute_force(catalog, table.logits_of(catalog, prompt), normalization))
    got = rows_of(result)
    assert result.num_valid == len(got) == len(exact)
    assert dict(got) == pytest.approx(exact, abs=T)
    for (one_sid, _), (next_sid, _) in itertools.pairwise(got):
        assert exact[one_sid] >= exact[next_sid] - 2 * T


@on_every_device
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@settings(max_examples=40)
@given(st.data(), catalogs(), SEEDS, st.one_of(st.none(), st.integers(1, 2)))
def test_rules_search_the_rebuilt_catalogue(
    device: str,
    normalization: Normalization,
    data: st.DataObject,
    catalog: Catalog,
    seed: int,
    max_items_per_sid: int | None,
) -> None:
    rules, widths = data.draw(rules_for(catalog)), data.draw(widths_for(catalog))
    kept, prompt = catalog.keep(Rules(**rules)), [seed % VOCAB]
    table = LogitTable(VOCAB, seed)
    search = {
        "beam_widths": widths,
        "normalization": normalization,
        "rules": product_rules(rules),
        "max_items_per_sid": max_items_per_sid,
    }
    with engine_on(catalog, table, device) as engine, recorded(engine) as runs:
        result = one(engine.recommend([prompt_request(prompt, "one", **search)]))
    answer = runs.answer("one", Prefixes(catalog), result.num_valid)
    logits_of = table.logits_of(catalog, prompt)
    assert_same_answer(answer, float64_reference(kept, logits_of, normalization), T, widths)
    items = expand_items(answer.rows, kept, 4000, max_items_per_sid)
    assert items_of(result) == [(row.item_id, row.sid, row.score) for row in items]
    assert bool(result.reason) == (result.num_valid == 0)
    if normalization == "vocab":
        plain = beam_search(kept, logits_of, widths, "vocab", "float32", oracle_lse(logits_of))
        assert list(answer.rows) == list(plain.rows)


def random_requests(catalog: Catalog, seed: int, num_requests: int) -> list[types.RecRequest]:
    """Requests of every size and rule, for one catalogue and one normaliser."""
    rng = np.random.default_rng(seed)
    ids = [item.item_id for item in catalog.items]
    requests = []
    for number in range(num_requests):
        length = int(rng.choice([1, 2, 7, 64]))
        rules = types.Rules(
            require=((TAGS[int(rng.integers(4))],),) if rng.random() < 0.4 else (),
            exclude_tags=(TAGS[4],) if rng.random() < 0.3 else (),
            exclude_item_ids=tuple(rng.choice(ids, int(rng.integers(0, 9))).tolist()),
        )
        requests.append(
            prompt_request(
                rng.integers(0, VOCAB, length).tolist(),
                f"request {number}",
                beam_widths=tuple(rng.choice([1, 2, 5, 9, 33, 128], catalog.num_levels).tolist()),
                rules=rules,
                num_results=int(rng.choice([1, 10, 500])),
            )
        )
    return requests


def assert_mixed(runs: RecordedRuns, num_requests: int) -> None:
    """Behind the first one batches are as full as their tokens and rows allow: only the last may hold a single request."""
    sizes = [batch.num_histories for batch, _ in runs.runs]
    assert sizes[0] == 1
    assert sum(sizes) == num_requests
    assert min(sizes[1:-1]) > 1, sizes


@on_every_device
@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_batch_answers_as_each_alone(device: str, seed: int) -> None:
    catalog = random_catalog(seed, 250, scattered_tokens([12, 7, 20], VOCAB, seed, 0.1))
    table = LogitTable(VOCAB, seed, quantum=0.5 * (seed % 2))
    requests = random_requests(catalog, seed, 24)
    order = np.random.default_rng(seed).permutation(len(requests)).tolist()
    with engine_on(catalog, table, device) as engine:
        with recorded(engine) as runs:
            together = recommend_behind_one(engine, requests)
        assert_mixed(runs, len(requests))
        with recorded(engine) as runs:
            shuffled = recommend_behind_one(engine, [requests[place] for place in order])
        assert_mixed(runs, len(requests))
    with engine_on(catalog, table, device) as engine:
        alone = [engine.recommend([request])[0] for request in requests]
    for request, mixed, single in zip(requests, together, alone, strict=True):
        assert mixed.request_id == single.request_id == request.request_id
        assert items_of(mixed.results[0]) == items_of(single.results[0])
        assert mixed.results[0].num_valid == single.results[0].num_valid
    for place, mixed in zip(order, shuffled, strict=True):
        assert items_of(mixed.results[0]) == items_of(alone[place].results[0])


def test_answers_of_mixed_batches_are_the_oracle_s() -> None:
    catalog = random_catalog(9, 400, scattered_tokens([16, 16, 16], VOCAB, 9))
    table, totals = LogitTable(VOCAB, 9), SameAnswerTotals()
    requests = random_requests(catalog, 9, 60)
    with (
        engine_on(catalog, table, "providers") as engine,
        recorded(engine) as runs,
    ):
        results = recommend_behind_one(engine, requests)
    assert_mixed(runs, len(requests))
    for request, result in zip(requests, results, strict=True):
        search, prompt = request.searches[0], request.prompt_token_ids
        assert prompt is not None
        assert search.beam_widths is not None
        rules = Rules(
            search.rules.require, search.rules.exclude_tags, list(search.rules.exclude_item_ids)
        )
        kept = catalog.keep(rules)
        answer = runs.answer(request.request_id, Prefixes(catalog), result.results[0].num_valid)
        reference = float64_reference(kept, table.logits_of(catalog, prompt.tolist()), "vocab")
        totals.add(assert_same_answer(answer, reference, T, search.beam_widths))
    assert totals.share_safe_rows >= 0.95, totals
    assert totals.share_identical >= 0.95, totals


@on_every_device
def test_level_scores_add_up(device: str) -> None:
    catalog = random_catalog(3, 100, scattered_tokens([8, 8, 8], VOCAB, 3))
    table = LogitTable(VOCAB, 3)
    with engine_on(catalog, table, device) as engine:
        request = prompt_request([4, 5], beam_width=20, return_level_scores=True)
        result = one(engine.recommend([request]))
    reference = float64_reference(catalog, table.logits_of(catalog, [4, 5]), "vocab")
    assert result.level_scores is not None
    for sid, scores in zip(result.sids.tolist(), result.level_scores.tolist(), strict=True):
        sums = [reference.score(tuple(sid[: level + 1])) for level in range(3)]
        assert np.cumsum(scores) == pytest.approx(np.array(sums, np.float64), abs=T)
