"""Rules against the catalogue rebuilt without the items they take out."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xbeam.catalogs import (
    TAGS,
    Item,
    Source,
    build_items,
    build_source,
    leaves,
    position_order,
    sources,
)
from xgr_runtime.xbeam.rules import RuleCache, TagExpression, build_rule_set, clear_exclusions

if TYPE_CHECKING:
    from pathlib import Path

    from xgr_runtime.xbeam.catalog import Catalog
    from xgr_runtime.xbeam.rules import RuleSet

NAMES = (*TAGS, "unknown:x")


class Rules(NamedTuple):
    """A request's rules as the tests state them; `excluded` are item ids."""

    require: list[list[str]]
    exclude: list[str]
    excluded: list[int]

    def passes(self, item: Item) -> bool:
        return (
            item.servable
            and all(any(tag in item.tags for tag in group) for group in self.require)
            and not any(tag in item.tags for tag in self.exclude)
            and item.item_id not in self.excluded
        )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Source, Rules]:
    source = draw(sources())
    ids = st.sampled_from([*(item.item_id for item in source.items), 123_456_789])
    tag_list = st.lists(st.sampled_from(NAMES), max_size=2)
    require = draw(st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3), max_size=2))
    return source, Rules(require, draw(tag_list), draw(st.lists(ids, max_size=40)))


def edges_of(sids: set[tuple[int, ...]], level: int) -> list[tuple[int, ...]]:
    return sorted({sid[: level + 1] for sid in sids})


def assert_is_sub_catalog(
    catalog: Catalog, items: list[Item], alive_items: list[Item], alive: list[np.ndarray]
) -> None:
    """The alive edges are those of the rebuilt catalogue (a set of tuples), in its order."""
    all_sids = {item.sid for item in items if item.servable}
    alive_sids = {item.sid for item in alive_items}
    for level in range(catalog.num_levels):
        edges = edges_of(all_sids, level)
        kept = [edge for edge, is_alive in zip(edges, alive[level], strict=True) if is_alive]
        assert kept == edges_of(alive_sids, level)


def rule_set_of(catalog: Catalog, rules: Rules) -> RuleSet:
    return build_rule_set(catalog, TagExpression.canonical(rules.require, rules.exclude))


@given(cases())
def test_rule_set_equals_the_rebuilt_catalog(case: tuple[Source, Rules]) -> None:
    source, rules = case
    rules = rules._replace(excluded=[])
    catalog = build_source(source)
    rule_set = rule_set_of(catalog, rules)
    passing = [item for item in source.items if rules.passes(item)]
    assert_is_sub_catalog(catalog, source.items, passing, list(rule_set.alive))
    ranked = [item for item in position_order(source.items) if item.servable]
    assert rule_set.item_alive.tolist() == [rules.passes(item) for item in ranked]
    all_sids = sorted({item.sid for item in ranked})
    assert rule_set.sid_count.tolist() == [
        sum(item.sid == sid for item in passing) for sid in all_sids
    ]
    alive_sids = {item.sid for item in passing}
    for level, remaining in enumerate(rule_set.remaining):
        expected = [
            sum(sid[: level + 1] == edge for sid in alive_sids)
            for edge in edges_of(set(all_sids), level)
        ]
        assert remaining.tolist() == expected
        assert (remaining.dtype.name, rule_set.alive[level].dtype.name) == ("int32", "bool")
    assert rule_set.num_alive_sids == len(alive_sids)
    assert bool(rule_set.reason) == (not passing)
    if passing:  # the rebuilt catalogue itself, through the builder
        rebuilt = build_source(Source(passing, source.num_codes))
        kept = [
            sid
            for sid, is_alive in zip(leaves(catalog), rule_set.alive[-1], strict=True)
            if is_alive
        ]
        assert kept == leaves(rebuilt)


