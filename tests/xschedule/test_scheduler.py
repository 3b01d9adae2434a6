"""The scheduler under drawn traffic: capacities, order, waiting, expiry, groups, rule rows, pages."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xschedule.states import Pinned, expression, make_state, output_of
from xgr_runtime.config import SchedulerConfig
from xgr_runtime.errors import DeadlineExceeded, InvalidRequest, Overloaded
from xgr_runtime.kvcache.allocator import PageAllocator
from xgr_runtime.kvcache.prefix_cache import PrefixCache
from xgr_runtime.xschedule.scheduler import COMPANY_S, Scheduler, fail_expired

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from xgr_runtime.types import Int64Array, Normalization
    from xgr_runtime.xbeam.rules import TagExpression
    from xgr_runtime.xschedule.request import RequestState
    from xgr_runtime.xschedule.scheduler import Scheduled

PAGE = 4
CONFIG = SchedulerConfig(
    max_queue=50, max_batch_histories=3, max_batch_tokens=24, max_batch_rows=20, max_wait_ms=10.0
)
NUM_PAGES = 1 + 9  # a history of 24 tokens takes six: pages are the tightest capacity at times


@dataclass(frozen=True)
class Arrival:
    """One request of the traffic; cancel_after_s from its arrival, when it is still queued.

    user: whose history it is, a stream of tokens of his own from `window` on; users of an even number begin alike.
    """

    gap_s: float
    user: int
    window: int
    num_tokens: int
    widths: tuple[int, int]
    slot: int
    normalization: Normalization
    deadline_after_s: float | None
    cancel_after_s: float | None
    expression_number: int
    is_excluding: bool


arrivals = st.builds(
    Arrival,
    gap_s=st.sampled_from([0.0, 0.001, 0.004, 0.02]),
    user=st.integers(0, 3),
    window=st.sampled_from([0, 0, 0, 1]),
    num_tokens=st.integers(1, 24),
    widths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    slot=st.integers(0, 1),
    normalization=st.sampled_from(["vocab", "level"]),
    deadline_after_s=st.none() | st.sampled_from([0.005, 0.05, 0.5, 30.0]),
    cancel_after_s=st.none() | st.sampled_from([0.002, 0.03]),
    expression_number=st.integers(0, 5),
    is_excluding=st.booleans(),
)


@dataclass
class Simulation:
    """One device, a clock, and a check of every batch against what the contract says of it."""

    pinned: list[Pinned] = field(default_factory=lambda: [Pinned(0, 3), Pinned(1, 9)])
    now: float = 0.0
    is_caching: bool = True
    is_counting_shared_pages: bool = False
    num_cached_tokens: int = 0
    run_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pages = PrefixCache(PageAllocator(NUM_PAGES))
        self.scheduler = Scheduler(
            CONFIG, self.pages, PAGE, is_counting_shared_pages=self.is_counting_shared_pages
        )
        # What each token slot of the device holds: keys and values are a function of all tokens up to their own.
        self.memory: dict[int, tuple[int, ...]] = {}
        self.queued: list[RequestState] = []
        self.ran: list[RequestState] = []
        self.expired: list[RequestState] = []
        self.cancelled: list[RequestState] = []
        self.rows: dict[tuple[int, int], TagExpression] = {}

    def add(self, number: int, arrival: Arrival) -> RequestState:
        state = make_state(
            str(number),
            self.pinned[arrival.slot],
            num_tokens=arrival.num_tokens,
            widths=arrival.widths,
            normalization=arrival.normalization,
            arrival_s=self.now,
            deadline_s=None
            if arrival.deadline_after_s is None
            else self.now + arrival.deadline_after_s,
            expression_number=arrival.expression_number,
            is_excluding=arrival.is_excluding,
            prompt=prompt_of(arrival),
            page_size=PAGE if self.is_caching else None,
        )
        self.scheduler.add(state)
        self.queued.append(state)
        return state

    def step(
        self, run_s: float, *, is_draining: bool = False, failed: Collection[int] | None = ()
    ) -> bool:
        """Expire, schedule, check, run; whether a batch ran. failed: histories whose search fails, None: the batch."""
        for state in self.scheduler.expire(self.now):
            assert state.request.deadline_s is not None
            assert state.request.deadline_s <= self.now
            self.queued.remove(state)
            self.expired.append(state)
        assert all(
            s.request.deadline_s is None or s.request.deadline_s > self.now for s in self.queued
        )
        scheduled = self.scheduler.schedule(self.now, is_draining=is_draining)
        if scheduled is None:
            oldest = min((s.arrival_s for s in self.most_urgent_group()), default=np.inf)
            assert self.now < oldest + CONFIG.max_wait_ms / 1e3, "the longest wait is honoured"
            return False
        self.check(scheduled)
        for state in scheduled.states:
            self.queued.remove(state)
            self.ran.append(state)
        assert self.scheduler.num_queued == len(self.queued)
        self.now += run_s
        self.scheduler.note_run(run_s)
        self.run_times.append(run_s)
        self.write(scheduled, failed)
        output = None if failed is None else output_of(scheduled.batch, failed)
        self.scheduler.complete(scheduled, output)
        self.pages.check_conservation()
        assert self.pages.num_in_use == 0
        if not self.is_caching:
            assert self.pages.num_cached == 0
        if failed is None:
            (group,) = scheduled.batch.groups
            for row, _ in group.rule_loads:  # may not have been written
                del self.rows[group.slot_index, row]
        return True

    def write(self, scheduled: Scheduled, failed: Collection[int] | None) -> None:
        """Play the prefill: cached tokens are read and checked, new ones written, rubbish where it failed."""
        packed = scheduled.batch.histories
        for h, state in enumerate(scheduled.states):
            prompt = tuple(state.prompt_token_ids.tolist())
            table = packed.page_table_HP[h].tolist()
            slots = [table[i // PAGE] * PAGE + i % PAGE for i in range(len(prompt))]
            new = slice(packed.q_start_H1[h], packed.q_start_H1[h + 1])
            num_new = new.stop - new.start
            num_cached = len(prompt) - num_new
            source, target, num_copied = packed.copies_3H[:, h].tolist()
            assert num_copied == num_cached % PAGE
            assert (source, target) == (
                (state.source_page, table[num_cached // PAGE]) if num_copied else (0, 0)
            )
            for i in range(num_copied):
                self.memory[target * PAGE + i] = self.memory[source * PAGE + i]
            assert num_new >= 1
            assert state.num_cached_tokens == num_cached
            assert packed.kv_slots_T[new].tolist() == slots[num_cached:]
            assert packed.token_ids_T[new].tolist() == list(prompt[num_cached:])
            for i in range(num_cached):
                assert self.memory[slots[i]] == prompt[: i + 1], (
                    "a cached page holds another prefix"
                )
            is_failed = failed is None or h in failed
            for i in range(num_cached - num_copied if is_failed else num_cached, len(prompt)):
                self.memory[slots[i]] = () if is_failed else prompt[: i + 1]
        self.num_cached_tokens += packed.num_prompt_tokens - packed.num_scheduled_tokens

    def check(self, scheduled: Scheduled) -> None:
        batch, states = scheduled.batch, scheduled.states
        (group,) = batch.groups
        assert 1 <= len(states) <= CONFIG.max_batch_histories
        assert batch.histories.num_scheduled_tokens <= CONFIG.max_batch_tokens
        assert sum(max(s.searches[0].widths) for s in states) <= CONFIG.max_batch_rows
        assert {(s.searches[0].pinned.slot_index, s.searches[0].normalization) for s in states} == {
            (group.slot_index, group.normalization)
        }
        assert scheduled.places == tuple(((0, index),) for index in range(len(states)))
        assert group.history_of_S.tolist() == list(range(len(states)))
        assert group.widths_SL.tolist() == [list(s.searches[0].widths) for s in states]
        assert batch.request_ids == tuple(s.request.request_id for s in states)
        self.check_order(states)
        self.check_pages(states)
        self.check_rules(scheduled)

    def most_urgent_group(self) -> list[RequestState]:
        # Batches so far, the last weighs a fifth and each before it a fifth of what is left.
        usual_s = sum(0.2 * 0.8**age * run_s for age, run_s in enumerate(reversed(self.run_times)))

        def is_hopeless(state: RequestState) -> bool:
            deadline_s = state.request.deadline_s
            return deadline_s is not None and self.now + usual_s > deadline_s

        by_due = sorted(self.queued, key=lambda s: (s.due_s, s.arrival_s))
        by_urgency = [s for s in by_due if not is_hopeless(s)] + [
            s for s in by_due if is_hopeless(s)
        ]
        return [s for s in by_urgency if s.searches[0].group == by_urgency[0].searches[0].group]

    def check_order(self, states: tuple[RequestState, ...]) -> None:
        """The most urgent request of all first; then its group in the order of urgency, nobody overtaken."""
        assert list(states) == self.most_urgent_group()[: len(states)]

    def check_pages(self, states: tuple[RequestState, ...]) -> None:
        cached = [page for s in states for page in s.pages[: s.num_cached_tokens // PAGE]]
        new = [page for s in states for page in s.pages[s.num_cached_tokens // PAGE :]]
        assert len(set(new)) == len(new)
        assert not set(cached) & set(new), "a page that is read is not written"
        assert 0 not in [*cached, *new], "the null page belongs to padding"
        assert all(len(s.pages) == -(-s.num_tokens // PAGE) for s in states)
        sources = {s.source_page for s in states if s.source_page is not None}
        assert not sources & set(new), "a page that is copied from is not written"
        assert self.pages.num_in_use == len({*cached, *new, *sources})
        if len(states) > 1 and self.is_counting_shared_pages:
            assert num_named(states) <= NUM_PAGES

    def check_rules(self, scheduled: Scheduled) -> None:
        """Each search reads a row that holds its expression after the batch's writes, and a scratch row of its own."""
        (group,) = scheduled.batch.groups
        for row, loaded in group.rule_loads:
            assert row != 0, "row 0 is everything alive"
            self.rows[group.slot_index, row] = loaded
        scratch = []
        for rule, state in zip(group.rules, scheduled.states, strict=True):
            held = self.rows.get((group.slot_index, rule.row), expression(0))
            assert held == state.searches[0].expression
            assert (rule.scratch is not None) == state.searches[0].is_excluding
            scratch += [] if rule.scratch is None else [rule.scratch]
        assert scratch == list(range(len(scratch)))


