"""Running engines held still: a gate before the worker, and waiting for a condition without guessing a time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from tests.helpers.product import watch_batches

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.helpers.engines import (
        Oracle,
    )
    from xgr_runtime import Engine
    from xgr_runtime.xschedule.batch import Batch

VOCAB = 48
TIMEOUT_S = 60.0
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
            assert self._is_open.wait(TIMEOUT_S)

        watch_batches(engine, before=hold)

    def wait_for_batch(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT_S)

    def open(self) -> None:
        self._is_open.set()


def history(oracle: Oracle, first: int = 0) -> list[int]:
    return [item.item_id for item in oracle.catalog.items[first : first + 3]]


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def is_idle(engine: Engine) -> bool:
    described = engine.describe()
    pins = sum(
        v["num_pins"] for c in described["catalogs"].values() for v in c["versions"].values()
    )
    return (described["num_unanswered"], pins, engine.pages.num_in_use) == (0, 0, 0)