@given(cases())
def test_exclusions_equal_the_rebuilt_catalog(case: tuple[Source, Rules]) -> None:
    source, rules = case
    catalog = build_source(source)
    rule_set = rule_set_of(catalog, rules)
    cleared = clear_exclusions(catalog, rule_set, catalog.positions_of_ids(rules.excluded))
    alive = [level.copy() for level in rule_set.alive]
    for level, edges in zip(alive, cleared.edges, strict=True):
        assert level[edges].all(), "only living edges are cleared"
        assert edges.tolist() == sorted(set(edges.tolist()))
        level[edges] = False
    passing = [item for item in source.items if rules.passes(item)]
    assert_is_sub_catalog(catalog, source.items, passing, alive)
    by_tags = rules._replace(excluded=[])
    ranked = position_order(source.items)
    expected = [
        position
        for position, item in enumerate(ranked)
        if by_tags.passes(item) and item.item_id in rules.excluded
    ]
    assert cleared.item_positions.tolist() == expected


@given(sources())
def test_everything_excluded(source: Source) -> None:
    catalog = build_source(source)
    rule_set = build_rule_set(catalog, TagExpression())
    cleared = clear_exclusions(catalog, rule_set, np.arange(catalog.num_items))
    assert [len(edges) for edges in cleared.edges] == [len(codes) for codes in catalog.codes]
    assert len(cleared.item_positions) == catalog.num_servable


def test_anding_edges_would_be_wrong(tmp_path: Path) -> None:
    """A node with one leaf tagged A and another tagged B holds nothing tagged A and B."""
    items = [
        Item(1, (0, 0), tags=("a",)),
        Item(2, (0, 1), tags=("b",)),
        Item(3, (1, 1), tags=("a", "b")),
    ]
    catalog = build_items(tmp_path / "c", items, (2, 2))
    both = build_rule_set(catalog, TagExpression.canonical([["a"], ["b"]]))
    assert [level.tolist() for level in both.alive] == [[False, True], [False, False, True]]


def test_a_shared_sid_lives_on_through_its_other_item(tmp_path: Path) -> None:
    items = [Item(1, (0, 0)), Item(2, (0, 0), tags=("x",)), Item(3, (0, 1))]
    catalog = build_items(tmp_path / "c", items, (2, 2))
    everything = build_rule_set(catalog, TagExpression())
    only_one = clear_exclusions(catalog, everything, catalog.positions_of_ids([1]))
    assert [edges.tolist() for edges in only_one.edges] == [[], []]
    assert only_one.item_positions.tolist() == [0]
    without_x = build_rule_set(catalog, TagExpression.canonical(exclude=["x"]))
    last_one = clear_exclusions(catalog, without_x, catalog.positions_of_ids([1]))
    assert [edges.tolist() for edges in last_one.edges] == [[], [0]]


def test_no_exclusions(tmp_path: Path) -> None:
    catalog = build_items(tmp_path / "c", [Item(1, (0, 0))], (1, 1))
    cleared = clear_exclusions(catalog, build_rule_set(catalog, TagExpression()), [])
    assert [edges.dtype for edges in cleared.edges] == [np.int32, np.int32]
    assert [len(edges) for edges in cleared.edges] == [0, 0]


def test_unknown_tags(tmp_path: Path) -> None:
    items = [Item(1, (0,), tags=("a",)), Item(2, (1,))]
    catalog = build_items(tmp_path / "c", items, (2,))
    some = build_rule_set(catalog, TagExpression.canonical([["a", "nope"]], ["gone", "lost"]))
    assert (some.alive[0].tolist(), some.unknown_required, some.num_unknown_tags) == (
        [True, False],
        ("nope",),
        2,
    )
    assert some.reason == ""
    none = build_rule_set(catalog, TagExpression.canonical([["nope", "never"], ["a"]]))
    assert not none.alive[0].any()
    assert none.unknown_required == ("never", "nope")
    assert none.reason == "the catalogue knows none of the required tags never, nope"
    nothing = build_rule_set(catalog, TagExpression.canonical([["a"]], ["a"]))
    assert nothing.reason == "no servable item passes the required and excluded tags"