def prompt_of(arrival: Arrival) -> Int64Array:
    """The tokens of a user from the start of his window."""
    stream = np.arange(100, dtype=np.int64) + 1000 * arrival.user
    if arrival.user % 2 == 0:
        stream[:6] = np.arange(6)
    return stream[arrival.window : arrival.window + arrival.num_tokens]


@given(
    traffic=st.lists(arrivals, max_size=40),
    run_s=st.sampled_from([0.0, 0.003, 0.05]),
    is_caching=st.booleans(),
    failures=st.lists(st.sampled_from([(), (), (), (0,), (1,), None]), min_size=1, max_size=5),
)
def test_every_batch_keeps_the_contract(
    traffic: list[Arrival],
    run_s: float,
    is_caching: bool,
    failures: list[tuple[int, ...] | None],
) -> None:
    sim = Simulation(is_caching=is_caching)
    ends_of_batches = itertools.cycle(failures)
    cancels: list[tuple[float, RequestState]] = []
    for number, arrival in enumerate(traffic):
        sim.now += arrival.gap_s
        state = sim.add(number, arrival)
        if arrival.cancel_after_s is not None:
            cancels.append((sim.now + arrival.cancel_after_s, state))
        for due, cancelled in [pair for pair in cancels if pair[0] <= sim.now]:
            cancels.remove((due, cancelled))
            was_queued = cancelled in sim.queued
            assert sim.scheduler.discard(cancelled) == was_queued
            if was_queued:
                sim.queued.remove(cancelled)
                sim.cancelled.append(cancelled)
        sim.step(run_s, failed=next(ends_of_batches))
    for _ in range(3 * len(traffic) + 1):
        if not sim.queued:
            break
        wait = sim.scheduler.wait_s(sim.now)
        assert wait is not None
        num_left = len(sim.queued)
        sim.now += wait
        sim.step(run_s, failed=next(ends_of_batches))
        assert len(sim.queued) < num_left, "after the announced wait something runs or expires"
    assert not sim.queued
    assert sim.scheduler.wait_s(sim.now) is None
    ends = [*sim.ran, *sim.expired, *sim.cancelled]
    assert sorted(int(s.request.request_id) for s in ends) == list(range(len(traffic)))
    sim.pages.check_conservation()
    assert sim.pages.num_available == NUM_PAGES - 1


