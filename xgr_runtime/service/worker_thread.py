"""One thread that runs one function after the other and holds up nobody's end.

Python joins the threads of an executor when it ends, so a process that has answered everyone would live on for work that nobody
waits for: a catalogue may take minutes to load. This thread is a daemon. Python ends a daemon when it next comes back from native
code, which some native code answers with an abort, so a process that ends while one is at work leaves with `leave_work`.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar

END_S = 2.0  # longer than the log's own wait
Result = TypeVar("Result")


class WorkerThread(threading.Thread):
    """Runs what it is given, in order. Only for work that may end at any point: nothing that writes to disk."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.is_at_work = False

    def submit(self, function: Callable[[], Result]) -> "Future[Result]":
        """What `function` returns or raises; cancelling works until it begins. Call it from one thread."""
        if self.ident is None:
            self.start()
        future: Future[Result] = Future()
        self._queue.put((future, function))
        return future

    def close(self) -> None:
        """End the thread after what it was given; does not wait."""
        self._queue.put(None)

    def run(self) -> None:
        """The thread itself."""
        while (entry := self._queue.get()) is not None:
            future, function = entry
            if future.set_running_or_notify_cancel():
                self.is_at_work = True
                _run(future, function)
                self.is_at_work = False
            del entry, future, function


def _run(future: "Future[Any]", function: Callable[[], Any]) -> None:
    try:
        result = function()
    except BaseException as error:  # noqa: BLE001 - whatever it is, who waits for it must hear of it
        future.set_exception(error)
    else:
        future.set_result(result)


def leave_work(exit_code: int) -> None:
    """End the process now if a WorkerThread is at work; else return, and the process ends as any other."""
    if any(isinstance(one, WorkerThread) and one.is_at_work for one in threading.enumerate()):
        end_process(exit_code)


def end_process(exit_code: int) -> NoReturn:
    """End now, without Python's own end, which aborts the process where threads are inside native code.

    Output that nobody reads is waited for END_S seconds.
    """
    flushing = threading.Thread(target=_flush, name="xgr-end", daemon=True)
    flushing.start()
    flushing.join(END_S)
    os._exit(exit_code)


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
