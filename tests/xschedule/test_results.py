"""Results of a batch as a reading in plain Python has them, beam by beam and item by item."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.catalogs import TAGS, contiguous_tokens, random_catalog
from tests.helpers.engines import write_catalog
from tests.helpers.oracle import Rules, expand_items
from tests.xschedule.states import Pinned, make_state
from xgr_runtime.config import SchedulerConfig
from xgr_runtime.kvcache.allocator import PageAllocator
from xgr_runtime.kvcache.prefix_cache import PrefixCache
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.rules import RuleCache, TagExpression, clear_exclusions
from xgr_runtime.xschedule.batch import BatchOutput, GroupOutput
from xgr_runtime.xschedule.results import build_results
from xgr_runtime.xschedule.scheduler import Scheduler

if TYPE_CHECKING:
    from pathlib import Path

    from xgr_runtime.types import SearchResult
    from xgr_runtime.xschedule.request import RequestState
    from xgr_runtime.xschedule.scheduler import Scheduled

CODES = (3, 4, 5)
WIDTHS = (6, 9, 24)
NUM_LEVELS = len(CODES)


class World:
    """A catalogue in both readings, and requests on it of which each asks for something else."""

    def __init__(self, folder: Path, num_items: int, seed: int) -> None:
        self.items = random_catalog(seed, num_items, contiguous_tokens(CODES), share_hidden=0.1)
        self.catalog = Catalog.open(write_catalog(folder / "items.xgr", self.items))
        self.sids = self.items.sids
        self._pinned = Pinned(0, catalog=self.catalog, version=self.catalog.version)
        self._cache = RuleCache(1 << 20)

    def state(self, number: int, rules: Rules, num_results: int, most: int | None) -> RequestState:
        """A request with those rules, resolved against the catalogue."""
        state = make_state(f"r{number}", self._pinned, num_tokens=4 + number, widths=WIDTHS)
        expression = TagExpression.canonical(rules.require, rules.exclude_tags)
        rule_set = self._cache.get(self.catalog, expression)
        excluded = self.catalog.positions_of_ids(list(rules.exclude_item_ids))
        search = replace(
            state.searches[0],
            rule_set=rule_set,
            expression=rule_set.expression,
            cleared=clear_exclusions(self.catalog, rule_set, excluded),
            num_results=num_results,
            max_items_per_sid=most,
            return_level_scores=number % 2 == 0,
        )
        return replace(state, searches=(search,), num_cached_tokens=number)

    def requests(self) -> list[tuple[RequestState, Rules]]:
        ids = [item.item_id for item in self.items.items]
        tagged = Rules(require=(TAGS[:2],), exclude_tags=TAGS[2:3])
        cases = (
            (Rules(), 1000, None),
            (Rules(), 7, None),
            (Rules(), 1000, 1),
            (Rules(), 11, 2),
            (Rules(exclude_item_ids=ids[::3]), 1000, 2),
            (tagged, 9, None),
            (replace(tagged, exclude_item_ids=ids[::2]), 1000, 1),
        )
        return [
            (self.state(number, rules, num_results, most), rules)
            for number, (rules, num_results, most) in enumerate(cases)
        ]


def schedule(states: list[RequestState]) -> Scheduled:
    config = SchedulerConfig(max_batch_histories=len(states), max_batch_rows=1000)
    scheduler = Scheduler(config, PrefixCache(PageAllocator(100)), 4)
    for state in states:
        scheduler.add(state)
    scheduled = scheduler.schedule(0.0, is_draining=True)
    assert scheduled is not None
    assert len(scheduled.states) == len(states)
    return scheduled


def random_output(
    scheduled: Scheduled, num_sids: int, num_live: list[int], failed: set[int], seed: int
) -> BatchOutput:
    """Beams of distinct SIDs in any order, whose scores have ties; behind the live ones of each search they are dead."""
    rng = np.random.default_rng(seed)
    (group,) = scheduled.batch.groups
    num_rows = int(group.widths_SL.sum(axis=0).max()) + 5  # as in memory of a larger batch
    scores = (rng.integers(-40, 0, (NUM_LEVELS, num_rows)) / 4).astype(np.float32)
    nodes = np.zeros((NUM_LEVELS, num_rows), np.int32)
    parents = rng.integers(0, min(WIDTHS), (NUM_LEVELS, num_rows)).astype(np.int32)
    starts = group.row_starts(NUM_LEVELS - 1)
    for search, live in enumerate(num_live):
        first = int(starts[search])
        rows = slice(first, first + live)
        nodes[-1, rows] = rng.permutation(num_sids)[:live]
        scores[-1, rows] = -np.sort(-scores[-1, rows])
        scores[-1, first + live : starts[search + 1]] = -np.inf
    status = np.asarray([2 if n in failed else 0 for n in range(len(num_live))], np.int32)
    return BatchOutput((GroupOutput(scores, nodes, parents, status, 0, 0),))


def level_scores(output: GroupOutput, row: int) -> list[float]:
    found = []
    for level in range(NUM_LEVELS - 1, -1, -1):
        parent = int(output.parents_LN[level, row])
        before = float(output.scores_LN[level - 1, parent]) if level else 0.0
        found.append(float(output.scores_LN[level, row]) - before)
        row = parent
    return found[::-1]


def check(
    world: World, got: SearchResult, output: GroupOutput, rows: range, rules: Rules, number: int
) -> None:
    """A search that has not failed: every field that depends on its beams, in plain Python."""
    search = world.requests()[number][0].searches[0]
    live = [row for row in rows if not math.isinf(output.scores_LN[-1, row])]
    # A row's number stands for its score: two rows may have the same one.
    ranked = [(world.sids[int(output.nodes_LN[-1, row])], float(row)) for row in live]
    kept = world.items.keep(rules)
    expected = expand_items(ranked, kept, search.num_results, search.max_items_per_sid)
    used = [int(row.score) for row in expected]
    keys: dict[int, str] = {item.item_id: item.key for item in world.items.items}
    assert got.item_ids.tolist() == [row.item_id for row in expected]
    assert got.keys == tuple(keys[row.item_id] for row in expected)
    assert list(map(tuple, got.sids.tolist())) == [row.sid for row in expected]
    assert got.scores.tolist() == [float(output.scores_LN[-1, row]) for row in used]
    assert (got.num_valid, got.num_items) == (len(live), len(expected))
    assert (got.status, got.reason == "") == ("ok", bool(live))
    dtypes = [array.dtype.name for array in (got.item_ids, got.sids, got.scores)]
    assert dtypes == ["int64", "uint32", "float32"]
    assert got.sids.shape == (len(expected), NUM_LEVELS)
    if search.return_level_scores:
        assert got.level_scores is not None
        assert got.level_scores.tolist() == [level_scores(output, row) for row in used]
    else:
        assert got.level_scores is None


@pytest.mark.parametrize("num_items", [30, 400], ids=["some SIDs", "long SIDs"])
@pytest.mark.parametrize("seed", range(4))
def test_results_of_a_batch(tmp_path: Path, num_items: int, seed: int) -> None:
    """SIDs of one item and of many, rules, exclusions, caps; of one search all beams died, one has failed."""
    world = World(tmp_path, num_items, seed)
    states = [state for state, _ in world.requests()]
    scheduled = schedule(states)
    most = min(WIDTHS[-1], len(world.sids))
    num_live = [most, most, most - 3, most, most, 1, most]
    num_live[seed] = 0
    failed = {seed + 1}
    output = random_output(scheduled, len(world.sids), num_live, failed, seed)
    (beams,), (group,) = output.groups, scheduled.batch.groups
    results = build_results(scheduled, output, 2.0, "model", "template")
    starts = group.row_starts(NUM_LEVELS - 1).tolist()
    for place, state in enumerate(scheduled.states):
        result = results[place]
        number = states.index(state)
        assert result.request_id == state.request.request_id == f"r{number}"
        assert (result.model_version, result.template_version) == ("model", "template")
        assert (result.num_prompt_tokens, result.timings.total_ms) == (4 + number, 2000.0)
        (got,) = result.results
        if place in failed:
            assert (got.status, got.num_valid, got.num_items) == ("failed", 0, 0)
            assert "round 1" in got.reason
            assert len(got.item_ids) == len(got.sids) == len(got.scores) == 0
        else:
            rows = range(starts[place], starts[place + 1])
            check(world, got, beams, rows, world.requests()[number][1], number)


def test_results_hold_nothing_of_the_batch(tmp_path: Path) -> None:
    """An answer that is kept for long keeps its own numbers alone."""
    world = World(tmp_path, 30, 0)
    scheduled = schedule([state for state, _ in world.requests()])
    output = random_output(scheduled, len(world.sids), [5] * 7, set(), 0)
    for result in build_results(scheduled, output, 1.0, "m", "t"):
        (got,) = result.results
        for array in (got.item_ids, got.sids, got.scores, got.level_scores):
            if array is not None:
                assert array.base is None or array.base.nbytes <= array.nbytes * 2
                assert not np.shares_memory(array, output.groups[0].scores_LN)