def plain(**changes: object) -> Arrival:
    values = {
        "gap_s": 0.0, "user": 0, "window": 0, "num_tokens": 4, "widths": (2, 2), "slot": 0, "normalization": "vocab",
        "deadline_after_s": None, "cancel_after_s": None, "expression_number": 0,
        "is_excluding": False,
    }  # fmt: skip
    return Arrival(**{**values, **changes})  # type: ignore[arg-type]


def test_a_flood_of_urgent_requests_starves_no_one() -> None:
    """Ten urgent requests of another group arrive with every batch; the patient one runs when its patience ends."""
    for deadline in (None, 3600.0):
        sim = Simulation()
        patient = sim.add(-1, plain(slot=1, deadline_after_s=deadline))
        number = 0
        while patient not in sim.ran:
            for _ in range(10 - len(sim.queued) + 1):
                sim.add(number, plain(deadline_after_s=0.2))
                number += 1
            sim.step(0.05)
            assert sim.now < 1.2, f"still waiting at {sim.now:.2f} s with deadline {deadline}"
        assert sim.now >= 0.8, "more urgent ones went first"


@pytest.mark.parametrize("load", [0.5, 1.5, 4.0])
def test_more_work_than_time_leaves_most_of_the_answers_in_time(load: float) -> None:
    """Batches of 50 ms hold three; requests have 300 ms each. Earliest deadline first alone would answer all of them late."""
    sim, run_s = Simulation(), 0.05
    gap_s = run_s / 3 / load
    number = in_time = 0
    while sim.now < 20.0:
        while number * gap_s <= sim.now and len(sim.queued) < CONFIG.max_queue:
            sim.add(number, plain(deadline_after_s=0.3))
            number += 1
        num_ran = len(sim.ran)
        if not sim.step(run_s):
            sim.now += 0.001
        deadlines = [s.request.deadline_s or 0.0 for s in sim.ran[num_ran:]]
        in_time += sum(deadline_s >= sim.now for deadline_s in deadlines)
    offered, most = 20.0 / gap_s, 20.0 / run_s * 3
    assert in_time >= 0.9 * min(offered, most), f"{in_time} of {offered:.0f}, at most {most:.0f}"