def test_canonical_form() -> None:
    one = TagExpression.canonical([["b", "a", "b"], ["c"]], ["z", "y", "z"])
    other = TagExpression.canonical([("c",), ("a", "b"), ("b", "a")], ("y", "z"))
    assert one == other == TagExpression((("a", "b"), ("c",)), ("y", "z"))
    assert hash(one) == hash(other)
    assert TagExpression.canonical().is_empty


@pytest.fixture
def tagged(tmp_path: Path) -> Catalog:
    items = [Item(i, (i % 4, i % 7), tags=(TAGS[i % 4],)) for i in range(40)]
    return build_items(tmp_path / "tagged", items, (4, 7))


def test_cache_keeps_and_counts(tagged: Catalog) -> None:
    cache = RuleCache(1 << 20)
    expression = TagExpression.canonical([[TAGS[0]]])
    first = cache.get(tagged, expression)
    assert cache.get(tagged, expression) is first
    stats = cache.stats
    assert (stats.num_hits, stats.num_misses, stats.num_evictions, stats.num_rule_sets) == (
        1,
        1,
        0,
        1,
    )
    assert stats.num_bytes == first.nbytes


def test_cache_drops_the_least_recently_used(tagged: Catalog) -> None:
    expressions = [TagExpression.canonical([[tag]]) for tag in TAGS[:3]]
    sizes = [build_rule_set(tagged, expression).nbytes for expression in expressions]
    size = sizes[0]
    cache = RuleCache(size + max(sizes))
    kept = cache.get(tagged, expressions[0])
    cache.get(tagged, expressions[1])
    cache.get(tagged, expressions[0])
    cache.get(tagged, expressions[2])
    assert cache.get(tagged, expressions[0]) is kept
    stats = cache.stats
    assert (stats.num_evictions, stats.num_rule_sets, stats.num_bytes) == (
        1,
        2,
        sizes[0] + sizes[2],
    )
    small = RuleCache(size - 1)
    assert small.get(tagged, expressions[0]).nbytes == size
    assert (small.stats.num_rule_sets, small.stats.num_bytes) == (0, 0)


def test_cache_forgets_a_catalog(tagged: Catalog, tmp_path: Path) -> None:
    other = build_items(tmp_path / "other", [Item(1, (0, 0))], (1, 1))
    cache = RuleCache(1 << 20)
    kept = cache.get(other, TagExpression())
    cache.get(tagged, TagExpression())
    tagged.close()
    cache.drop(tagged)
    assert (cache.stats.num_rule_sets, cache.stats.num_bytes) == (1, kept.nbytes)


def test_rule_set_bytes_count_shared_arrays_once(tagged: Catalog) -> None:
    rule_set = build_rule_set(tagged, TagExpression())
    edges = sum(len(codes) for codes in tagged.codes)
    per_sid = 4 * tagged.num_sids + tagged.num_servable
    assert tagged.num_sids < tagged.num_servable
    assert 0 < rule_set.nbytes - (5 * edges + per_sid) < 3000
    unique = replace(rule_set, sid_count=rule_set.remaining[-1], item_alive=rule_set.alive[-1])
    assert 0 < rule_set.nbytes - per_sid - unique.nbytes < 500


def test_rule_set_bytes_count_the_text(tagged: Catalog) -> None:
    size = build_rule_set(tagged, TagExpression.canonical([[TAGS[0]]])).nbytes
    for expression in (
        TagExpression.canonical([[TAGS[0], "x" * 100_000]]),
        TagExpression.canonical([[TAGS[0]]], ["x" * 100_000]),
        TagExpression.canonical([[TAGS[0]]], ["ы" * 50_000]),
        TagExpression.canonical([["x" * 100_000]]),
    ):
        assert size + 100_000 <= build_rule_set(tagged, expression).nbytes < size + 250_000


