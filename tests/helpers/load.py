"""Storms of requests over gRPC, what may come of each, and the same requests sent alone as their oracle.

Requests are drawn from a limited set of contents, so that the oracle answers each once: an engine with the same files and
roomy limits, one request at a time. An answer has to have the same rows, and scores that differ by rounding alone; where
the lists differ, the same-answer rule against transformers decides.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.helpers.catalogs import TAGS
from tests.helpers.product import watch_batches
from tests.service.servers import running
from xgr_runtime.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
)
from xgr_runtime.service.client import AsyncRecommendClient
from xgr_runtime.types import NORMALIZATIONS, RecRequest, RecResult, Rules, Search

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from tests.helpers.oracle import Item
    from tests.service.world import World
    from xgr_runtime import Engine
    from xgr_runtime.xschedule.scheduler import Scheduled

TOLERANCE = 1e-4
STORM_S = 120.0
MAX_LENGTH = 24
MAX_WIDTH = 64


@dataclass(frozen=True)
class Content:
    """What one kind of request asks: its history, and the request without id and deadline. is_bad: it must be refused."""

    history: list[Item]
    request: RecRequest
    is_bad: bool = False


@dataclass(frozen=True)
class Shot:
    """One request of a storm. deadline_s and cancel_after_s count from the start of the storm. leaves: see leavers.py."""

    content: Content
    deadline_s: float | None
    cancel_after_s: float | None
    leaves: str = ""


def make_contents(world: World, rng: np.random.Generator, count: int) -> list[Content]:
    """Random widths, rules, normalisations and histories; histories of one user grow from one content to the next."""
    items = world.catalog.items
    users = [[items[i] for i in rng.integers(len(items), size=40)] for _ in range(6)]
    rules = [
        Rules(),
        Rules(),
        Rules(exclude_history=True),
        Rules(require=((TAGS[0], TAGS[1]), (TAGS[2],))),
        Rules(exclude_tags=(TAGS[3],)),
        Rules(exclude_tags=(TAGS[4], TAGS[1]), exclude_history=True),
        Rules(exclude_item_ids=np.array([i.item_id for i in items[:60]], np.int64)),
    ]
    contents = []
    for number in range(count):
        user = users[int(rng.integers(len(users)))]
        history = user[: int(rng.integers(0, MAX_LENGTH + 1))]
        widths = tuple(rng.integers(1, MAX_WIDTH + 1, 3).tolist())
        if rng.random() < 0.2:
            widths = (MAX_WIDTH,) * 3
        search = Search(
            beam_widths=widths,
            normalization=NORMALIZATIONS[int(rng.integers(3))],
            rules=rules[int(rng.integers(len(rules)))],
        )
        request = RecRequest(
            history_item_ids=np.array([i.item_id for i in history], np.int64), searches=(search,)
        )
        contents.append(Content(history, request))
        if number % 12 == 0:
            contents.append(Content(history, _broken(request, number // 12), is_bad=True))
    return contents


def _broken(request: RecRequest, number: int) -> RecRequest:
    """Breaks the contract in one of four ways, each of them something that could never fit or be found."""
    (search,) = request.searches
    wide = dataclasses.replace(search, beam_widths=(3, MAX_WIDTH + 1, 3))
    lost = dataclasses.replace(search, catalog_version="never loaded")
    long = np.ones(129, np.int64)
    return [
        dataclasses.replace(request, searches=(wide,)),
        dataclasses.replace(request, history_item_ids=None, prompt_token_ids=long),
        dataclasses.replace(request, searches=(lost,)),
        dataclasses.replace(request, searches=(dataclasses.replace(search, beam_widths=(3,)),)),
    ][number % 4]


def make_shots(contents: Sequence[Content], rng: np.random.Generator, count: int) -> list[Shot]:
    """A storm: a tenth has hardly any time, a tenth enough of it, and an eighth is given up by its caller.

    Some of either when they are sent, and never inside the engine: those who are, on any machine, are in leavers.py.
    """
    shots, horizon_s = [], count / 500  # about what the answers take
    for _ in range(count):
        content = contents[int(rng.integers(len(contents)))]
        kind, deadline_s = rng.random(), None
        if kind < 0.1:
            deadline_s = float(rng.random() * horizon_s) if kind > 0.02 else 0.0
        elif kind < 0.2:
            deadline_s = STORM_S
        kind, cancel_after_s = rng.random(), None
        if kind < 0.125:
            cancel_after_s = float(rng.random() * horizon_s) if kind > 0.02 else 0.0
        shots.append(Shot(content, deadline_s, cancel_after_s))
    return shots


@dataclass
class TickWatch:
    """Counts ticks of a scheduler that had requests, nothing to wait for, and still scheduled nothing."""

    num_ticks: int = 0
    num_skipped: int = 0

    @classmethod
    def on(cls, engine: Engine) -> TickWatch:
        watch, scheduler = cls(), engine._scheduler
        schedule = scheduler.schedule

        def watched(now: float, *, is_draining: bool = False) -> Scheduled | None:
            scheduled = schedule(now, is_draining=is_draining)
            watch.num_ticks += 1
            watch.num_skipped += scheduled is None and scheduler.wait_s(now) == 0.0
            return scheduled

        scheduler.schedule = watched  # type: ignore[method-assign]
        return watch


def hold_until_refused(engine: Engine, number: int) -> None:
    """No batch is issued before so many requests have found the queue full."""
    submit, is_enough, num_refused = engine._submit, threading.Event(), 0

    def counted(request: RecRequest, *, is_patient: bool) -> Future[RecResult]:
        nonlocal num_refused
        try:
            return submit(request, is_patient=is_patient)
        except Overloaded:
            num_refused += 1
            if num_refused == number:
                is_enough.set()
            raise

    def hold(_: object) -> None:
        assert is_enough.wait(STORM_S), f"{num_refused} requests were refused"

    engine._submit = counted  # type: ignore[method-assign]
    watch_batches(engine, before=hold)


async def storm(
    engine: Engine, shots: Sequence[Shot], on_arrival: dict[str, Callable[[], object]] | None = None
) -> list[RecResult | BaseException]:
    """Send all shots at once over one connection; every call ends within STORM_S, or this raises TimeoutError.

    on_arrival: gets by request id what cancels the call.
    """
    async with (
        running(engine, engine.config) as (server, target),
        AsyncRecommendClient(target, timeout_s=STORM_S) as client,
    ):
        start_s = time.monotonic()

        async def send(number: int, shot: Shot) -> RecResult | BaseException:
            deadline_s = None if shot.deadline_s is None else start_s + shot.deadline_s
            request = dataclasses.replace(
                shot.content.request, request_id=f"r{number}", deadline_s=deadline_s
            )
            call = asyncio.ensure_future(client.recommend(request))
            if on_arrival is not None:
                on_arrival[request.request_id] = call.cancel
            if shot.cancel_after_s is not None:
                call.get_loop().call_later(shot.cancel_after_s, call.cancel)
            (outcome,) = await asyncio.gather(call, return_exceptions=True)
            return outcome

        sends = [send(number, shot) for number, shot in enumerate(shots)]
        outcomes = await asyncio.wait_for(asyncio.gather(*sends), STORM_S)
        while server.servicer.num_in_flight:  # calls whose caller is gone end a moment later
            assert time.monotonic() < start_s + STORM_S
            await asyncio.sleep(0.01)
        return outcomes


@dataclass
class Alone:
    """The oracle: each content answered once by an engine that does nothing else."""

    world: World
    engine: Engine
    answers: dict[int, RecResult] = field(default_factory=dict)
    num_compared: int = 0
    num_identical: int = 0

    def check(self, content: Content, got: RecResult) -> None:
        """Raises unless `got` is the content's answer."""
        if id(content) not in self.answers:
            (self.answers[id(content)],) = self.engine.recommend([content.request])
        expected = self.answers[id(content)]
        (one,), (two,) = got.results, expected.results
        assert (one.status, one.reason, one.beam_widths) == (
            two.status,
            two.reason,
            two.beam_widths,
        )
        assert (one.catalog, one.catalog_version) == (two.catalog, two.catalog_version)
        assert got.num_prompt_tokens == expected.num_prompt_tokens
        self.num_compared += 1
        if one.item_ids.tolist() == two.item_ids.tolist():
            self.num_identical += 1
            np.testing.assert_allclose(one.scores, two.scores, atol=TOLERANCE)
            assert np.array_equal(one.sids, two.sids)
            assert (one.keys, one.num_valid) == (two.keys, two.num_valid)
        else:
            self.world.check(content.request, content.history, one)