@pytest.mark.parametrize(("run_s", "deadline_s"), [(0.15, 0.25), (0.05, 0.09)])
def test_short_deadlines_are_met_beside_callers_who_have_time(
    run_s: float, deadline_s: float
) -> None:
    """A queue of requests without a deadline that never empties, and every 0.2 s one whose deadline a batch can meet.

    A request that comes in the first part of a running batch cannot be met by the next one; the others have to be.
    """
    sim, rng = Simulation(), np.random.default_rng(0)
    number, next_s, num_met, num_possible = 0, 0.05, 0, 0
    while sim.now < 60.0:
        while sum(s.request.deadline_s is None for s in sim.queued) < 8:
            sim.add(number := number + 1, plain())
        if next_s <= sim.now:
            # It arrived during the batch that has just ended; the next one, started now, has to end in time.
            now, sim.now = sim.now, next_s
            sim.add(number := number + 1, plain(deadline_after_s=deadline_s))
            sim.now = now
            num_possible += sim.now + run_s <= next_s + deadline_s
            next_s += 0.2 * rng.uniform(0.5, 1.5)
        num_ran = len(sim.ran)
        sim.step(run_s)
        met = [s.request.deadline_s for s in sim.ran[num_ran:] if s.request.deadline_s is not None]
        num_met += sum(deadline >= sim.now - 1e-9 for deadline in met)
    assert num_possible > 100
    assert num_met >= 0.95 * num_possible, (num_met, num_possible)


