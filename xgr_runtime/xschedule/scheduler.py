"""Which requests run next, and with which pages and rows. Pure Python: no torch, no clock of its own, no threads.

Earliest due first; a request is due at its deadline, and after the configured patience at the latest, so none can
starve behind more urgent ones. Those whose deadline is too near for an answer wait behind all others: run first, they
would be late and make the others late too, and once there is more work than time hardly any answer would be in time.
A batch takes requests of the most urgent one's group (catalogue slot, normalisation); the others wait for a later
batch. Pages of histories that are cached count neither as new tokens nor as new pages; tokens that are copied from a cached
page are no new tokens. A page that is copied from has to stay until the batch has ended: where pages are too few for that, the
tokens are computed.

A batch is closed when a capacity is reached. One that could hold more is closed when the device is about to have nothing
else to do: before that it gains nothing by being closed, and others may still join it or a more urgent one come first. From
then on waiting costs device time. `max_wait_ms` is how long a request is held back all the same for others that may come;
for those that are on the way already (`expect`) a request waits a little also where it is 0.

Several batches may be in flight. Each holds pages and rule rows of its own until `complete`; what it has computed is found
by others only then. Where those in flight leave too little for the most urgent request, there is no next batch yet.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from xgr_runtime.config import SchedulerConfig
from xgr_runtime.errors import DeadlineExceeded, InvalidRequest, Overloaded
from xgr_runtime.kvcache.allocator import num_pages_of
from xgr_runtime.kvcache.prefix_cache import NOTHING_FOUND, Found, PrefixCache
from xgr_runtime.xbeam.rules import TagExpression
from xgr_runtime.xschedule.batch import Batch, BatchOutput, RuleRow, SearchGroup, pack_histories
from xgr_runtime.xschedule.request import RequestState


@dataclass(frozen=True)
class Scheduled:
    """A batch and the requests it answers, in the order of its histories.

    places: for each request and each of its searches the group of the batch and the search's number in it.
    """

    batch: Batch
    states: tuple[RequestState, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class _Sums:
    """What the picked requests need together. pinned: keys of idle pages that they read, which cannot make room."""

    tokens: int = 0
    rows: int = 0
    pages: int = 0
    named: int = 0
    pinned: frozenset[bytes] = frozenset()


COMPANY_S = 2e-3  # being prepared takes less, and a batch of its own costs a request that comes too late much more
RECENT = 0.2  # weight of the last batch in the usual time of one


class Scheduler:
    """Holds the queue. The caller serialises all calls."""

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PrefixCache,
        page_size: int,
        *,
        is_counting_shared_pages: bool = False,
        padded_histories: Callable[[int], int] = lambda number: 1 << (number - 1).bit_length(),
    ) -> None:
        self._config = config
        self._pages = pages
        self._page_size = page_size
        self._queue: list[RequestState] = []
        self._num_batches = 0
        # Pages that the histories of a batch may name, shared ones counted each time (see `Device`).
        self._padded_histories = padded_histories
        self._most_named = pages.allocator.num_pages if is_counting_shared_pages else math.inf
        self.usual_run_s = 0.0
        self.expect()

    def expect(self, free_s: float = -math.inf, *, is_company_coming: bool = False) -> None:
        """What the next batch meets: when the device is about to have nothing to do, and whether requests are being prepared."""
        self._free_s, self._is_company_coming = free_s, is_company_coming

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def add(self, state: RequestState) -> None:
        """Queue a request. Raises Overloaded when the queue is full, InvalidRequest where no batch could ever hold it.

        The latter would be the most urgent one for ever, and nothing behind it would run.
        """
        violations = self._never_fits(state)
        if violations:
            raise InvalidRequest(violations)
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
        expired, kept = list[RequestState](), list[RequestState]()
        for state in self._queue:
            deadline_s = state.request.deadline_s
            is_late = deadline_s is not None and deadline_s <= now
            (expired if is_late else kept).append(state)
        self._queue = kept
        return expired

    def wait_s(self, now: float) -> float | None:
        """Seconds until a batch may be ready or a deadline passes; None with an empty queue."""
        if not self._queue:
            return None
        ready = self._ready_s(self._most_urgent_group(now))
        deadlines = [s.request.deadline_s for s in self._queue if s.request.deadline_s is not None]
        return max(0.0, min([ready, *deadlines]) - now)

    def schedule(self, now: float, *, is_draining: bool = False) -> Scheduled | None:
        """The next batch, or None when there is none yet. Draining closes batches at once."""
        group = self._most_urgent_group(now)
        picked, is_full = self._pick(group)
        if not picked:
            return None
        if not (is_full or is_draining or now >= self._ready_s(group)):
            return None
        rows = self._place_rules([state for state, _ in picked])
        if not rows:
            return None
        self._take_pages(picked[: len(rows)])
        states = [state for state, _ in picked[: len(rows)]]
        for state in states:
            state.start_s = now
            state.is_scheduled = True
            self._queue.remove(state)
        places = tuple(((0, index),) for index in range(len(states)))
        return Scheduled(self._build(states, rows), tuple(states), places)

    def complete(self, scheduled: Scheduled, output: BatchOutput | None) -> None:
        """Give back what the batch held; the pages of its histories stay cached. output None: the batch failed.

        A failed batch may have written neither its pages nor its rule sets: both are forgotten. So are the pages of a
        history whose search failed.
        """
        failed = self._failed_histories(scheduled, output)
        for number, state in enumerate(scheduled.states):
            self._pages.release(
                state.prefix, state.pages, state.found, is_written=number not in failed
            )
            state.pages, state.found = (), NOTHING_FOUND
            for search, (group, index) in zip(
                state.searches, scheduled.places[number], strict=True
            ):
                if output is None:
                    search.pinned.rule_rows.forget(search.expression)
                rule = scheduled.batch.groups[group].rules[index]
                search.pinned.rule_rows.release(rule.row)

    def _failed_histories(self, scheduled: Scheduled, output: BatchOutput | None) -> set[int]:
        if output is None:
            return set(range(len(scheduled.states)))
        failed: set[int] = set()
        for group, found in zip(scheduled.batch.groups, output.groups, strict=True):
            failed.update(group.history_of_S[found.status_S != 0].tolist())
        return failed

    def _take_pages(self, picked: list[tuple[RequestState, Found]]) -> None:
        """Pin what is cached for all of them before anything is evicted for one of them."""
        for state, found in picked:
            pages = self._pages.pin(found.all_keys)
            state.source_page = None if found.source is None else pages.pop()
            state.pages, state.found = pages, found
            state.num_cached_tokens = found.num_tokens(self._page_size)
        for state, _ in picked:
            missing = self._num_pages(state) - len(state.pages)
            state.pages = [*state.pages, *self._pages.allocate(missing)]

    def _cached(self, state: RequestState) -> Iterator[Found]:
        """What of a prompt is cached, then the same without a copy; its last token is always computed."""
        if state.prefix is None:
            yield NOTHING_FOUND
            return
        found = self._pages.find(state.prefix, state.num_tokens - 1)
        yield found
        if found.source is not None:
            yield found.without_copy()

    def _num_pages(self, state: RequestState) -> int:
        return num_pages_of(state.num_tokens, self._page_size)

    def _never_fits(self, state: RequestState) -> list[tuple[str, str]]:
        """What an empty device lacks for this request alone. Limits that fit their pools leave nothing to find here."""
        config, num_pages = self._config, self._pages.allocator.num_pages - 1
        needs = (
            ("history", state.num_tokens, "tokens", "scheduler.max_batch_tokens", config.max_batch_tokens),
            ("history", self._num_pages(state), "pages", "cache.num_pages", num_pages),
            ("searches", state.num_rows, "beam rows", "scheduler.max_batch_rows", config.max_batch_rows),
        )  # fmt: skip
        return [
            (field, f"needs {needed} {unit}, a batch has at most {most}; raise {option} to allow")
            for field, needed, unit, option, most in needs
            if needed > most
        ]

    def note_run(self, run_s: float) -> None:
        """How long a batch took from its scheduling to its answers, its wait behind others included; `usual_run_s` follows."""
        self.usual_run_s += RECENT * (run_s - self.usual_run_s)

    def _most_urgent_group(self, now: float) -> list[RequestState]:
        """The most urgent request and the others of its group, in the order of urgency."""
        end_s = now + self.usual_run_s

        def urgency(state: RequestState) -> tuple[bool, float, float]:
            deadline_s = state.request.deadline_s
            is_hopeless = deadline_s is not None and deadline_s < end_s
            return (is_hopeless, state.due_s, state.arrival_s)

        by_urgency = sorted(self._queue, key=urgency)
        return [s for s in by_urgency if s.searches[0].group == by_urgency[0].searches[0].group]

    def _ready_s(self, group: list[RequestState]) -> float:
        """When their batch is closed though it could hold more."""
        wait_s = self._config.max_wait_ms / 1e3
        if self._is_company_coming:
            wait_s = max(wait_s, COMPANY_S)
        return max(self._free_s, min(s.arrival_s for s in group) + wait_s)

    def _pick(self, group: list[RequestState]) -> tuple[list[tuple[RequestState, Found]], bool]:
        """The first requests of a group that fit together, with what is cached of each, and whether a capacity stopped the list."""
        picked, sums = list[tuple[RequestState, Found]](), _Sums()
        for state in group:
            for found in self._cached(state):
                larger = self._with(sums, state, found)
                if self._fits(larger, len(picked) + 1):
                    break
            else:
                return picked, True
            picked.append((state, found))
            sums = larger
        return picked, len(picked) == self._config.max_batch_histories

    def _with(self, sums: _Sums, state: RequestState, found: Found) -> _Sums:
        return _Sums(
            sums.tokens + state.num_tokens - found.num_tokens(self._page_size),
            sums.rows + state.num_rows,
            sums.pages + self._num_pages(state) - len(found.keys),
            sums.named + self._num_pages(state),
            sums.pinned | self._pages.idle_among(found.all_keys),
        )

    def _fits(self, sums: _Sums, number: int) -> bool:
        """Whether so many requests that need so much are a batch."""
        config = self._config
        padding = self._padded_histories(number) - number
        return (
            number <= config.max_batch_histories
            and sums.tokens <= config.max_batch_tokens
            and sums.rows <= config.max_batch_rows
            and sums.pages <= self._pages.num_available - len(sums.pinned)
            and (number == 1 or sums.named + padding <= self._most_named)
        )

    def _place_rules(self, picked: list[RequestState]) -> list[tuple[int, TagExpression | None]]:
        """(row, expression to write or None) for as many of the picked as there are rule rows; none while others use all."""
        placed: list[tuple[int, TagExpression | None]] = []
        for state in picked:
            search = state.searches[0]
            place = search.pinned.rule_rows.place(search.expression)
            if place is None:
                break
            row, is_new = place
            placed.append((row, search.expression if is_new else None))
        return placed

    def _build(
        self, states: list[RequestState], rows: list[tuple[int, TagExpression | None]]
    ) -> Batch:
        self._num_batches += 1
        packed = pack_histories(
            [s.prompt_token_ids for s in states],
            [s.pages for s in states],
            self._page_size,
            [s.num_cached_tokens for s in states],
            [s.source_page for s in states],
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
