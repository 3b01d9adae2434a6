"""The engine's loop: the thread that owns the device.

It schedules and issues a batch, and while the device works it issues the next one and completes the one before, up to
`scheduler.max_batches_in_flight`. One thread does it all, since no step of it waits for the device but where nothing else is
to be done. A next batch that is not full is issued just before the device needs it.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from select import select
from typing import TYPE_CHECKING

from xgr_runtime.config import RuntimeConfig
from xgr_runtime.errors import DeviceLost, EngineClosed, release_frames
from xgr_runtime.hal.device import Device
from xgr_runtime.models.base import RecModel
from xgr_runtime.types import RecResult
from xgr_runtime.xschedule.batch import Batch, BatchOutput
from xgr_runtime.xschedule.engine_parts import build_parts
from xgr_runtime.xschedule.forecast import LEAD_S, Forecast
from xgr_runtime.xschedule.in_flight import InFlight, Issued, Running
from xgr_runtime.xschedule.intake_thread import Asked, Given, prepare_one
from xgr_runtime.xschedule.kernel_search import STEP_S
from xgr_runtime.xschedule.request import RequestState, settle
from xgr_runtime.xschedule.results import build_results
from xgr_runtime.xschedule.scheduler import Scheduled, fail_expired
from xgr_runtime.xschedule.totals import Totals
from xgr_runtime.xschedule.warm_up import WarmUp

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

OnBatch = Callable[[Batch, BatchOutput], None]
POLL_S = 2e-5
LATE_S = 8e-5  # about what the system adds to every sleep
MOST_POLL_S = 5e-4  # however far the end is said to be
# Asked without a pause from so long before its time, so that no sleep goes past it, to so long after, since the copies of a batch
# are no part of that time. A sleeping thread would answer late by most of LATE_S, a fiftieth of a short batch.
WATCH_BEFORE_S, WATCH_AFTER_S = 1e-4, 1.5e-4
OVERDUE_S = 0.1  # by so much nobody knows when it is done: a slow device, or one that is stuck


class EngineLoop:
    """What the loop works on, and its steps. `Engine` feeds it and runs `_loop` on a thread.

    The queue, what runs and the totals are shared with other threads and changed under `_wake` alone. `_given` is appended to
    under it, and emptied by the loop.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        device: Device,
        model: RecModel,
        model_version: str,
        on_batch: OnBatch | None,
    ) -> None:
        self._on_batch = on_batch
        self.config, self.device, self.model_version = config, device, model_version
        parts = build_parts(config, device, model, model_version)
        self.runner, self.pages, self.catalogs = parts.runner, parts.pages, parts.catalogs
        self.worker = parts.worker
        self._template, self._rule_cache = parts.template, parts.rule_cache
        self.warm_up = WarmUp(
            config,
            device,
            self.worker.run,
            self.runner,
            self.worker.graphs,
            self.catalogs.active_slots,
        )
        self._intake, self._scheduler = parts.intake, parts.scheduler
        self._wake = threading.Condition()
        self._num_coming = 0  # requests that are being prepared
        self._is_taking = False  # the loop waits for requests, and prepares quick ones itself
        self._given: deque[Given] = deque()
        self._totals = Totals()
        self._running = Running()
        self._in_flight = InFlight(config.scheduler.max_batches_in_flight)
        self._forecast = Forecast()
        self._is_starting = False
        self._is_draining = False
        self._is_closed = False
        self._failure: BaseException | None = None
        self._stop_waiters: list[Future[None]] = []

    def _loop(self) -> None:
        try:
            while not self._is_closed:
                self._prepare_given()
                for issued in self._in_flight.take_finished():
                    self._complete(issued)
                self._capture_more()
                scheduled = self._next_batch()
                if scheduled is not None:
                    self._issue(scheduled)
            while self._in_flight:
                self._complete(self._in_flight.take())
            self._fail(EngineClosed("the engine closed before the request could run"))
        except BaseException as error:
            logger.exception("the engine loop failed")
            try:
                self._give_up()
            finally:
                self._fail(error)
        finally:
            while self._given:  # the engine is closed or has failed: refused
                self._prepare_given()

    def _prepare(self, asked: Asked, future: "Future[RecResult]", arrival_s: float) -> None:
        raise NotImplementedError  # the engine's

    def _prepare_given(self) -> None:
        """Prepare what was given to this thread, as far as one batch may hold it: others come all the time."""
        for _ in range(self.config.scheduler.max_batch_histories):
            if not self._given:
                return
            prepare_one(self._prepare, self._given.popleft())

    def _capture_more(self) -> None:
        """One step of the captures that somebody waits for, with no batch on the way but while kernels are compiled."""
        if not self.warm_up.is_pending:
            return
        if self.warm_up.is_compiling:
            self.warm_up.step(0.0)
            return
        while self._in_flight:
            self._complete(self._in_flight.take())
        self.warm_up.step()

    def _next_batch(self) -> Scheduled | None:
        """A batch to issue. Where there is none, waits for something to happen, and gives none."""
        with self._wake:
            if self._is_closed:
                return None
            now = time.monotonic()
            is_idle = not self._in_flight
            free_s = -math.inf if is_idle else self._forecast.end_s() - LEAD_S
            self._scheduler.expect(free_s, is_company_coming=self._num_coming > 0)
            expired = self._scheduler.expire(now)
            if not expired:
                is_last = self._is_draining or self._is_starting  # nobody else comes
                scheduled = self._scheduler.schedule(now, is_draining=is_last)
                if scheduled is not None:
                    self._is_taking = False
                    self._running.add(scheduled)
                    return scheduled
                if self._given:
                    return None
                self._is_taking = is_idle
                wait_s = self._scheduler.wait_s(now) if is_idle else self._poll_s(now)
                if self.warm_up.is_compiling:
                    wait_s = STEP_S if wait_s is None else min(wait_s, STEP_S)
                    self._wake.wait(wait_s)
                elif (is_idle or wait_s != 0.0) and not self.warm_up.is_pending:
                    self._wake.wait(wait_s)
        if expired:
            fail_expired(
                expired, time.monotonic(), lambda state, error: settle(state.future, error)
            )
        elif not is_idle and wait_s == 0.0:
            self._watch_oldest()
        return None

    def _poll_s(self, now: float) -> float:
        """A device does not say when it is done: it is asked, more often the nearer the end is, since asking takes the host's
        time from whoever prepares requests. 0 where it is about to be done."""
        left_s = self._forecast.oldest_end_s() - now
        if left_s < -OVERDUE_S:
            return MOST_POLL_S
        if -WATCH_AFTER_S < left_s < WATCH_BEFORE_S:
            return 0.0
        return min(max((left_s - WATCH_BEFORE_S - LATE_S) / 2, POLL_S), MOST_POLL_S)

    def _watch_oldest(self) -> None:
        """Until the oldest batch is done or late, or a request is queued."""
        oldest, num_queued = self._in_flight.oldest, self._scheduler.num_queued
        end_s = self._forecast.oldest_end_s() + WATCH_AFTER_S
        while time.monotonic() < end_s and not oldest.pending.is_done():
            if self._scheduler.num_queued != num_queued:
                return
            select((), (), (), 0)  # at once, but others may have the interpreter meanwhile

    def _issue(self, scheduled: Scheduled) -> None:
        """Give a batch to the device. One that fails fails its own requests only, a lost device all."""
        start_s, num_captures = time.monotonic(), self.worker.graphs.num_captures
        try:
            pending = self.worker.submit(scheduled.batch)
        except DeviceLost:
            self._give_back(scheduled, None)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the callers must hear of it
            self._end_failed(scheduled, error, start_s)
            return
        self._in_flight.add(Issued(scheduled, pending, start_s, num_captures))
        self._forecast.issued(scheduled.batch, self.worker.begun_s)

    def _complete(self, issued: Issued) -> None:
        """Wait for a batch and settle its futures. One that fails fails its own requests only, a lost device all."""
        scheduled = issued.scheduled
        batch, states = scheduled.batch, scheduled.states
        output: BatchOutput | None = None
        try:
            try:
                output = issued.pending.wait()
            finally:
                end_s = time.monotonic()
                # A capture is no usual time.
                is_usual = self.worker.graphs.num_captures == issued.num_captures
                self._forecast.ended(end_s, output.times if output and is_usual else None)
            if self._on_batch is not None:
                self._on_batch(batch, output)
            results = self._results(scheduled, output, end_s)
        except DeviceLost:
            self._give_back(scheduled, None)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the callers must hear of it
            self._end_failed(scheduled, error, issued.start_s)
            return
        with self._wake:
            now = time.monotonic()
            self._totals.add(batch, output, states, results, now - issued.start_s)
            if is_usual:
                self._scheduler.note_run(now - states[0].start_s)
        self._give_back(scheduled, output)
        self._end_batch(scheduled, results)

    def _results(self, scheduled: Scheduled, output: BatchOutput, end_s: float) -> list[RecResult]:
        template = self._template.version
        return build_results(scheduled, output, end_s, self.model_version, template)

    def _end_failed(self, scheduled: Scheduled, error: Exception, start_s: float) -> None:
        """Give back what a failed batch held and fail its requests."""
        batch, states = scheduled.batch, scheduled.states
        ids = batch.request_ids
        logger.error(
            "batch %d failed: %s",
            batch.batch_id,
            ", ".join(ids),
            exc_info=error,
            extra={"request_ids": ids},
        )
        release_frames(error)
        with self._wake:
            self._totals.add_failed(batch, states, time.monotonic() - start_s)
        self._give_back(scheduled, None)
        self._end_batch(scheduled, [error] * len(states))

    def _end_batch(self, scheduled: Scheduled, outcomes: Sequence[RecResult | Exception]) -> None:
        for state, outcome in zip(scheduled.states, outcomes, strict=True):
            settle(state.future, outcome)
        with self._wake:
            self._running.remove(scheduled)
            self._wake.notify_all()

    def _give_up(self) -> None:
        """Give back what the batches in flight hold, when the device reads it no more; the loop has died."""
        with suppress(RuntimeError):  # of a device that has failed: it reads nothing any more
            self.device.synchronize()
        while self._in_flight:
            try:
                self._give_back(self._in_flight.take().scheduled, None)
            # The loop is dead already: one batch that cannot be given back must not keep the others' from it.
            except Exception:
                logger.exception("a batch in flight could not be given back")

    def _give_back(self, scheduled: Scheduled, output: BatchOutput | None) -> None:
        """Pages, rows and pinned versions of a batch, as `Scheduler.complete` says."""
        with self._wake:
            self._scheduler.complete(scheduled, output)
        for state in scheduled.states:
            self._release(state)

    def _release(self, state: RequestState) -> None:
        for search in state.searches:
            self.catalogs.release(search.pinned)  # type: ignore[arg-type]

    def _fail(self, error: BaseException) -> None:
        """Fail everything that waits, and what was running when the loop died; used when the loop ends."""
        with self._wake:
            self._is_taking = False
            if not isinstance(error, EngineClosed):
                self._failure = error
            states = [*self._running.take_all(), *self._scheduler.take_all()]
            stop_waiters, self._stop_waiters = self._stop_waiters, []
            self._wake.notify_all()
        self.warm_up.fail(EngineClosed(str(error)))
        for state in states:
            if not state.future.done():
                settle(state.future, EngineClosed(str(error)))
        for waiter in stop_waiters:
            settle(waiter, None)