def check_outcomes(
    shots: Sequence[Shot], outcomes: Sequence[RecResult | BaseException], alone: Alone
) -> Counter[str]:
    """Every outcome is the right answer or a proper status for what was sent; counts by name."""
    counts: Counter[str] = Counter()
    for number, (shot, outcome) in enumerate(zip(shots, outcomes, strict=True)):
        counts[type(outcome).__name__] += 1
        if isinstance(outcome, RecResult):
            assert not shot.content.is_bad, shot
            assert outcome.request_id == f"r{number}"
            alone.check(shot.content, outcome)
        elif isinstance(outcome, (InvalidRequest, NotFound)):
            assert shot.content.is_bad, (shot, outcome)
        elif isinstance(outcome, DeadlineExceeded):
            assert shot.leaves or shot.deadline_s not in (None, STORM_S), (shot, outcome)
        elif isinstance(outcome, asyncio.CancelledError):
            assert shot.leaves or shot.cancel_after_s is not None, (shot, outcome)
        else:
            assert isinstance(outcome, Overloaded), (shot, outcome)
    return counts


def assert_at_rest(engine: Engine) -> None:
    """Before long nothing is coming, queued, held or pinned; pages and rule rows add up."""
    end_s = time.monotonic() + 60
    while _held(engine):
        assert time.monotonic() < end_s, _held(engine)
        time.sleep(0.01)
    engine.pages.check_conservation()
    for loaded in engine.catalogs.by_slot.values():
        table = loaded.rule_rows
        rows = [*table._rows.values(), *table._free, *table._forgotten]
        assert sorted(rows) == list(range(1, loaded.slot.num_rule_rows)), "rule rows are lost"
        assert not any(table._num_uses.values()), "a rule row is held by no batch"


def _held(engine: Engine) -> dict[str, Any]:
    held = {
        "coming": engine._num_coming,
        "queued": engine._scheduler.num_queued,
        "waiting": engine.describe()["num_unanswered"],
        "pages": engine.pages.num_in_use,
        "running": len(engine._running.states),
        "pins": sum(loaded.num_pins for loaded in engine.catalogs.by_slot.values()),
    }
    return {name: count for name, count in held.items() if count}
