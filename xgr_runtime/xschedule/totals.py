"""What an engine did since its start: counts, and how sizes and times were distributed. The caller serialises all calls."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from xgr_runtime.types import RecResult, SearchResult
from xgr_runtime.xschedule.batch import Batch, BatchOutput
from xgr_runtime.xschedule.histogram import (
    REQUEST_BOUNDS_S,
    SIZE_BOUNDS,
    STAGE_BOUNDS_S,
    Histogram,
)
from xgr_runtime.xschedule.request import RequestState
from xgr_runtime.xschedule.stage_times import StageTimes

SearchEnd = Literal["full", "short", "empty", "failed"]
SEARCH_ENDS: tuple[SearchEnd, ...] = ("full", "short", "empty", "failed")


_request_s = partial(Histogram, REQUEST_BOUNDS_S)
_stage_s = partial(Histogram, STAGE_BOUNDS_S)
_size = partial(Histogram, SIZE_BOUNDS)


@dataclass
class BatchHistograms:
    """Per batch, except queue_s: per request of a batch. num_tokens: new ones. round_s and select_s: by round, where they
    are known; all_rounds_s: of a group.

    num_rows: the beam rows that a batch holds, each search its largest width.
    """

    queue_s: Histogram = field(default_factory=_request_s)
    batch_s: Histogram = field(default_factory=_request_s)
    num_histories: Histogram = field(default_factory=_size)
    num_tokens: Histogram = field(default_factory=_size)
    num_rows: Histogram = field(default_factory=_size)
    to_device_s: Histogram = field(default_factory=_stage_s)
    prefill_s: Histogram = field(default_factory=_stage_s)
    to_host_s: Histogram = field(default_factory=_stage_s)
    all_rounds_s: Histogram = field(default_factory=_stage_s)
    round_s: dict[int, Histogram] = field(default_factory=dict)
    select_s: dict[int, Histogram] = field(default_factory=dict)

    def add_batch(self, batch: Batch, seconds: float) -> None:
        """The sizes of a batch and the time it took."""
        self.batch_s.add(seconds)
        self.num_histories.add(batch.num_histories)
        self.num_tokens.add(batch.histories.num_scheduled_tokens)
        self.num_rows.add(sum(int(group.widths_SL.max(axis=1).sum()) for group in batch.groups))

    def add_times(self, times: StageTimes) -> None:
        """The times of a batch's stages."""
        self.to_device_s.add(times.to_device_s)
        self.prefill_s.add(times.prefill_s)
        self.to_host_s.add(times.to_host_s)
        for seconds in times.all_rounds_s:
            self.all_rounds_s.add(seconds)
        for by_round, groups in ((self.round_s, times.rounds_s), (self.select_s, times.selects_s)):
            for group in groups:
                for level, of_round in enumerate(group):
                    if of_round is not None:
                        by_round.setdefault(level, _stage_s()).add(of_round)

    def copy(self) -> "BatchHistograms":
        """As they are now."""
        copies: dict[str, Any] = {
            f.name: _copy(getattr(self, f.name)) for f in dataclasses.fields(self)
        }
        return BatchHistograms(**copies)


def _copy(value: Histogram | dict[int, Histogram]) -> Histogram | dict[int, Histogram]:
    if isinstance(value, Histogram):
        return value.copy()
    return {level: histogram.copy() for level, histogram in value.items()}


@dataclass
class Totals:
    """num_live_rows: parent rows expanded. num_rows_skipped: rows that early termination skipped. num_dead_beams: rows
    of the last rounds that no valid child filled. num_prefix_lookup_tokens, num_prefix_cached_tokens: tokens of all
    prompts, and how many of them the prefix cache held; num_prefix_hits: requests that found any.

    num_beams_asked, num_beams_valid: widths of the last rounds, and the live beams after them. num_items_asked,
    num_items_returned: the num_results of all searches, and the items they gave. searches: by catalogue and end: as many
    items as asked, fewer, none, or failed (NaN or +inf among the logits). num_failed_batches: their requests raised.
    """

    num_batches: int = 0
    num_failed_batches: int = 0
    num_live_rows: int = 0
    num_rows_skipped: int = 0
    num_dead_beams: int = 0
    num_prefix_lookup_tokens: int = 0
    num_prefix_cached_tokens: int = 0
    num_prefix_hits: int = 0
    num_beams_asked: int = 0
    num_beams_valid: int = 0
    num_items_asked: int = 0
    num_items_returned: int = 0
    searches: "Counter[tuple[str, SearchEnd]]" = field(default_factory=Counter)
    histograms: BatchHistograms = field(default_factory=BatchHistograms)

    def add(
        self,
        batch: Batch,
        output: BatchOutput,
        states: Sequence[RequestState],
        results: Iterable[RecResult],
        seconds: float,
    ) -> None:
        """Count a batch that gave results, one for each state."""
        self.num_batches += 1
        histories = batch.histories
        num_tokens = histories.num_prompt_tokens
        self.num_prefix_lookup_tokens += num_tokens
        self.num_prefix_cached_tokens += num_tokens - histories.num_scheduled_tokens
        for group, found in zip(batch.groups, output.groups, strict=True):
            self.num_live_rows += found.num_live_rows
            self.num_rows_skipped += found.num_rows_skipped
            num_rows = int(group.widths_SL[:, -1].sum())
            scores = found.scores_LN[-1][:num_rows]
            self.num_dead_beams += int(np.count_nonzero(scores == -np.inf))
        self._add_waits(batch, states, seconds)
        self.histograms.add_times(output.times)
        for state, result in zip(states, results, strict=True):
            self.num_prefix_hits += result.num_cached_tokens > 0
            for search, found_items in zip(state.searches, result.results, strict=True):
                self._add_search(search.num_results, found_items)

    def add_failed(self, batch: Batch, states: Sequence[RequestState], seconds: float) -> None:
        """Count a batch that raised: its sizes and waits, none of its stages and results."""
        self.num_failed_batches += 1
        self._add_waits(batch, states, seconds)

    def _add_waits(self, batch: Batch, states: Sequence[RequestState], seconds: float) -> None:
        self.histograms.add_batch(batch, seconds)
        for state in states:
            self.histograms.queue_s.add(state.start_s - state.arrival_s)

    def _add_search(self, num_asked: int, found: SearchResult) -> None:
        self.num_beams_asked += found.beam_widths[-1]
        self.num_beams_valid += found.num_valid
        self.num_items_asked += num_asked
        self.num_items_returned += found.num_items
        self.searches[found.catalog, _end_of(num_asked, found)] += 1

    def copy(self) -> "Totals":
        """As they are now."""
        return dataclasses.replace(
            self, searches=self.searches.copy(), histograms=self.histograms.copy()
        )

    def describe(self) -> dict[str, int]:
        """The plain counters by name."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, int)}


def _end_of(num_asked: int, found: SearchResult) -> SearchEnd:
    if found.status == "failed":
        return "failed"
    if found.num_items == 0:
        return "empty"
    return "full" if found.num_items >= num_asked else "short"
