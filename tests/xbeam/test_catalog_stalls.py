"""What a server does with a file before it serves it must not keep the interpreter's lock: requests run beside it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import build_catalog

if TYPE_CHECKING:
    from pathlib import Path

NUM_ITEMS = 300_000
TRIES = 25
MOST_MS = 8.0


def worst_lateness_ms(path: Path) -> float:
    """How late a thread that sleeps shortly woke at the worst while a file was opened, verified and prepared.

    In time that the loading thread was at work: while the machine gives it none, it keeps no lock from anybody.
    """
    stop, late = threading.Event(), [0.0]
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def sleep() -> None:
        while not stop.is_set():
            start, worked = time.perf_counter(), time.clock_gettime(clock)
            time.sleep(2e-4)
            worked = time.clock_gettime(clock) - worked
            late.append(min(time.perf_counter() - start, worked) - 2e-4)

    thread = threading.Thread(target=sleep)
    thread.start()
    with Catalog.open(path, is_private=True) as catalog:
        catalog.verify()
        catalog.prepare()
    stop.set()
    thread.join()
    return 1e3 * max(late)


def test_a_load_does_not_keep_the_interpreters_lock(tmp_path: Path) -> None:
    """The best of many tries: other processes delay any of them, the lock would delay all."""
    rng = np.random.default_rng(0)
    build_catalog(
        tmp_path / "c",
        sids=rng.integers(0, 512, (NUM_ITEMS, 3), np.int32),
        keys=(f"key-{row}" for row in range(NUM_ITEMS)),
        titles=(f"Der Titel der Zeile {row}, für alle, auch „so“" for row in range(NUM_ITEMS)),
        tags={f"tag:{tag}": rng.integers(0, NUM_ITEMS, NUM_ITEMS // 10) for tag in range(20)},
        num_codes=[512] * 3,
        token_offsets=[0, 512, 1024],
    )
    best = MOST_MS
    for _ in range(TRIES):
        best = min(best, worst_lateness_ms(tmp_path / "c"))
        if best < MOST_MS:
            break
    assert best < MOST_MS
