"""The engine: one model on one device. It queues requests, runs batches on its own thread, resolves futures.

Requests are prepared (checked, rendered, rules resolved) on an intake thread, so neither the caller's event loop nor
the device waits for a new tag expression; quick ones on the loop thread while it has nothing to do. The device belongs to the
loop thread, see `engine_loop`.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import numpy as np
import torch

from xgr_runtime.config import RuntimeConfig
from xgr_runtime.errors import (
    ConfigError,
    EngineClosed,
    InvalidRequest,
    NotFound,
    Overloaded,
)
from xgr_runtime.hal.device import Device
from xgr_runtime.hal.discovery import open_device
from xgr_runtime.hal.registry import REFERENCE
from xgr_runtime.models.base import RecModel
from xgr_runtime.models.registry import load_model
from xgr_runtime.models.version import checkpoint_digest
from xgr_runtime.types import RecRequest, RecResult, Search
from xgr_runtime.xschedule.catalogs import LoadedCatalog
from xgr_runtime.xschedule.engine_loop import EngineLoop, OnBatch
from xgr_runtime.xschedule.engine_stats import EngineStats, describe
from xgr_runtime.xschedule.intake_thread import Given, IntakeThread, is_quick
from xgr_runtime.xschedule.request import RequestState, settle
from xgr_runtime.xschedule.totals import Totals

logger = logging.getLogger(__name__)


class Engine(EngineLoop):
    """Use `Engine.from_config(config)` as a context manager, or call `start` and `close`.

    on_batch: told on the loop thread what each batch that ran has given, before its futures are settled.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        device: Device,
        model: RecModel,
        model_version: str,
        *,
        on_batch: OnBatch | None = None,
    ) -> None:
        super().__init__(config, device, model, model_version, on_batch)
        self._num_waiting = 0
        self._intake_thread = IntakeThread(self._prepare)
        self._thread: threading.Thread | None = None
        for name, path in config.catalogs.items():
            self.activate_catalog(name, self.load_catalog(name, path))

    @classmethod
    def from_config(
        cls,
        config: RuntimeConfig,
        device: Device | None = None,
        *,
        on_batch: OnBatch | None = None,
    ) -> "Engine":
        """Open the device, load the model and the catalogues. Raises ConfigError, DeviceError, CheckpointError, CatalogError."""
        if device is None:
            opened = open_device(config.device)
            for kind, reason in opened.passed_over:
                logger.warning("device auto: %s is not used: %s", kind, reason)
            device = opened.device
        if config.cpu_threads and device.torch_device.type == "cpu":
            torch.set_num_threads(config.cpu_threads)
        if not config.model.path:
            raise ConfigError("model.path must name a Hugging Face model directory")
        model = load_model(
            config.model.path, device.torch_device, getattr(torch, config.model.dtype)
        )
        version = config.model.version or checkpoint_digest(config.model.path)
        return cls(config, device, model, version, on_batch=on_batch)

    def start(self) -> None:
        """Start the loop thread, capture its graphs and run one small batch per catalogue, so that what cannot run fails here.

        The totals start after those batches.
        Whatever that batch raises (OpUnavailable, for one) closes the engine again.
        """
        if self._thread is not None:
            return
        self._is_starting = True  # its batches wait for no company
        self._thread = threading.Thread(target=self._loop, name="xgr-engine", daemon=True)
        self._thread.start()
        prompt = np.zeros(1, dtype=np.int64)
        try:
            self._capture(self.catalogs.pin_all(), is_first=True)
            for name in self.config.catalogs:
                search = Search(catalog=name)
                self.recommend([RecRequest("warm-up", prompt_token_ids=prompt, searches=(search,))])
            with self._wake:
                self._is_starting = False
                self._totals = Totals()
                self._scheduler.usual_run_s = 0.0
                self._forecast.forget()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Engine":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def submit(self, request: RecRequest) -> RecResult:
        """Queue a request and wait for its result; cancelling the waiting task gives everything back.

        Raises InvalidRequest, NotFound, Overloaded, DeadlineExceeded, EngineClosed.
        """
        return await asyncio.wrap_future(self.submit_future(request))

    async def wait_stopped(self) -> None:
        """Return once the engine serves no more, closed or because its loop died; cancelling ends the wait."""
        waiter: Future[None] = Future()
        with self._wake:
            if self._is_closed or self._failure is not None:
                return
            self._stop_waiters.append(waiter)
        await asyncio.wrap_future(waiter)

    def submit_future(self, request: RecRequest) -> "Future[RecResult]":
        """Queue a request; the future holds its result or one of the errors of `submit`."""
        return self._submit(request, is_patient=False)

    def _submit(self, request: RecRequest, *, is_patient: bool) -> "Future[RecResult]":
        """A full queue is waited for (is_patient) or refused."""
        future: Future[RecResult] = Future()
        with self._wake:
            self._check_open()
            while self._num_waiting >= self.config.scheduler.max_queue:
                if not is_patient:
                    raise Overloaded(
                        f"{self._num_waiting} requests are waiting, scheduler.max_queue is "
                        f"{self.config.scheduler.max_queue}; send it again later"
                    )
                self._wake.wait()
                self._check_open()
            # Cancelled requests stay in the queue until somebody comes to them, in any number: emptied.
            asked = [request]
            # Inside the lock, where `close` sets its flag and closes the queue, and which preparing takes to count down.
            self._give((asked, future, time.monotonic()), request)
            self._num_waiting += 1
            self._num_coming += 1

        def on_end(_: object) -> None:
            asked.clear()
            self._stop_waiting()

        future.add_done_callback(on_end)
        return future

    def _give(self, given: Given, request: RecRequest) -> None:
        """To the loop where that waits for requests and this one is quick, else to the intake thread; with the lock.

        The loop gets a batch at most: while it prepares more, nothing is issued.
        """
        if len(self._given) >= self.config.scheduler.max_batch_histories:
            self._is_taking = False
        if self._is_taking and not self.warm_up.is_pending and is_quick(request):
            self._given.append(given)
            self._wake.notify_all()
        else:
            self._intake_thread.put(given)

    def recommend(self, requests: Sequence[RecRequest]) -> list[RecResult]:
        """Answer requests in order, blocking. More than the queue holds are fed as it empties."""
        self._expect_company(1)  # until the last one is there, so that they share batches
        try:
            futures = [self._submit(request, is_patient=True) for request in requests]
        finally:
            self._expect_company(-1)
        return [future.result() for future in futures]

    def load_catalog(self, name: str, path: str) -> str:
        """Load a compiled catalogue beside the running version; returns its version. A bad file changes nothing.

        Where its slot is new, its graphs are captured between batches before this returns. Raises EngineClosed when the engine
        ends meanwhile.
        """
        capacities = self.runner.capacities
        version = self.catalogs.load(name, path, capacities.num_levels, capacities.num_rows)
        logger.info("catalogue %s: loaded version %s from %s", name, version, path)
        self._capture_for(name, version)
        return version

    def _capture_for(self, name: str, version: str) -> None:
        """Capture what a version lacks, beside traffic. One for which that fails runs with those that it has, op by op where
        it has none, which the log says; they are tried again when it is activated.

        Raises EngineClosed when the engine ends meanwhile.
        """
        try:
            self._capture([self.catalogs.pin(name, version)])
        except NotFound:  # unknown, or retired meanwhile
            return
        except EngineClosed:
            raise
        # Whatever a capture raises, the version is loaded and answers op by op; its activation tries again.
        except Exception:
            logger.exception("catalogue %s: version %s lacks graphs", name, version)

    def _capture(self, pinned: Sequence[LoadedCatalog], *, is_first: bool = False) -> None:
        """Have the loop capture what is missing for these versions, and wait for it. Raises what that has raised."""
        try:
            with self._wake:
                if self._thread is None or self._is_closed or self._failure is not None:
                    return
                future = self.warm_up.begin(pinned) if is_first else self.warm_up.ask(pinned)
                self._wake.notify_all()
            future.result()
        finally:
            for loaded in pinned:
                self.catalogs.release(loaded)

    def activate_catalog(self, name: str, version: str) -> str:
        """Use a loaded version for new requests; the version before, which is returned, stays loaded for a roll-back.

        Graphs that it lacks, since they had to make room or could not be captured, are captured before. Raises NotFound,
        EngineClosed.
        """
        loaded = self.catalogs.pin(name, version)
        try:
            # Kept until it is active: another load may ask for room meanwhile.
            with self.warm_up.keeping(loaded.slot_index) as has_gaps:
                if has_gaps:
                    self._capture_for(name, version)
                before = self.catalogs.activate(name, version)
        finally:
            self.catalogs.release(loaded)
        logger.info("catalogue %s: version %s is active", name, version)
        return before

    def retire_catalog(self, name: str, version: str) -> None:
        """Free a loaded version that is neither active nor in use."""
        self.catalogs.retire(name, version)

    def reset_prefix_cache(self) -> int:
        """Forget every cached history that no running batch reads; returns how many pages that freed."""
        with self._wake:
            return self.pages.reset()

    def describe(self) -> dict[str, Any]:
        """Device, model, catalogues, bound providers, totals since the start and the queue, as plain data."""
        return describe(self.stats(), self.catalogs.describe(), self.runner.sizes.describe())

    def stats(self) -> EngineStats:
        """The state and the totals at this moment; may be called from any thread, also after `close`."""
        memory = self.device.memory()
        providers = {name: tuple(sorted(set(p))) for name, p in dict(self.runner.providers).items()}
        with self._wake:
            running = [state for state in self._running.states if not state.future.done()]
            return EngineStats(
                device_kind=self.device.kind,
                device_name=self.device.name,
                model=self.config.model.name,
                model_version=self.model_version,
                template_version=self._template.version,
                totals=self._totals.copy(),
                num_waiting=self._num_waiting - len(running),
                num_running=len(running),
                num_pages=self.pages.allocator.num_pages - 1,
                num_pages_in_use=self.pages.num_in_use,
                num_cached_pages=self.pages.num_cached,
                num_evicted_pages=self.pages.num_evicted,
                num_rows=self.runner.capacities.num_rows,
                num_rows_in_use=self._running.num_rows,
                catalogs=self.catalogs.stats(),
                providers=providers,
                num_reference_ops=sum(REFERENCE in p for p in providers.values()),
                num_graph_captures=self.worker.graphs.num_captures,
                num_graphs=self.worker.graphs.num_graphs,
                num_eager_segments=self.worker.graphs.num_eager,
                graph_bytes=self.worker.graphs.num_bytes,
                memory_used_bytes=memory.used_bytes,
                memory_peak_bytes=memory.peak_bytes,
            )

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the accepted ones; False when some are left after `timeout_s`."""
        end = time.monotonic() + timeout_s
        with self._wake:
            self._is_draining = True
            self._wake.notify_all()
            while self._num_waiting or self._running:
                left = end - time.monotonic()
                if left <= 0 or self._failure is not None:
                    return False
                self._wake.wait(left)
        return True

    def close(self) -> None:
        """Refuse new requests, fail what still waits with EngineClosed, stop the threads. May be called twice."""
        with self._wake:
            self._is_draining = self._is_closed = True
            self._intake_thread.close()
            self._wake.notify_all()
        self._intake_thread.join()
        # Not alive when a signal interrupted its start: it then ends by itself.
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def _expect_company(self, number: int) -> None:
        """So many more requests are on their way to the queue."""
        with self._wake:
            self._num_coming += number
            self._wake.notify_all()

    def _prepare(
        self, asked: list[RecRequest], future: "Future[RecResult]", arrival_s: float
    ) -> None:
        try:
            request = asked.pop()
        except IndexError:  # cancelled meanwhile
            self._expect_company(-1)
            return
        if self._is_closed:  # closing does not wait for what would be refused afterwards
            self._expect_company(-1)
            settle(future, EngineClosed("the engine closed before the request could run"))
            return
        try:
            state = self._intake.prepare(request, arrival_s)
        except BaseException as error:  # noqa: BLE001 - whatever it is, a caller's own object may raise it, and he must hear of it
            self._expect_company(-1)
            settle(future, error)
            return
        state.future = future
        refusal: Exception | None = None
        with self._wake:
            self._num_coming -= 1
            if self._is_closed or self._failure is not None:
                refusal = EngineClosed("the engine closed before the request could run")
            else:
                try:
                    self._scheduler.add(state)
                except (Overloaded, InvalidRequest) as error:
                    refusal = error
                self._wake.notify_all()
        # After `add`: a future that was cancelled meanwhile runs the callback at once, which takes it out again.
        future.add_done_callback(lambda _: self._end(state))
        if refusal is not None:
            settle(future, refusal)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineClosed(f"the engine stopped: {self._failure!r}") from self._failure
        if self._is_draining or self._thread is None:
            raise EngineClosed("the engine is closed or not started and accepts no requests")

    def _stop_waiting(self) -> None:
        with self._wake:
            self._num_waiting -= 1
            self._wake.notify_all()

    def _end(self, state: RequestState) -> None:
        """Runs once per request, whatever its end: result, error or cancellation.

        A request of a batch keeps its version pinned until the batch ends, even when it is cancelled before.
        """
        with self._wake:
            is_held_by_batch = state.is_scheduled
            if not is_held_by_batch:
                self._scheduler.discard(state)
        if not is_held_by_batch:
            self._release(state)
