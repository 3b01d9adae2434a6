"""`python -m tests.e2e.serve_breaking CONFIG`: `xgr serve` whose engine loop dies after SIGUSR1, when its batch has run."""

import signal
import sys
from typing import Any

from xgr_runtime import Engine
from xgr_runtime.cli import main

start = Engine.start


def break_at_signal(engine: Engine) -> None:
    """Start the engine; from SIGUSR1 on its scheduler raises when a batch is to be completed, as a defect would."""
    start(engine)
    scheduler: Any = engine._scheduler

    def complete(*_: object) -> None:
        raise SystemError("beyond repair")

    def on_signal(*_: object) -> None:
        scheduler.complete = complete

    signal.signal(signal.SIGUSR1, on_signal)


if __name__ == "__main__":
    patched: Any = Engine
    patched.start = break_at_signal
    sys.exit(main(["serve", "--config", sys.argv[1], "--log-level", "error"]))
