"""`python -m tests.service.serve_faulty FAULT ARGUMENTS`: `xgr serve ARGUMENTS` with a defect of the engine.

idle: its loop dies at SIGUSR1, idle or not; once started it runs no batch, so requests before the signal wait.
batch: its loop dies after SIGUSR1, when its batch has run.
slow-load: the first catalogue is loaded as ever, the next ones never end.
held=FILE: none; batches are kept from the device while there is that file.
"""

from __future__ import annotations

import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.helpers.product import watch_batches
from xgr_runtime import Engine
from xgr_runtime.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

start = Engine.start


def defect(*_: object) -> None:
    raise SystemError("beyond repair")


def die_idle(engine: Engine) -> None:
    scheduler: Any = engine._scheduler
    is_broken = False

    def schedule(*_: object, **options: object) -> None:
        if is_broken:
            defect()

    def on_signal(*_: object) -> None:
        nonlocal is_broken
        is_broken = True
        with engine._wake:
            engine._wake.notify_all()

    scheduler.schedule, scheduler.wait_s = schedule, lambda now: None
    signal.signal(signal.SIGUSR1, on_signal)


def die_in_batch(engine: Engine) -> None:
    scheduler: Any = engine._scheduler

    def on_signal(*_: object) -> None:
        scheduler.complete = defect

    signal.signal(signal.SIGUSR1, on_signal)


def load_slowly(engine: Engine) -> None:
    def load(name: str, path: str) -> str:
        sys.stderr.write(f"loading {path}\n")
        sys.stderr.flush()
        matrix = torch.ones(300, 300)
        while True:  # in native code most of the time, as a load is
            matrix = matrix @ matrix / 300

    patched: Any = engine
    patched.load_catalog = load


def hold_batches(file: Path, engine: Engine) -> None:
    def wait(_: object) -> None:
        while file.exists():
            time.sleep(0.002)

    watch_batches(engine, before=wait)


FAULTS: dict[str, Callable[[Engine], None]] = {
    "idle": die_idle,
    "batch": die_in_batch,
    "slow-load": load_slowly,
}

if __name__ == "__main__":
    fault, _, file = sys.argv[1].partition("=")
    add_fault = partial(hold_batches, Path(file)) if fault == "held" else FAULTS[fault]

    def start_with_fault(engine: Engine) -> None:
        start(engine)
        add_fault(engine)

    whole: Any = Engine
    whole.start = start_with_fault
    sys.exit(main(["serve", *sys.argv[2:]]))
