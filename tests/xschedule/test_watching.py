"""The end of a batch is watched for without a pause, for a short time that is known beforehand."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.engines import make_engine
from xgr_runtime.xschedule.engine_loop import (
    LATE_S,
    MOST_POLL_S,
    OVERDUE_S,
    POLL_S,
    WATCH_AFTER_S,
    WATCH_BEFORE_S,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xgr_runtime import Engine, RuntimeConfig


class Asked:
    """A batch on its way that says how often it was asked, and is done when asked for the `done_at`th time."""

    def __init__(self, done_at: int) -> None:
        self.num_asked, self._done_at = 0, done_at

    def is_done(self) -> bool:
        self.num_asked += 1
        return self.num_asked >= self._done_at


@pytest.fixture
def idle(config: RuntimeConfig) -> Iterator[Engine]:
    """Not started: its loop's steps are called here."""
    engine = make_engine(config)
    yield engine
    engine.close()


def end_in(engine: Engine, seconds: float) -> float:
    """The oldest batch is said to end so long from now; now."""
    now = time.monotonic()
    forecast: Any = SimpleNamespace(oldest_end_s=lambda: now + seconds)
    engine._forecast = forecast
    return now


@pytest.mark.parametrize(
    "seconds",
    [60.0, 1e-2, 1e-3, 2e-4, 1.1 * WATCH_BEFORE_S, -1.1 * WATCH_AFTER_S, -0.9 * OVERDUE_S],
)
def test_far_from_the_end_the_loop_sleeps(idle: Engine, seconds: float) -> None:
    wait_s = idle._poll_s(end_in(idle, seconds))
    assert POLL_S <= wait_s <= MOST_POLL_S
    if seconds > 0:
        assert wait_s <= max(POLL_S, (seconds - LATE_S) / 2)
        assert wait_s + LATE_S < seconds, "it does not sleep past the end"


@pytest.mark.parametrize("seconds", [1.1 * OVERDUE_S, 3600.0])
def test_a_device_that_is_stuck_is_asked_now_and_then(idle: Engine, seconds: float) -> None:
    assert idle._poll_s(end_in(idle, -seconds)) == MOST_POLL_S


@pytest.mark.parametrize("seconds", [0.9 * WATCH_BEFORE_S, 0.0, -0.9 * WATCH_AFTER_S])
def test_near_the_end_it_does_not(idle: Engine, seconds: float) -> None:
    assert idle._poll_s(end_in(idle, seconds)) == 0.0


def watch(engine: Engine, batch: Asked) -> None:
    in_flight: Any = SimpleNamespace(oldest=SimpleNamespace(pending=batch))
    engine._in_flight = in_flight
    engine._watch_oldest()


def test_it_ends_when_the_batch_does(idle: Engine) -> None:
    end_in(idle, 1e9)
    batch = Asked(done_at=20)
    watch(idle, batch)
    assert batch.num_asked == 20


def test_it_ends_when_the_batch_is_late(idle: Engine) -> None:
    start_s = end_in(idle, 0.01)
    watch(idle, Asked(done_at=10**9))
    assert time.monotonic() - start_s >= 0.01 + WATCH_AFTER_S
    end_in(idle, -1.0)
    batch = Asked(done_at=10**9)
    watch(idle, batch)
    assert batch.num_asked == 0


def test_it_ends_when_a_request_is_queued(idle: Engine) -> None:
    end_in(idle, 1e9)
    counts = iter([0, 0, 0, 1])
    scheduler: Any = type("Scheduler", (), {"num_queued": property(lambda _: next(counts))})()
    idle._scheduler = scheduler
    batch = Asked(done_at=10**9)
    watch(idle, batch)
    assert batch.num_asked == 3
