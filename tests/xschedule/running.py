"""Running engines held still: a gate before the worker, and batches that stay on the device. What is waited with: tests/helpers/waiting.py."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tests.helpers.product import watch_batches
from tests.helpers.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.helpers.engines import (
        Oracle,
    )
    from xgr_runtime import Engine
    from xgr_runtime.types import RecRequest, RecResult
    from xgr_runtime.xschedule.batch import Batch, BatchOutput
    from xgr_runtime.xschedule.worker import PendingBatch

VOCAB = 48
TIMEOUT_S = 60.0
# Longer than any wait of a test for something behind the gate: the test's own wait says what was missing.
HELD_S = 2 * TIMEOUT_S
NEVER_OPENED = "the test did not let go of what it holds"
QUEUE = 6


class Gate:
    """Holds every batch before it is issued until `open`; `entered` counts the batches that came."""

    def __init__(self, engine: Engine) -> None:
        self._is_open = threading.Event()
        self.entered = threading.Semaphore(0)
        self.batches: list[Batch] = []

        def hold(batch: Batch) -> None:
            self.batches.append(batch)
            self.entered.release()
            assert self._hold(), NEVER_OPENED

        watch_batches(engine, before=hold)

    def _hold(self) -> bool:
        return self._is_open.wait(HELD_S)

    def wait_for_batch(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT_S)

    def open(self) -> None:
        self._is_open.set()


class Turnstile(Gate):
    """A gate that lets batches pass one by one until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self._permits = threading.Semaphore(0)
        super().__init__(engine)

    def _hold(self) -> bool:
        return self._is_open.is_set() or self._permits.acquire(timeout=HELD_S)

    def next_batch(self) -> Batch:
        """Lets the one that is held pass; the next one, which is held now."""
        self._permits.release()
        self.wait_for_batch()
        return self.batches[-1]

    def open(self) -> None:
        super().open()
        self._permits.release()


def recommend_behind_one(engine: Engine, requests: Sequence[RecRequest]) -> list[RecResult]:
    """Answers to requests of which the first runs alone, and all others are queued before it does: their batches are as full
    as the limits allow.
    """
    gate = Gate(engine)
    try:
        futures = [engine.submit_future(requests[0])]
        gate.wait_for_batch()
        futures += map(engine.submit_future, requests[1:])
        wait_until(lambda: engine._scheduler.num_queued == len(requests) - 1)
    finally:
        gate.open()
    return [future.result(TIMEOUT_S) for future in futures]


def history(oracle: Oracle, first: int = 0) -> list[int]:
    return [item.item_id for item in oracle.catalog.items[first : first + 3]]


class HeldBatch:
    """A batch that the device is at work on until the test says otherwise."""

    def __init__(self, pending: PendingBatch) -> None:
        self._pending = pending
        self._is_released = threading.Event()
        self._error: Exception | None = None

    def release(self, error: Exception | None = None) -> None:
        """The device is done with it, or has failed."""
        self._error = error or self._error
        self._is_released.set()

    def is_done(self) -> bool:
        return self._is_released.is_set()

    def wait(self) -> BatchOutput:
        assert self._is_released.wait(HELD_S), NEVER_OPENED
        output = self._pending.wait()
        if self._error is not None:
            raise self._error
        return output


class Held:
    """An accelerator as the engine sees it: what is issued stays on it until it is released, or all of it by `open`."""

    def __init__(self, engine: Engine) -> None:
        self.batches: list[Batch] = []
        self.pending: list[HeldBatch] = []
        self._is_open = False
        self._submit = engine.worker.submit
        engine.worker.submit = self._hold  # type: ignore[method-assign, assignment]

    def _hold(self, batch: Batch) -> HeldBatch:
        held = HeldBatch(self._submit(batch))
        self.batches.append(batch)
        self.pending.append(held)
        if self._is_open:
            held.release()
        return held

    def wait_for(self, num_batches: int) -> None:
        """Until so many batches have been issued."""
        wait_until(lambda: len(self.pending) >= num_batches)

    def open(self) -> None:
        """Whatever was issued and will be is done at once."""
        self._is_open = True
        for held in list(self.pending):
            held.release()
