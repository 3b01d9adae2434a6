"""Requests of a storm that are given up while they wait inside the engine, on a machine of any speed.

A deadline that counts from the start of a storm may have passed before its request is sent, and a call that is cancelled
early may never leave the client. Here the engine holds its first batch until every one of these requests is in its queue and
has been given up there: its deadline, which the engine is told when the request comes, has passed, or its caller, who hears
that it came, has gone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from tests.helpers.load import STORM_S, Shot
from tests.xschedule.running import Gate
from xgr_runtime.errors import DeadlineExceeded
from xgr_runtime.types import RecResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from tests.helpers.load import Content
    from xgr_runtime import Engine
    from xgr_runtime.types import RecRequest

LATE, GONE = "late", "gone"


def with_leavers(shots: Sequence[Shot], contents: Sequence[Content], number: int) -> list[Shot]:
    """The storm with so many of either kind ahead of it. Theirs are good requests: nothing else may end them."""
    good = [content for content in contents if not content.is_bad]
    kinds = [(LATE, GONE)[i % 2] for i in range(2 * number)]
    ahead = [Shot(good[i % len(good)], None, None, kind) for i, kind in enumerate(kinds)]
    return [*ahead, *shots]


class Leavers:
    """Holds an engine until those of a storm are gone. `ended`: how they ended in the engine; `on_arrival`: whom to call then."""

    def __init__(self, engine: Engine, shots: Sequence[Shot]) -> None:
        """A request of its own runs before the storm, in the batch that is held."""
        self.kinds = {f"r{number}": shot.leaves for number, shot in enumerate(shots) if shot.leaves}
        self.ended: Counter[str] = Counter()
        self.on_arrival: dict[str, Callable[[], object]] = {}
        self._num_passed = threading.Semaphore(0)
        self._submit, self._gate = engine._submit, Gate(engine)
        self._first = engine.submit_future(next(s.content.request for s in shots if s.leaves))
        self._gate.wait_for_batch()
        engine._submit = self._submitted  # type: ignore[method-assign]
        self._holding = threading.Thread(target=self._hold, daemon=True)
        self._holding.start()

    def _submitted(self, request: RecRequest, *, is_patient: bool) -> Future[RecResult]:
        kind = self.kinds.get(request.request_id, "")
        if kind == LATE:
            request = dataclasses.replace(request, deadline_s=time.monotonic() + 1e-3)
        future = self._submit(request, is_patient=is_patient)
        if kind:
            future.add_done_callback(lambda future: self._note(kind, future))
        if kind == GONE:
            asyncio.get_running_loop().call_soon(self.on_arrival[request.request_id])
        elif kind == LATE:
            self._num_passed.release()
        return future

    def _note(self, kind: str, future: Future[RecResult]) -> None:
        if kind == GONE and future.cancelled():
            self.ended[GONE] += 1
            self._num_passed.release()
        elif kind == LATE and not future.cancelled():
            self.ended[LATE] += isinstance(future.exception(), DeadlineExceeded)

    def _hold(self) -> None:
        """Until each has come, and is cancelled or its millisecond has passed; a storm that takes too long fails by itself."""
        end_s = time.monotonic() + STORM_S
        for _ in self.kinds:
            self._num_passed.acquire(timeout=max(0.0, end_s - time.monotonic()))
        time.sleep(2e-3)
        self._gate.open()

    def check(self, outcomes: Sequence[RecResult | BaseException]) -> None:
        """Each ended as it was given up, in the engine and for its caller, and the one ahead of them was answered."""
        assert self.ended == Counter(self.kinds.values()), self.ended
        for request_id, kind in self.kinds.items():
            outcome = outcomes[int(request_id[1:])]
            if kind == GONE:
                assert isinstance(outcome, asyncio.CancelledError), outcome
            else:
                assert isinstance(outcome, DeadlineExceeded), outcome
                assert "in the queue" in str(outcome), "the engine's words, not the client's"
        assert isinstance(self._first.result(STORM_S), RecResult)
