"""Which requests run next, and with which pages and rows. Pure Python: no torch, no clock of its own, no threads.

Earliest due first; a request is due at its deadline, and after the configured patience at the latest, so none can
starve behind more urgent ones. A batch takes requests of the most urgent one's group (catalogue slot, normalisation);
the others wait for a later batch. It is closed when a capacity is reached or a request of that group has waited
`max_wait_ms`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from xgr_runtime.config import SchedulerConfig
from xgr_runtime.errors import DeadlineExceeded, Overloaded
from xgr_runtime.kvcache.allocator import PageAllocator, num_pages_of
from xgr_runtime.xbeam.rules import TagExpression
from xgr_runtime.xschedule.batch import Batch, RuleRow, SearchGroup, pack_histories
from xgr_runtime.xschedule.request import RequestState


@dataclass(frozen=True)
class Scheduled:
    """A batch and the requests it answers, in the order of its histories.

    places: for each request and each of its searches the group of the batch and the search's number in it.
    """

    batch: Batch
    states: tuple[RequestState, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]


class Scheduler:
    """Holds the queue. The caller serialises all calls."""

    def __init__(self, config: SchedulerConfig, allocator: PageAllocator, page_size: int) -> None:
        self._config = config
        self._allocator = allocator
        self._page_size = page_size
        self._queue: list[RequestState] = []
        self._num_batches = 0

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def add(self, state: RequestState) -> None:
        """Queue a request. Raises Overloaded when the queue is full."""
        if len(self._queue) >= self._config.max_queue:
            raise Overloaded(
                f"the queue holds {len(self._queue)} requests, scheduler.max_queue is {self._config.max_queue}"
            )
        self._queue.append(state)

    def discard(self, state: RequestState) -> bool:
        """Take a request out of the queue; False when it is not there."""
        if state not in self._queue:
            return False
        self._queue.remove(state)
        return True

    def take_all(self) -> list[RequestState]:
        """Empty the queue; the caller fails the futures."""
        states, self._queue = self._queue, []
        return states

    def expire(self, now: float) -> list[RequestState]:
        """Take out the requests whose deadline has passed; the caller fails their futures."""
        expired = [
            s
            for s in self._queue
            if s.request.deadline_s is not None and s.request.deadline_s <= now
        ]
        if expired:
            self._queue = [s for s in self._queue if s not in expired]
        return expired

    def wait_s(self, now: float) -> float | None:
        """Seconds until a batch may be ready or a deadline passes; None with an empty queue."""
        if not self._queue:
            return None
        ready = self._ready_s(self._most_urgent_group())
        deadlines = [s.request.deadline_s for s in self._queue if s.request.deadline_s is not None]
        return max(0.0, min([ready, *deadlines]) - now)

    def schedule(self, now: float, *, is_draining: bool = False) -> Scheduled | None:
        """The next batch, or None when there is none yet. Draining closes batches at once."""
        group = self._most_urgent_group()
        picked, is_full = self._pick(group)
        if not picked:
            return None
        has_waited = now >= self._ready_s(group)
        if not (is_full or has_waited or is_draining):
            return None
        rows = self._place_rules(picked)
        picked = picked[: len(rows)]
        for state in picked:
            state.pages = self._allocator.allocate(self._num_pages(state))
            state.start_s = now
            state.is_scheduled = True
            self._queue.remove(state)
        places = tuple(((0, index),) for index in range(len(picked)))
        return Scheduled(self._build(picked, rows), tuple(picked), places)

    def complete(self, scheduled: Scheduled, *, has_failed: bool = False) -> None:
        """Give back what the batch held. A failed one may not have written its rule sets: their rows are forgotten."""
        for state in scheduled.states:
            self._allocator.free(state.pages)
            state.pages = ()
            if has_failed:
                for search in state.searches:
                    search.pinned.rule_rows.forget(search.expression)

    def _num_pages(self, state: RequestState) -> int:
        return num_pages_of(state.num_tokens, self._page_size)

    def _most_urgent_group(self) -> list[RequestState]:
        """The most urgent request and the others of its group, in the order of urgency."""
        by_urgency = sorted(self._queue, key=lambda s: (s.due_s, s.arrival_s))
        return [s for s in by_urgency if s.searches[0].group == by_urgency[0].searches[0].group]

    def _ready_s(self, group: list[RequestState]) -> float:
        """When one of these requests has waited long enough for its batch to be closed."""
        return min(s.arrival_s for s in group) + self._config.max_wait_ms / 1e3

    def _pick(self, group: list[RequestState]) -> tuple[list[RequestState], bool]:
        """The first requests of a group that fit together, and whether a capacity stopped the list."""
        config, picked = self._config, list[RequestState]()
        tokens = rows = pages = 0
        for state in group:
            fits = (
                len(picked) < config.max_batch_histories
                and tokens + state.num_tokens <= config.max_batch_tokens
                and rows + state.num_rows <= config.max_batch_rows
                and pages + self._num_pages(state) <= self._allocator.num_free
            )
            if not fits:
                return picked, True
            picked.append(state)
            tokens += state.num_tokens
            rows += state.num_rows
            pages += self._num_pages(state)
        return picked, len(picked) == config.max_batch_histories

    def _place_rules(self, picked: list[RequestState]) -> list[tuple[int, TagExpression | None]]:
        """(row, expression to write or None) for as many of the picked as there are rule rows; at least one."""
        placed: list[tuple[int, TagExpression | None]] = []
        in_use: set[int] = set()
        for state in picked:
            search = state.searches[0]
            place = search.pinned.rule_rows.place(search.expression, in_use)
            if place is None:
                break
            row, is_new = place
            in_use.add(row)
            placed.append((row, search.expression if is_new else None))
        assert placed, "a slot has at least one row for rule sets"
        return placed

    def _build(
        self, states: list[RequestState], rows: list[tuple[int, TagExpression | None]]
    ) -> Batch:
        self._num_batches += 1
        packed = pack_histories(
            [s.prompt_token_ids for s in states], [s.pages for s in states], self._page_size
        )
        searches = [s.searches[0] for s in states]
        rules, num_scratch = [], 0
        for (row, _), search in zip(rows, searches, strict=True):
            scratch = num_scratch if search.is_excluding else None
            num_scratch += search.is_excluding
            rules.append(RuleRow(row, scratch, tuple(search.cleared.edges)))
        pinned = searches[0].pinned
        group = SearchGroup(
            slot_index=pinned.slot_index,
            catalog_version=pinned.version,
            normalization=searches[0].normalization,
            history_of_S=np.arange(len(states), dtype=np.int32),
            widths_SL=np.asarray([search.widths for search in searches], dtype=np.int32),
            rules=tuple(rules),
            rule_loads=tuple(
                (row, expression) for row, expression in rows if expression is not None
            ),
        )
        return Batch(
            batch_id=self._num_batches,
            kind="full",
            request_ids=tuple(s.request.request_id for s in states),
            histories=packed,
            groups=(group,),
        )


def fail_expired(
    states: list[RequestState], now: float, fail: Callable[[RequestState, Exception], None]
) -> None:
    """Fail each expired request with how long it waited."""
    for state in states:
        waited_ms = (now - state.arrival_s) * 1e3
        fail(state, DeadlineExceeded(f"the deadline passed after {waited_ms:.0f} ms in the queue"))
