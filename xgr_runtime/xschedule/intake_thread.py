"""The thread that prepares requests, in the order in which they came.

A pool of one thread would do, but makes a future, a lock and a work item of its own for every request; here callers wait for
that.
"""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from xgr_runtime.types import RecRequest, RecResult
from xgr_runtime.xschedule.request import settle

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

Asked: TypeAlias = list[RecRequest]
Prepare: TypeAlias = Callable[[Asked, "Future[RecResult]", float], None]


class IntakeThread:
    """Calls `prepare` with what it is given; its thread starts with the first. `put` and `close` are called under one lock."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._given: SimpleQueue[tuple[Asked, Future[RecResult], float] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="xgr-intake", daemon=True)

    def put(self, asked: Asked, future: "Future[RecResult]", arrival_s: float) -> None:
        """Prepare a request after all that were given before."""
        if self._thread.ident is None:
            self._thread.start()
        self._given.put((asked, future, arrival_s))

    def close(self) -> None:
        """Nothing is given any more; may be called twice."""
        self._given.put(None)

    def join(self) -> None:
        """Wait until everything that was given is prepared and the thread has ended. After `close`, without the lock."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            asked, future, arrival_s = given
            try:
                self._prepare(asked, future, arrival_s)
            except Exception as error:
                # Requests behind it are not to wait for ever, nor is whoever asked.
                logger.exception("a request could not be prepared")
                if not future.done():
                    settle(future, error)
            # The last request is not kept until the next one comes.
            del given, asked, future
