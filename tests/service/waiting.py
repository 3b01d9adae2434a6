"""Waiting until something is so, however long the machine takes: a test that guesses a time fails where it guessed wrong."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Nothing here takes a second of a machine's time, but a machine may have none to give for a while.
PATIENCE_S = 60.0
# To start a process that imports torch, and to end one.
PROCESS_S = 180.0
NEVER = "the condition did not become true in time"


async def until(condition: Callable[[], object]) -> None:
    """Return once it is true; the loop goes on meanwhile."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, NEVER
        await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], object], what: Callable[[], object] = lambda: NEVER) -> None:
    """The same for a test without a loop; `what` tells what there was instead."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.002)