def test_requests_with_too_little_time_still_run_when_nothing_else_waits() -> None:
    sim = Simulation()
    sim.scheduler.note_run(100.0)  # one batch that took very long must not stop the service
    sim.add(0, plain(deadline_after_s=0.5))
    sim.now = 0.01
    assert sim.step(0.01)


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    """Small requests would always fit beside a batch; the large one waits for its own turn, not for silence."""
    sim = Simulation()
    large = sim.add(0, plain(num_tokens=24, widths=(20, 20)))
    for number in range(1, 20):
        sim.add(number, plain())
    sim.now = 0.01
    assert sim.step(0.01)
    assert sim.ran == [large]


def test_a_full_batch_does_not_wait() -> None:
    sim = Simulation()
    sim.add(0, plain())
    sim.add(1, plain())
    assert not sim.step(0.0)
    sim.add(2, plain())
    assert sim.step(0.0)
    assert len(sim.ran) == 3


@pytest.mark.parametrize(
    "changes", [{"num_tokens": 12}, {"widths": (1, 10)}, {"num_tokens": 17}], ids=str
)
def test_each_capacity_closes_a_batch(changes: dict[str, object]) -> None:
    """Two of these fill tokens or rows; of the third kind only one fits into the pages."""
    sim = Simulation()
    for number in range(3):
        sim.add(number, plain(**changes))
    assert sim.step(0.0)
    assert len(sim.ran) == (1 if changes.get("num_tokens") == 17 else 2)


def test_draining_closes_batches_at_once() -> None:
    sim = Simulation()
    sim.add(0, plain())
    assert not sim.step(0.0)
    assert sim.step(0.0, is_draining=True)


def test_the_announced_wait() -> None:
    sim = Simulation()
    assert sim.scheduler.wait_s(0.0) is None
    sim.add(0, plain())
    assert sim.scheduler.wait_s(0.0) == pytest.approx(0.010)
    assert sim.scheduler.wait_s(0.004) == pytest.approx(0.006)
    sim.add(1, plain(deadline_after_s=0.003))
    assert sim.scheduler.wait_s(0.0) == pytest.approx(0.003)
    assert sim.scheduler.wait_s(1.0) == 0.0


def test_a_free_device_keeps_nobody_waiting_where_that_is_configured() -> None:
    sim = Simulation()
    sim.scheduler._config = replace(CONFIG, max_wait_ms=0.0)
    sim.add(0, plain())
    assert sim.scheduler.wait_s(0.0) == 0.0
    assert sim.scheduler.schedule(0.0) is not None


def test_company_on_its_way_is_waited_for_a_little() -> None:
    sim = Simulation()
    sim.scheduler._config = replace(CONFIG, max_wait_ms=0.0)
    sim.add(0, plain())
    sim.scheduler.expect(is_company_coming=True)
    assert sim.scheduler.schedule(COMPANY_S - 1e-6) is None
    assert sim.scheduler.wait_s(0.0) == pytest.approx(COMPANY_S)
    assert sim.scheduler.schedule(COMPANY_S) is not None
    sim.add(1, plain())
    sim.scheduler.expect()
    assert sim.scheduler.schedule(0.0) is not None, "nobody is on the way any more"


def test_a_batch_that_is_not_full_is_closed_when_the_device_is_about_to_be_free() -> None:
    """However long it has waited; a full one, and the last ones of all, are closed at once."""
    sim = Simulation()
    sim.scheduler.expect(1.0)
    first = sim.add(0, plain())
    assert sim.scheduler.schedule(0.999) is None
    assert sim.scheduler.wait_s(0.2) == pytest.approx(0.8)
    others = [sim.add(number, plain()) for number in range(1, CONFIG.max_batch_histories)]
    full = sim.scheduler.schedule(0.5)
    assert full is not None
    assert full.states == (first, *others)
    sim.add(8, plain())
    assert sim.scheduler.schedule(0.9) is None
    assert sim.scheduler.schedule(1.0) is not None
    sim.add(9, plain())
    assert sim.scheduler.schedule(0.9, is_draining=True) is not None


