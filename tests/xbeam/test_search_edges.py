"""The edge cases of the search's contract, each by name, through the whole engine on the providers and the references.

In-place reorder, sizes past 2^31 and refusals of catalogue files have their own files (tests/ops, tests/xbeam).
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.catalogs import contiguous_tokens, random_catalog, scattered_tokens
from tests.helpers.engines import PATIENT_MS
from tests.helpers.oracle import Catalog, Item, Rules, beam_search, expand_items
from tests.helpers.product import (
    CPU_DEVICES,
    compile_catalog,
    items_of,
    one,
    prompt_request,
    recorded,
    rows_of,
    table_engine,
)
from tests.helpers.table_model import LogitTable, oracle_lse
from tests.xbeam.test_search_oracle import engine_on
from xgr_runtime import types
from xgr_runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.helpers.oracle import Normalization, Sid
    from xgr_runtime.types import SearchResult

VOCAB = 48
PROMPT = [3, 1, 4]
INF = float("inf")

pytestmark = pytest.mark.parametrize("device", sorted(CPU_DEVICES))


def catalog_of(
    sids: Sequence[Sid], token_of: Sequence[Sequence[int]] | None = None, first: int = 0
) -> Catalog:
    """One item per SID, ids in order from 100."""
    sizes = [1 + max(sid[level] for sid in sids) for level in range(len(sids[0]))]
    tables = token_of or contiguous_tokens(sizes, first)
    items = tuple(Item(100 + place, tuple(sid)) for place, sid in enumerate(sids))
    return Catalog(items, tuple(tuple(table) for table in tables))


def check(
    catalog: Catalog,
    table: LogitTable,
    widths: int | Sequence[int],
    device: str,
    prompt: Sequence[int] = PROMPT,
    num_results: int = 4000,
) -> SearchResult:
    """Run one vocab search and compare it bit for bit with the plain one; returns the result."""
    widths = [widths] * catalog.num_levels if isinstance(widths, int) else list(widths)
    with engine_on(catalog, table, device) as engine:
        request = prompt_request(prompt, beam_widths=tuple(widths), num_results=num_results)
        result = one(engine.recommend([request]))
    logits_of = table.logits_of(catalog, prompt)
    plain = beam_search(catalog, logits_of, widths, "vocab", "float32", oracle_lse(logits_of))
    assert result.num_valid == plain.num_valid
    items = expand_items(plain.rows, catalog, num_results)
    assert items_of(result) == [(row.item_id, row.sid, row.score) for row in items]
    assert result.num_items == len(items)
    return result


WIDE_FIRST = [(c, 0, 0) for c in range(9)]
WIDE_MIDDLE = [(0, c, 0) for c in range(9)]
WIDE_LAST = [(0, 0, c) for c in range(9)]


@pytest.mark.parametrize(
    "sids", [WIDE_FIRST, WIDE_MIDDLE, WIDE_LAST], ids=["first", "middle", "last"]
)
def test_1_beams_wider_than_the_valid_continuations(device: str, sids: list[Sid]) -> None:
    assert check(catalog_of(sids), LogitTable(VOCAB, 1), 20, device).num_valid == 9


def test_2_beams_wider_than_codes_and_than_parents_times_codes(device: str) -> None:
    sids = [(a, b) for a in range(3) for b in range(4)]
    assert check(catalog_of(sids), LogitTable(VOCAB, 2), [2, 1000], device).num_valid == 8
    assert check(catalog_of(sids), LogitTable(VOCAB, 2), 1000, device).num_valid == 12


@pytest.mark.parametrize("num_levels", [1, 2, 3, 5, 8])
def test_3_one_item(device: str, num_levels: int) -> None:
    result = check(catalog_of([(2,) * num_levels]), LogitTable(VOCAB, 3), 5, device)
    assert result.item_ids.tolist() == [100]


def test_3_a_hub_and_a_chain(device: str) -> None:
    hub = [(0, a, b) for a in range(20) for b in range(20)]
    assert check(catalog_of(hub), LogitTable(VOCAB, 4), [4, 4, 64], device).num_valid == 64
    chain = [(0, 0, 0, 0, 0, c) for c in range(3)]
    assert check(catalog_of(chain), LogitTable(VOCAB, 5), 2, device).num_valid == 2


def test_4_items_that_share_a_sid_are_cut_inside_the_bucket(device: str) -> None:
    rng = np.random.default_rng(0)
    items = [Item(i, (0, 1), float(rng.integers(3))) for i in rng.permutation(1000).tolist()]
    items += [Item(2000 + i, (1, 0)) for i in range(3)]
    catalog = Catalog(tuple(items), contiguous_tokens([2, 2]))
    for num_results in (1, 7, 999, 1003):
        result = check(catalog, LogitTable(VOCAB, 6), 2, device, num_results=num_results)
        assert (result.num_valid, result.num_items) == (2, num_results)


def test_5_exact_ties_at_the_boundary(device: str) -> None:
    sids = [(a, b) for a in range(6) for b in range(6)]
    flat = LogitTable(VOCAB, fixed_for_all={(): np.zeros(VOCAB, np.float32)})
    flat.fixed_for_all |= {(a,): np.zeros(VOCAB, np.float32) for a in range(6)}
    result = check(catalog_of(sids), flat, [4, 9], device)
    assert [sid for sid, _ in rows_of(result)] == [(0, b) for b in range(6)] + [
        (1, b) for b in range(3)
    ]


@pytest.mark.parametrize("quantum", [0.5, 2.0])
def test_5_ties_of_coarse_logits(device: str, quantum: float) -> None:
    catalog = random_catalog(5, 400, scattered_tokens([12, 12, 12], VOCAB, 5))
    for width in (3, 17, 100):
        check(catalog, LogitTable(VOCAB, 7, quantum=quantum), width, device)


def minus_infinite_catalog() -> Catalog:
    return catalog_of([(a, b) for a in range(3) for b in range(3)])


def test_6_all_allowed_tokens_minus_infinite(device: str) -> None:
    row = np.zeros(VOCAB, np.float32)
    row[3:6] = -INF
    table = LogitTable(VOCAB, 8, fixed_for_all={(1,): row})
    result = check(minus_infinite_catalog(), table, 20, device)
    assert result.num_valid == 6
    assert not any(sid[0] == 1 for sid, _ in rows_of(result))


def test_6_a_row_of_nothing_but_minus_infinity_is_dead(device: str) -> None:
    table = LogitTable(VOCAB, 8, fixed_for_all={(1,): np.full(VOCAB, -INF, np.float32)})
    assert check(minus_infinite_catalog(), table, 20, device).num_valid == 6
    table = LogitTable(VOCAB, 8, fixed_for_all={(): np.full(VOCAB, -INF, np.float32)})
    result = check(minus_infinite_catalog(), table, 20, device)
    assert (result.status, result.num_valid, bool(result.reason)) == ("ok", 0, True)


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("round_", [0, 1])
@pytest.mark.parametrize(
    ("normalization", "place", "fails"),
    [
        ("vocab", 40, True),
        ("level", 40, False),
        ("level", None, True),
        ("valid", 40, False),
        ("valid", None, True),
    ],
)
def test_6_a_bad_logit_fails_the_search_that_reads_it(
    device: str,
    bad: float,
    round_: int,
    normalization: Normalization,
    place: int | None,
    fails: bool,
) -> None:
    catalog = minus_infinite_catalog()
    row = np.zeros(VOCAB, np.float32)
    row[[0, 4][round_] if place is None else place] = bad
    own = () if round_ == 0 else (1,)
    table = LogitTable(VOCAB, 8, fixed={((7,), own): row})
    requests = [
        prompt_request([prompt], normalization=normalization, beam_width=9) for prompt in (6, 7, 8)
    ]
    waiting = (f"scheduler.max_wait_ms={PATIENT_MS}", "scheduler.max_batch_histories=3")
    with engine_on(catalog, table, device, *waiting) as engine, recorded(engine) as runs:
        results = [result.results[0] for result in engine.recommend(requests)]
    assert [batch.num_histories for batch, _ in runs.runs] == [3]
    with engine_on(catalog, table, device) as engine:  # one that waits for no company
        alone = [one(engine.recommend([request])) for request in (requests[0], requests[2])]
    assert [result.status for result in results] == ["ok", "failed" if fails else "ok", "ok"]
    if fails:
        assert f"round {round_}" in results[1].reason
        assert (results[1].num_valid, results[1].num_items) == (0, 0)
    else:
        assert results[1].num_valid == 9
    assert [items_of(r) for r in (results[0], results[2])] == [items_of(r) for r in alone]


def test_6_a_dead_beam_s_bad_logits_are_not_read(device: str) -> None:
    """A beam that was cut or never existed gives NaN in the table model; no search fails by it."""
    catalog = catalog_of([(0, 0, 0), (1, 1, 1)])
    result = check(catalog, LogitTable(VOCAB, 9), [50, 1, 50], device)
    assert (result.status, result.num_valid) == ("ok", 1)


@pytest.mark.parametrize("widths", [(1, 9, 50), (50, 9, 1), (3, 40, 2), (40, 1, 40)])
def test_8_growing_and_shrinking_widths(device: str, widths: tuple[int, ...]) -> None:
    catalog = random_catalog(8, 600, scattered_tokens([10, 10, 10], VOCAB, 8))
    result = check(catalog, LogitTable(VOCAB, 10), widths, device)
    assert result.beam_widths == widths


def test_9_overlapping_token_ranges(device: str) -> None:
    sids = [(a, b, a) for a in range(8) for b in range(8)]
    shared = tuple(range(10, 18))
    check(catalog_of(sids, [shared, shared, shared]), LogitTable(VOCAB, 11), 9, device)


def test_9_tokens_in_no_order_with_absent_codes(device: str) -> None:
    for seed in range(3):
        tokens = scattered_tokens([20, 9, 30], VOCAB, seed, share_absent=0.5)
        check(random_catalog(seed, 80, tokens), LogitTable(VOCAB, seed), 7, device)


def test_9_code_zero_everywhere(device: str) -> None:
    check(catalog_of([(0, 0, 0)]), LogitTable(VOCAB, 12), 3, device)
    check(catalog_of([(0, 0, 0), (0, 0, 1)], first=1), LogitTable(VOCAB, 12), 3, device)


def test_9_tokens_at_the_top_of_the_vocabulary(device: str) -> None:
    sids = [(a, b) for a in range(4) for b in range(4)]
    check(catalog_of(sids, first=VOCAB - 8), LogitTable(VOCAB, 13), 5, device)


def test_9_a_padded_vocabulary_counts_in_the_normalizer(device: str) -> None:
    """Rows of the head that no tokenizer uses take their share, as in `generate`."""
    catalog = catalog_of([(0,), (1,)])
    row = np.full(VOCAB, -INF, np.float32)
    row[[0, 1]] = 0.0
    row[VOCAB - 2 :] = 0.0
    result = check(catalog, LogitTable(VOCAB, fixed_for_all={(): row}), 2, device)
    assert np.exp(result.scores.astype(np.float64)) == pytest.approx([0.25, 0.25])


def history_request(**fields: object) -> types.RecRequest:
    return types.RecRequest(searches=(types.Search(beam_width=8),), **fields)  # type: ignore[arg-type]


def test_10_histories_at_every_length(device: str) -> None:
    """Empty, one item, at and over the limit, unknown items: the prompt that is searched is the rendered one."""
    catalog = catalog_of([(a, b) for a in range(4) for b in range(4)], first=8)
    table, ids = LogitTable(VOCAB, 14), [item.item_id for item in catalog.items]
    sid_of = {item.item_id: item.sid for item in catalog.items}
    overrides = ("template.prefix_token_ids=[1]", "template.suffix_token_ids=[2]")
    limit = (64 - 2) // 2
    cases = {
        "empty": [],
        "one": ids[:1],
        "at the limit": (ids * 3)[:limit],
        "over the limit": ids[:5] + (ids * 3)[:limit],
        "unknown": [ids[3], 999999, ids[5], -7],
    }
    with engine_on(catalog, table, device, *overrides) as engine:
        for name, given in cases.items():
            known = [i for i in given if i in sid_of]
            used = known[len(known) - min(len(known), limit) :]
            tokens = [8 + code + 4 * level for i in used for level, code in enumerate(sid_of[i])]
            request = history_request(history_item_ids=np.array(given, np.int64))
            reply = engine.recommend([request])[0]
            logits_of = table.logits_of(catalog, [1, *tokens, 2])
            plain = beam_search(catalog, logits_of, 8, "vocab", "float32", oracle_lse(logits_of))
            assert rows_of(reply.results[0]) == list(plain.rows[:8]), name
            assert (reply.num_history_used, reply.num_history_unknown) == (
                len(used),
                len(given) - len(known),
            ), name


def test_10_what_cannot_be_rendered_is_refused(device: str) -> None:
    catalog = catalog_of([(0,), (1,)])
    with engine_on(catalog, LogitTable(VOCAB, 15), device) as engine:
        for fields in (
            {"history_item_ids": np.zeros(0, np.int64)},  # the template has no token
            {"prompt_token_ids": np.zeros(65, np.int64)},
            {"prompt_token_ids": np.array([VOCAB])},
            {"prompt_token_ids": np.array([-1])},
            {"history_item_ids": np.array([100]), "history_keys": ("a",)},
            {},
        ):
            with pytest.raises(InvalidRequest):
                engine.recommend([history_request(**fields)])
        result = one(engine.recommend([history_request(prompt_token_ids=np.zeros(64, np.int64))]))
        assert result.num_valid == 2


def test_11_the_order_of_a_file_s_rows_does_not_matter(device: str) -> None:
    catalog = random_catalog(11, 120, scattered_tokens([9, 9, 9], VOCAB, 11), skew=2.0)
    huge = tuple(
        Item(item.item_id + 2**62, item.sid, item.weight) for item in reversed(catalog.items)
    )
    check(Catalog(huge, catalog.token_of), LogitTable(VOCAB, 16), 12, device)


def test_12_a_swap_while_requests_run(device: str, tmp_path: Path) -> None:
    """Every reply is right for the version it names, and new requests see the new version."""
    tokens = scattered_tokens([8, 8, 8], VOCAB, 12)
    catalogs = {f"v{n}": random_catalog(n, 100, tokens) for n in range(3)}
    paths = {v: compile_catalog(c, tmp_path / f"{v}.xgr", v) for v, c in catalogs.items()}
    table = LogitTable(VOCAB, 17)
    expected = {}
    for version, catalog in catalogs.items():
        logits_of = table.logits_of(catalog, PROMPT)
        lse = oracle_lse(logits_of)
        expected[version] = list(beam_search(catalog, logits_of, 9, "vocab", "float32", lse).rows)
    table_of_engine = LogitTable(VOCAB, 17)
    with table_engine(
        table_of_engine, {"main": paths["v0"]}, "cache.catalog_slots=3", device=device
    ) as engine:
        results: list[SearchResult] = []

        def ask() -> None:
            for _ in range(60):
                reply = engine.recommend([prompt_request(PROMPT, beam_width=9)])
                results.append(one(reply))

        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        for version in ("v1", "v2"):
            assert engine.load_catalog("main", str(paths[version])) == version
        for version in ("v1", "v2", "v0", "v2"):
            engine.activate_catalog("main", version)
        for thread in asking:
            thread.join()
        last = one(engine.recommend([prompt_request(PROMPT, beam_width=9)]))
        pinned = one(engine.recommend([prompt_request(PROMPT, beam_width=9, catalog_version="v1")]))
    for result in [*results, last, pinned]:
        assert rows_of(result) == expected[result.catalog_version]
    assert (last.catalog_version, pinned.catalog_version) == ("v2", "v1")
    assert len(results) == 120


@pytest.mark.parametrize("preferred", [0, 4, 7])
def test_13_all_children_of_one_parent(device: str, preferred: int) -> None:
    """A parent far ahead has all the beams after it: the reorder copies one slot to all."""
    sids = [(a, b, c) for a in range(8) for b in range(6) for c in range(6)]
    row = np.zeros(VOCAB, np.float32)
    row[preferred] = 50.0
    table = LogitTable(VOCAB, 18, fixed_for_all={(): row})
    result = check(catalog_of(sids), table, [8, 6, 20], device)
    assert {sid[0] for sid, _ in rows_of(result)} == {preferred}


def test_13_the_order_of_parents_reversed(device: str) -> None:
    """The best parent has the worst children, so ranks turn round at the second level."""
    sids = [(a, 0, c) for a in range(8) for c in range(3)]
    first = np.zeros(VOCAB, np.float32)
    first[:8] = -np.arange(8)
    table = LogitTable(VOCAB, 19, fixed_for_all={(): first})
    for a in range(8):
        row = np.zeros(VOCAB, np.float32)
        row[8] = -30.0 + 3 * a
        table.fixed_for_all[(a,)] = row
    result = check(catalog_of(sids), table, [8, 8, 24], device)
    assert rows_of(result)[0][0][0] == 7


@pytest.mark.parametrize("width", [1, 9, 128, 512, 1000, 1024])
def test_14_widths(device: str, width: int) -> None:
    catalog = random_catalog(14, 3000, scattered_tokens([24, 24, 24], VOCAB, 14))
    assert check(catalog, LogitTable(VOCAB, 20), width, device).num_valid == width


@pytest.mark.parametrize("size", [1e30, 3e38, 65504.0])
def test_16_finite_but_extreme_logits(device: str, size: float) -> None:
    catalog = minus_infinite_catalog()
    row = np.zeros(VOCAB, np.float32)
    row[[0, 1, 2]] = size, 0.0, -size
    table = LogitTable(VOCAB, 21, fixed_for_all={(): row})
    result = check(catalog, table, 20, device)
    assert result.status == "ok"
    assert np.isfinite(result.scores).all()
    lowest = np.full(VOCAB, -size, np.float32)
    check(catalog, LogitTable(VOCAB, 21, fixed_for_all={(): lowest}), 20, device)


RULES: dict[str, dict[str, object]] = {
    "conjunction": {"require": [("a",), ("b",)]},
    "any of": {"require": [("a", "b")]},
    "negation": {"require": [("a",)], "exclude_tags": ["b"]},
    "excluded over tags": {"require": [("a",)], "exclude_item_ids": [0, 2, 5]},
    "one of a shared SID": {"exclude_item_ids": [0]},
    "by key": {"exclude_keys": ["k1", "k6"]},
}


@pytest.mark.parametrize("name", sorted(RULES))
def test_18_rules_equal_the_rebuilt_catalogue(device: str, name: str) -> None:
    """One node has a leaf only in a and another only in b: no node of tags alone tells that nothing is in both."""
    leaves = [
        ((0, 0), "a"),
        ((0, 0), "b"),
        ((0, 1), "b"),
        ((1, 0), "ab"),
        ((1, 1), "a"),
        ((1, 1), "ab"),
        ((2, 0), ""),
    ]
    items = [
        Item(place, sid, float(place % 3), frozenset(tags), key=f"k{place}")
        for place, (sid, tags) in enumerate(leaves)
    ]
    catalog = Catalog(tuple(items), contiguous_tokens([3, 2]))
    rules = Rules(**RULES[name])  # type: ignore[arg-type]
    kept, table = catalog.keep(rules), LogitTable(VOCAB, 24)
    product_rules = types.Rules(**{field: tuple(v) for field, v in RULES[name].items()})  # type: ignore[arg-type]
    logits_of = table.logits_of(catalog, PROMPT)
    lse = oracle_lse(logits_of)
    with engine_on(catalog, table, device) as engine:
        for width in (1, 2, 9):
            request = prompt_request(PROMPT, beam_width=width, rules=product_rules)
            result = one(engine.recommend([request]))
            plain = beam_search(kept, logits_of, width, "vocab", "float32", lse)
            expected = expand_items(plain.rows, kept, 4000)
            assert items_of(result) == [(row.item_id, row.sid, row.score) for row in expected]
            assert result.num_valid == plain.num_valid


def test_18_everything_excluded_gives_a_reason(device: str) -> None:
    catalog = random_catalog(18, 30, scattered_tokens([5, 5], VOCAB, 18))
    ids = tuple(item.item_id for item in catalog.items)
    with engine_on(catalog, LogitTable(VOCAB, 22), device) as engine:
        for rules in (
            types.Rules(exclude_item_ids=ids),
            types.Rules(require=(("no such tag",),)),
            types.Rules(require=(("region:eu",),), exclude_tags=("region:eu",)),
        ):
            result = one(engine.recommend([prompt_request(PROMPT, beam_width=9, rules=rules)]))
            assert (result.status, result.num_valid, result.num_items) == ("ok", 0, 0)
            assert result.reason


@pytest.mark.parametrize("num_levels", [1, 2, 4, 8])
def test_19_other_depths(device: str, num_levels: int) -> None:
    tokens = scattered_tokens([6] * num_levels, VOCAB, num_levels)
    catalog = random_catalog(num_levels, 200, tokens)
    check(catalog, LogitTable(VOCAB, 23), 11, device)