def test_kept_bytes_are_at_least_what_is_held(tmp_path: Path) -> None:
    """Measured: on a catalogue of four items the objects are most of a rule set."""
    names = [f"t{number}" for number in range(12)]
    items = [Item(i, (i, i), tags=tuple(names)) for i in range(4)]
    catalog = build_items(tmp_path / "c", items, (4, 4))
    catalog.prepare()
    cache = RuleCache(1 << 30)
    cache.get(catalog, TagExpression.canonical([names[:1]]))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept_before = cache.stats.num_bytes
        for number in range(1, 400):
            mask = [name for bit, name in enumerate(names) if number >> bit & 1]
            cache.get(catalog, TagExpression.canonical([mask], ["t11"]))
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert cache.stats.num_rule_sets == 400
    kept = cache.stats.num_bytes - kept_before
    assert held <= kept <= 3 * held


def test_unknown_tags_share_one_rule_set(tagged: Catalog) -> None:
    """Whatever a client invents: no new rule set, and no text of it kept."""
    cache = RuleCache(1 << 20)
    everything = cache.get(tagged, TagExpression())
    some = cache.get(tagged, TagExpression.canonical([[TAGS[1]]], [TAGS[2]]))
    kept = cache.stats.num_bytes
    for number in range(50):
        invented = f"{number}" + "x" * 10_000
        free = cache.get(tagged, TagExpression.canonical(exclude=[invented, "y"]))
        assert (free.expression, free.num_unknown_tags, free.reason) == (TagExpression(), 2, "")
        assert free.alive is everything.alive
        mixed = TagExpression.canonical([[TAGS[1], invented]], [TAGS[2], invented])
        narrow = cache.get(tagged, mixed)
        assert narrow.remaining is some.remaining
        assert (narrow.num_unknown_tags, narrow.unknown_required) == (1, (invented,))
    assert (cache.stats.num_rule_sets, cache.stats.num_bytes) == (2, kept)
    for number in range(50):
        invented = f"{number}" + "x" * 10_000
        none = cache.get(tagged, TagExpression.canonical([[invented], [TAGS[number % 4]]], ["z"]))
        assert not none.item_alive.any()
        assert (none.num_alive_sids, none.num_unknown_tags) == (0, 1)
        assert none.unknown_required == (invented,)
        assert none.reason.endswith(f"required tags {invented[:80]}...")
    assert cache.stats.num_rule_sets == 3
    assert cache.stats.num_bytes < 2 * kept


def test_many_unknown_tags_make_a_short_reason(tagged: Catalog) -> None:
    group = [f"{number:03}" for number in range(64)]
    reason = RuleCache(0).get(tagged, TagExpression.canonical([group])).reason
    assert reason.endswith("required tags 000, 001, 002, 003, 004, 005, 006, 007, ... (64 in all)")


@given(sources(), st.data())
def test_a_cache_answers_as_a_fresh_build(source: Source, data: st.DataObject) -> None:
    """Also with a budget of 0 and for tags nobody has."""
    catalog = build_source(source)
    names = st.sampled_from([*TAGS, "no:such", "nor:this"])
    caches = [RuleCache(0), RuleCache(1 << 20)]
    for _ in range(3):
        groups = st.lists(st.lists(names, min_size=1, max_size=3), max_size=3)
        expression = TagExpression.canonical(
            data.draw(groups), data.draw(st.lists(names, max_size=3))
        )
        fresh = build_rule_set(catalog, expression)
        for cache in caches:
            got = cache.get(catalog, expression)
            for one, two in zip(
                (*got.alive, *got.remaining, got.sid_count, got.item_alive),
                (*fresh.alive, *fresh.remaining, fresh.sid_count, fresh.item_alive),
                strict=True,
            ):
                assert (one.dtype, one.tolist()) == (two.dtype, two.tolist())
            for name in ("num_unknown_tags", "unknown_required", "reason"):
                assert getattr(got, name) == getattr(fresh, name)
    assert (caches[0].stats.num_rule_sets, caches[0].stats.num_bytes) == (0, 0)