def test_a_batch_waits_for_its_own_group_alone() -> None:
    """An urgent request of another group waits for mates, however long others have waited; nobody spins meanwhile."""
    sim = Simulation()
    patient = sim.add(0, plain())
    sim.now = 0.008
    urgent = sim.add(1, plain(slot=1, deadline_after_s=0.5))
    sim.now = 0.012
    assert not sim.step(0.0), "the patient one has waited, the urgent one's batch has not"
    assert sim.scheduler.wait_s(sim.now) == pytest.approx(0.006)
    sim.now = 0.0181
    assert sim.scheduler.wait_s(sim.now) == 0.0
    assert sim.step(0.0)
    assert sim.ran == [urgent]
    assert sim.scheduler.wait_s(sim.now) == 0.0
    assert sim.step(0.0)
    assert sim.ran == [urgent, patient]


def test_a_returning_user_pays_for_what_is_new() -> None:
    sim = Simulation()
    cached = []
    for number, (user, window, num_tokens) in enumerate(
        [(1, 0, 10), (1, 0, 13), (1, 0, 12), (1, 0, 13), (1, 1, 12), (0, 0, 8), (2, 0, 8)]
    ):
        state = sim.add(number, plain(user=user, window=window, num_tokens=num_tokens))
        assert sim.step(0.0, is_draining=True)
        cached.append(state.num_cached_tokens)
    # All 10 tokens; of 12 and 13 that are cached all but the last; a moved window finds nothing; users 0 and 2 share 6 tokens.
    assert cached == [0, 10, 11, 12, 0, 0, 6]


def test_the_longest_unused_history_is_evicted_and_those_in_use_never() -> None:
    sim = Simulation()  # 9 pages, a history of 12 tokens takes 3 and leaves them
    for number, user in enumerate([1, 3, 1]):
        sim.add(number, plain(user=user, num_tokens=12))
        assert sim.step(0.0, is_draining=True)
    assert (sim.pages.num_cached, sim.pages.num_evicted) == (6, 0)
    states = [
        sim.add(10, plain(user=1, num_tokens=13)),
        sim.add(11, plain(user=0, num_tokens=17)),
        sim.add(12, plain(user=3, num_tokens=13)),
    ]
    assert sim.step(0.0, is_draining=True)
    # 3 pinned and 1 new page, then 5 of 5: the pages of user 3 made room, and he has to wait.
    assert [len(s.pages) for s in sim.ran[-2:]] == [0, 0]
    assert sim.ran[-2:] == states[:2]
    assert [s.num_cached_tokens for s in states] == [12, 0, 0]
    assert sim.pages.num_evicted == 3
    assert sim.step(0.0, is_draining=True)
    assert states[2].num_cached_tokens == 0


def test_where_pages_are_too_few_to_keep_a_source_its_tokens_are_computed() -> None:
    sim = Simulation()
    sim.add(0, plain(user=1, num_tokens=22))
    assert sim.step(0.0, is_draining=True)
    assert sim.pages.num_cached == 6
    state = sim.add(1, plain(user=1, num_tokens=23))
    held = sim.pages.allocate(3)  # as a batch in flight does
    scheduled = sim.scheduler.schedule(0.0, is_draining=True)
    assert scheduled is not None
    assert (state.num_cached_tokens, scheduled.batch.histories.has_copies) == (20, False)
    assert sim.pages.num_evicted == 1, "the page that would have been copied"
    sim.scheduler.complete(scheduled, output_of(scheduled.batch))
    sim.pages.allocator.free(held)
    sim.queued.clear()
    state = sim.add(2, plain(user=1, num_tokens=24))
    scheduled = sim.scheduler.schedule(0.0, is_draining=True)
    assert scheduled is not None
    assert (state.num_cached_tokens, scheduled.batch.histories.has_copies) == (23, True)
    assert sim.pages.num_in_use == 7, (
        "five that are read, one of its own, and the source until the end"
    )
    sim.scheduler.complete(scheduled, None)
    assert (sim.pages.num_in_use, sim.pages.num_cached) == (0, 6)


