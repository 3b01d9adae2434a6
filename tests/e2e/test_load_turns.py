"""A big request gets its turn among small ones that keep coming, on pools that it fills alone."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.e2e.test_load import POOLS, config_of
from tests.helpers.load import MAX_WIDTH, assert_at_rest
from tests.helpers.waiting import until, wait_until
from tests.service.world import World, make_world
from tests.xschedule.running import TIMEOUT_S, Turnstile
from xgr_runtime import Engine
from xgr_runtime.types import RecRequest, Search

if TYPE_CHECKING:
    from xgr_runtime.xschedule.request import RequestState
    from xgr_runtime.xschedule.scheduler import Scheduled

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


BIG_POOLS = pytest.mark.parametrize("pool", ["rows for one search", "pages for one history"])
PATIENCE_S = 0.3


def small(**options: Any) -> RecRequest:
    """It always fits beside others of its kind."""
    return RecRequest(history_item_ids=np.array([1]), searches=(Search(beam_width=2),), **options)


def big(request_id: str) -> RecRequest:
    """It needs the rows, or the pages, of a whole batch."""
    return RecRequest(
        request_id,
        prompt_token_ids=np.ones(128, np.int64),
        searches=(Search(beam_width=MAX_WIDTH),),
    )


class Overtakings:
    """When, on the engine's clock, batches were made without a request that was in the queue."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self.times_s: list[float] = []
        scheduler = engine._scheduler
        schedule = scheduler.schedule

        def watched(now: float, *, is_draining: bool = False) -> Scheduled | None:
            queued = [state.request.request_id for state in scheduler._queue]
            scheduled = schedule(now, is_draining=is_draining)
            if scheduled is not None and request_id in set(queued) - set(
                scheduled.batch.request_ids
            ):
                self.times_s.append(now)
            return scheduled

        scheduler.schedule = watched  # type: ignore[method-assign]


@BIG_POOLS
def test_a_big_request_does_not_starve_behind_small_ones(world: World, pool: str) -> None:
    """Small ones keep coming and arrive with less time left; when its patience has passed, none runs before the big one."""
    config = config_of(world, *POOLS[pool], f"scheduler.patience_ms={1e3 * PATIENCE_S}")

    async def main(engine: Engine) -> float:
        is_over, num_small = False, 0

        async def caller() -> None:
            nonlocal num_small
            while not is_over:
                request = small(deadline_s=time.monotonic() + 0.25)
                await asyncio.gather(engine.submit(request), return_exceptions=True)
                num_small += 1

        callers = [asyncio.ensure_future(caller()) for _ in range(40)]
        await until(lambda: num_small > 40)
        future = engine.submit_future(big("big"))
        due_s = time.monotonic() + PATIENCE_S  # or a moment before
        assert (await asyncio.wrap_future(future)).results[0].num_valid == MAX_WIDTH
        is_over = True
        await asyncio.gather(*callers)
        return due_s

    with Engine.from_config(config) as engine:
        overtakings = Overtakings(engine, "big")
        due_s = asyncio.run(main(engine))
        assert_at_rest(engine)
    num_late = sum(at_s >= due_s for at_s in overtakings.times_s)
    assert num_late == 0, f"{num_late} batches of small ones ran when the big one was due"


@BIG_POOLS
def test_patience_decides_between_a_big_request_and_small_ones(world: World, pool: str) -> None:
    """Batch by batch, with more small ones before each. Their deadlines are earlier than the one big request is due, and later
    than the other, which came long before them: no time passes here that anything depends on.
    """
    patience_s = 3000.0
    config = config_of(world, *POOLS[pool], f"scheduler.patience_ms={1e3 * patience_s}")
    with Engine.from_config(config) as engine:
        let_arrive_earlier(engine, "due", by_s=patience_s)
        turnstile, scheduler = Turnstile(engine), engine._scheduler
        futures = [engine.submit_future(small())]
        turnstile.wait_for_batch()

        def come(*requests: RecRequest) -> None:
            num_queued = scheduler.num_queued + len(requests)
            futures.extend(map(engine.submit_future, requests))
            wait_until(lambda: scheduler.num_queued == num_queued)

        def hurried(number: int) -> list[RecRequest]:
            return [small(deadline_s=time.monotonic() + patience_s / 2) for _ in range(number)]

        try:
            come(big("patient"))
            for _ in range(5):
                come(*hurried(3))
                assert turnstile.next_batch().request_ids == ("",) * 3
            come(*hurried(3), big("due"))
            assert turnstile.next_batch().request_ids == ("due",)
            assert turnstile.next_batch().request_ids == ("",) * 3
            assert turnstile.next_batch().request_ids == ("patient",)
        finally:
            turnstile.open()
        for future in futures:
            assert future.result(TIMEOUT_S).results[0].num_valid > 0
        assert_at_rest(engine)


def let_arrive_earlier(engine: Engine, request_id: str, by_s: float) -> None:
    """What the engine does with a request that came so long ago."""
    prepare = engine._intake.prepare

    def prepare_earlier(request: RecRequest, now: float) -> RequestState:
        return prepare(request, now - by_s if request.request_id == request_id else now)

    object.__setattr__(engine._intake, "prepare", prepare_earlier)  # it is frozen
