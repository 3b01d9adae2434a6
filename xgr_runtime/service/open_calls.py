"""The calls of a service that are open, so that a server that stops can end them.

gRPC would cancel them with a traceback each, and their callers would learn CANCELLED: the runtime's own client takes that for
UNAVAILABLE, others for no reason to try elsewhere.
Whoever handles a call asks `is_ended` when it is cancelled: then the server stops, and the call is answered; else its caller has gone.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OpenCalls:
    """Tasks that handle calls, of one loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_ended = False

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def including_this(self) -> Iterator[None]:
        """Inside, the running task is one of them."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def end(self) -> int:
        """Cancel them, and mark those that come later as late; returns their number."""
        self.is_ended = True
        for task in self._tasks:
            task.cancel()
        return len(self._tasks)
