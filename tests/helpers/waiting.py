"""Waiting until something is so, however long the machine takes: a test that guesses a time fails where it guessed wrong."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime import Engine

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


def is_idle(engine: Engine) -> bool:
    """Whether nothing is unanswered, pinned or held in pages."""
    described = engine.describe()
    pins = sum(
        v["num_pins"] for c in described["catalogs"].values() for v in c["versions"].values()
    )
    return (described["num_unanswered"], pins, engine.pages.num_in_use) == (0, 0, 0)


def wait_until_idle(engine: Engine) -> None:
    """Until it is idle, which it is a moment after its last answer; so it is with the request that an engine's start runs."""
    wait_until(lambda: is_idle(engine), engine.describe)
