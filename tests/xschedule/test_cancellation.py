"""Cancelling a request at any moment of its life frees its place, and takes nothing from the others."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.engines import (
    Oracle,
    request_of,
)
from xgr_runtime.errors import (
    Overloaded,
)

if TYPE_CHECKING:
    from pathlib import Path

    from xgr_runtime import Engine
    from xgr_runtime.types import RecRequest, RecResult

from tests.helpers.waiting import wait_until, wait_until_idle
from tests.xschedule.running import QUEUE, TIMEOUT_S, Gate, history


def test_cancelling_a_queued_request_frees_its_place(
    engine: Engine, gate: Gate, oracle: Oracle
) -> None:
    running = engine.submit_future(request_of("running", history(oracle)))
    gate.wait_for_batch()
    queued = [engine.submit_future(request_of(f"q{i}", history(oracle))) for i in range(QUEUE - 1)]
    wait_until(lambda: engine._scheduler.num_queued == QUEUE - 1)
    with pytest.raises(Overloaded):
        engine.submit_future(request_of("refused", history(oracle)))
    assert queued[2].cancel()
    accepted = engine.submit_future(request_of("accepted", history(oracle)))
    gate.open()
    assert accepted.result(TIMEOUT_S).results[0].num_items == 10
    assert running.result(TIMEOUT_S)
    with pytest.raises(CancelledError):
        queued[2].result(TIMEOUT_S)
    for future in (*queued[:2], *queued[3:]):
        assert future.result(TIMEOUT_S)
    assert all("q2" not in batch.request_ids for batch in gate.batches)
    wait_until_idle(engine)


def test_cancelling_a_running_request_keeps_its_mates_and_its_version(
    engine: Engine, gate: Gate, oracle: Oracle, tmp_path: Path
) -> None:
    first = engine.submit_future(request_of("first", history(oracle)))
    gate.wait_for_batch()
    gone = engine.submit_future(request_of("gone", history(oracle)))
    mate = engine.submit_future(request_of("mate", history(oracle)))
    wait_until(lambda: engine._scheduler.num_queued == 2)
    assert first.cancel()
    assert engine.pages.num_in_use > 0, "the batch still runs on its pages"
    (version,) = engine.describe()["catalogs"]["main"]["versions"].values()
    assert version["num_pins"] == 3, "and on its version"
    gate.open()
    gate.wait_for_batch()
    gone.cancel()
    assert mate.result(TIMEOUT_S).results[0].num_items == 10
    with pytest.raises(CancelledError):
        first.result(TIMEOUT_S)
    wait_until_idle(engine)


def test_cancelling_before_it_is_prepared(engine: Engine, oracle: Oracle) -> None:
    prepare = engine._intake.prepare
    entered, go_on = threading.Event(), threading.Event()

    def slow(request: RecRequest, now: float) -> object:
        entered.set()
        assert go_on.wait(TIMEOUT_S)
        return prepare(request, now)

    object.__setattr__(engine._intake, "prepare", slow)
    in_intake = engine.submit_future(request_of("in intake", history(oracle)))
    behind = engine.submit_future(request_of("behind", history(oracle)))
    assert entered.wait(TIMEOUT_S)
    assert in_intake.cancel()
    assert behind.cancel()
    go_on.set()
    wait_until_idle(engine)
    object.__setattr__(engine._intake, "prepare", prepare)
    assert engine.recommend([request_of("after", history(oracle))])


def test_a_storm_of_cancellations(engine: Engine, oracle: Oracle) -> None:
    """Cancelled at any moment by another thread: each future ends once, nothing is lost."""
    rng = np.random.default_rng(0)
    alone = {n: engine.recommend([request_of("", history(oracle, n))])[0] for n in range(5)}
    futures: list[tuple[int, Future[RecResult]]] = []
    for turn in range(120):
        n = turn % 5
        try:
            futures.append((n, engine.submit_future(request_of(str(turn), history(oracle, n)))))
        except Overloaded:
            time.sleep(0.002)
        if futures and rng.random() < 0.6:
            futures[int(rng.integers(len(futures)))][1].cancel()
    num_answered = 0
    for n, future in futures:
        try:
            got = future.result(TIMEOUT_S)
        except CancelledError:
            continue
        num_answered += 1
        assert got.results[0].item_ids.tolist() == alone[n].results[0].item_ids.tolist()
    assert num_answered > 0
    wait_until_idle(engine)


def test_cancelling_the_awaiting_task_frees_everything(
    engine: Engine, gate: Gate, oracle: Oracle
) -> None:
    async def main() -> None:
        running = asyncio.create_task(engine.submit(request_of("running", history(oracle))))
        await asyncio.to_thread(gate.wait_for_batch)
        queued = asyncio.create_task(engine.submit(request_of("queued", history(oracle))))
        while engine._scheduler.num_queued != 1:
            await asyncio.sleep(0.001)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        assert engine._scheduler.num_queued == 0
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.submit(request_of("slow", history(oracle))), 0.02)

    asyncio.run(main())
    gate.open()
    wait_until_idle(engine)
    assert engine.recommend([request_of("after", history(oracle))])