def num_named(states: Sequence[RequestState]) -> int:
    """Pages that a fused attention over the batch names: shared ones each time, one for each padding history."""
    num_histories = min(CONFIG.max_batch_histories, 1 << (len(states) - 1).bit_length())
    return sum(len(s.pages) for s in states) + num_histories - len(states)


def test_histories_that_share_pages_name_no_more_than_there_are() -> None:
    """Three of one prompt: 4 pages shared and 3 of their own exist easily, 15 of 10 would be named where that counts."""
    for is_counting, steps in ((True, (3, 4)), (False, (4,))):
        sim = Simulation(is_counting_shared_pages=is_counting)
        sim.add(0, plain(user=1, num_tokens=17))
        assert sim.step(0.0, is_draining=True)
        for number in range(1, 4):
            sim.add(number, plain(user=1, num_tokens=17))
        for num_ran in steps:
            assert sim.step(0.0, is_draining=True)
            assert len(sim.ran) == num_ran


def test_a_full_queue_refuses() -> None:
    sim = Simulation()
    for number in range(CONFIG.max_queue):
        sim.add(number, plain())
    with pytest.raises(Overloaded, match=r"50 requests, scheduler\.max_queue is 50"):
        sim.add(99, plain())
    assert sim.scheduler.num_queued == CONFIG.max_queue
    assert len(sim.scheduler.take_all()) == CONFIG.max_queue
    assert sim.scheduler.num_queued == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_tokens": 25}, r"history: needs 25 tokens.* at most 24; raise scheduler\.max_batch_tokens"),
        ({"num_tokens": 4 * NUM_PAGES}, r"history: needs 10 pages.* at most 9; raise cache\.num_pages"),
        ({"widths": (3, 21)}, r"searches: needs 21 beam rows.* at most 20; raise scheduler\.max_batch_rows"),
    ],
)  # fmt: skip
def test_what_no_batch_could_hold_is_refused_and_blocks_nobody(
    changes: dict[str, object], named: str
) -> None:
    sim = Simulation()
    with pytest.raises(InvalidRequest, match=named):
        sim.add(0, plain(**changes))
    assert sim.scheduler.num_queued == 0
    sim.add(1, plain())
    sim.now = 0.01
    assert sim.step(0.0)


def test_a_failed_batch_forgets_what_it_may_not_have_written() -> None:
    sim = Simulation()
    first = sim.add(0, plain(expression_number=1))
    scheduled = sim.scheduler.schedule(0.0, is_draining=True)
    assert scheduled is not None
    assert [e for _, e in scheduled.batch.groups[0].rule_loads] == [first.searches[0].expression]
    sim.scheduler.complete(scheduled, None)
    sim.queued.clear()
    for has_to_write in (True, False):
        sim.add(1, plain(expression_number=1))
        scheduled = sim.scheduler.schedule(0.0, is_draining=True)
        assert scheduled is not None
        assert bool(scheduled.batch.groups[0].rule_loads) == has_to_write
        sim.scheduler.complete(scheduled, output_of(scheduled.batch))


def test_expired_requests_hear_how_long_they_waited() -> None:
    heard: list[Exception] = []
    state = make_state("late", Pinned(0), arrival_s=1.0, deadline_s=1.25)
    fail_expired([state], 1.25, lambda _, error: heard.append(error))
    (error,) = heard
    assert isinstance(error, DeadlineExceeded)
    assert str(error) == "the deadline passed after 250 ms in the queue"


def test_batches_are_numbered() -> None:
    sim = Simulation()
    numbers = []
    for number in range(3):
        sim.add(number, plain())
        scheduled = sim.scheduler.schedule(0.0, is_draining=True)
        assert scheduled is not None
        sim.scheduler.complete(scheduled, output_of(scheduled.batch))
        numbers.append(scheduled.batch.batch_id)
    assert all(one < two for one, two in itertools.pairwise(numbers))


def test_no_torch_is_needed() -> None:
    code = "import sys; import xgr_runtime.xschedule.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
