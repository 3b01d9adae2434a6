"""What an engine counts, against the same traffic counted from its replies and its recorded batches."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.engines import make_engine, record_batches, request_of
from tests.helpers.waiting import wait_until
from tests.xschedule.running import TIMEOUT_S, Gate, history
from xgr_runtime.types import Rules, Search
from xgr_runtime.xschedule.histogram import (
    REQUEST_BOUNDS_S,
    SIZE_BOUNDS,
    STAGE_BOUNDS_S,
    Histogram,
)

if TYPE_CHECKING:
    from tests.helpers.engines import Oracle
    from xgr_runtime import Engine, RuntimeConfig


@given(st.lists(st.one_of(st.floats(0, 1e6), st.sampled_from(REQUEST_BOUNDS_S))))
def test_a_histogram_counts_what_is_at_most_each_bound(values: list[float]) -> None:
    histogram = Histogram(REQUEST_BOUNDS_S)
    for value in values:
        histogram.add(value)
    for index, bound in enumerate(REQUEST_BOUNDS_S):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in values)
    assert histogram.num_values == len(values)
    assert histogram.sum == pytest.approx(sum(values))


def test_bounds_rise_and_are_dense_round_200_ms() -> None:
    for bounds in (REQUEST_BOUNDS_S, STAGE_BOUNDS_S, SIZE_BOUNDS):
        assert list(bounds) == sorted(set(bounds))
    near = [bound for bound in REQUEST_BOUNDS_S if 0.15 <= bound <= 0.25]
    assert np.diff(near).max() <= 0.0101
    assert 0.2 in near


def test_a_copy_stays_as_it_is(engine: Engine, oracle: Oracle) -> None:
    before = engine.stats().totals
    assert before.num_batches == before.histograms.queue_s.num_values == 0, "warm-up does not count"
    engine.recommend([request_of("one", history(oracle))])
    assert before.num_batches == before.histograms.queue_s.num_values == 0
    assert not before.searches
    assert not before.histograms.round_s
    assert engine.stats().totals.num_batches == 1


def test_every_search_has_one_end(engine: Engine, oracle: Oracle) -> None:
    """Full, short and empty answers, items and beams, counted again from the replies."""
    items = [item.item_id for item in oracle.catalog.items]
    searches = [
        Search(beam_width=8, num_results=2),
        Search(beam_width=8, num_results=2),
        Search(beam_width=4, num_results=500),
        Search(beam_width=5, num_results=3, rules=Rules(require=(("no such tag",),))),
        Search(beam_widths=(3, 9, 6), num_results=4, rules=Rules(exclude_item_ids=tuple(items))),
    ]
    requests = [request_of(str(i), history(oracle, i), search) for i, search in enumerate(searches)]
    results = [reply.results[0] for reply in engine.recommend(requests)]
    totals = engine.stats().totals
    assert totals.searches == {("main", "full"): 2, ("main", "short"): 1, ("main", "empty"): 2}
    assert totals.num_items_asked == 2 + 2 + 500 + 3 + 4
    assert totals.num_items_returned == sum(len(result.item_ids) for result in results)
    assert totals.num_beams_asked == 8 + 8 + 4 + 5 + 6
    assert totals.num_beams_valid == sum(result.num_valid for result in results)
    assert totals.num_dead_beams == totals.num_beams_asked - totals.num_beams_valid


def test_sizes_and_waits_of_batches(engine: Engine, oracle: Oracle) -> None:
    recording = record_batches(engine)
    widths = [(8, 8, 8), (3, 9, 6), (5, 4, 2)]
    requests = [
        request_of(str(i), history(oracle, i), Search(beam_widths=width))
        for i, width in enumerate(widths)
    ]
    replies = engine.recommend(requests)
    found = engine.stats().totals.histograms
    batches = [batch for batch, _ in recording.batches]
    assert found.num_histories.num_values == found.batch_s.num_values == len(batches)
    assert found.num_histories.sum == len(requests)
    assert found.num_rows.sum == 8 + 9 + 5
    cached = sum(reply.num_cached_tokens for reply in replies)
    assert found.num_tokens.sum == sum(reply.num_prompt_tokens for reply in replies) - cached
    assert found.queue_s.num_values == len(requests)
    queue_s = sum(reply.timings.queue_ms for reply in replies) / 1e3
    assert found.queue_s.sum == pytest.approx(queue_s, abs=1e-6)
    assert sorted(found.round_s) == [0, 1, 2]
    # an NPU cannot time inside of its graphs
    assert sorted(found.select_s) == ([] if engine.device.kind == "npu" else [0, 1, 2])
    for level, histogram in found.round_s.items():
        seconds = [output.times.rounds_s[0][level] or 0.0 for _, output in recording.batches]
        assert histogram.num_values == len(batches)
        assert histogram.sum == pytest.approx(sum(seconds))
    seconds = [output.times.prefill_s for _, output in recording.batches]
    assert found.prefill_s.sum == pytest.approx(sum(seconds))


def test_a_failed_batch_is_counted_apart(
    engine: Engine, oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(batch: object) -> None:
        raise ZeroDivisionError

    engine.worker.submit = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        engine.recommend([request_of("one", history(oracle))])
    (record,) = caplog.records
    assert record.__dict__["request_ids"] == ("one",)
    totals = engine.stats().totals
    assert (totals.num_batches, totals.num_failed_batches) == (0, 1)
    assert totals.histograms.queue_s.num_values == totals.histograms.batch_s.num_values == 1
    assert totals.histograms.prefill_s.num_values == 0
    assert not totals.searches


def test_gauges_of_a_held_engine(engine: Engine, oracle: Oracle, gate: Gate) -> None:
    """Two requests run (a batch's capacity), three wait; then nothing does."""
    search = Search(beam_widths=(5, 9, 7))
    futures = [
        engine.submit_future(request_of(str(i), history(oracle, i), search)) for i in range(2)
    ]
    gate.wait_for_batch()
    num_first = gate.batches[0].num_histories
    futures += [
        engine.submit_future(request_of(str(i), history(oracle, i), search)) for i in range(2, 5)
    ]
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (num_first, 5 - num_first)
    assert (stats.num_rows, stats.num_rows_in_use) == (128, 9 * num_first)
    page_size = engine.config.cache.page_size_tokens
    needed = [-(-length // page_size) for length in gate.batches[0].histories.kv_lens_H.tolist()]
    assert stats.num_pages_in_use == sum(needed)
    assert stats.num_pages == engine.pages.allocator.num_pages - 1
    gate.open()
    for future in futures:
        future.result(TIMEOUT_S)
    wait_until(lambda: engine.stats().num_rows_in_use == 0)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_in_use) == (0, 0, 0)


def test_identity_and_catalogues(config: RuntimeConfig, oracle: Oracle) -> None:
    start_s = time.monotonic()
    with make_engine(config) as engine:
        stats = engine.stats()
        assert (stats.device_kind, stats.model_version) == (config.device, engine.model_version)
        described = engine.describe()
        assert {name: list(bound) for name, bound in stats.providers.items()} == described["ops"]
        assert stats.num_reference_ops == described["num_reference_ops"]
        (catalog,) = stats.catalogs
        assert (catalog.name, catalog.num_versions) == ("main", 1)
        assert catalog.version == described["catalogs"]["main"]["active"]
        assert catalog.num_items == len(oracle.catalog.items)
        assert 0 < catalog.age_s <= time.monotonic() - start_s
        time.sleep(0.05)
        assert engine.stats().catalogs[0].age_s - catalog.age_s >= 0.05
        before_s = time.monotonic()
        engine.activate_catalog("main", catalog.version)
        assert engine.stats().catalogs[0].age_s <= time.monotonic() - before_s


def test_prefix_hits(engine: Engine, oracle: Oracle) -> None:
    """The same history again is found up to its last token, which is computed."""
    ids = [item.item_id for item in oracle.catalog.items[:18]]
    replies = [engine.recommend([request_of(str(i), ids)])[0] for i in range(3)]
    totals = engine.stats().totals
    cached = [reply.num_cached_tokens for reply in replies]
    assert cached[0] == 0
    assert cached[1] == cached[2] == replies[0].num_prompt_tokens - 1
    assert totals.num_prefix_hits == 2
    assert totals.num_prefix_cached_tokens == sum(cached)
    assert totals.num_prefix_lookup_tokens == sum(reply.num_prompt_tokens for reply in replies)
    assert Counter(end for _, end in totals.searches.elements()) == {"full": 3}
