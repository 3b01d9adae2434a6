"""`python -m tests.service.serve_dying CONFIG`: `xgr serve` whose engine loop dies at SIGUSR1, idle or not.

Once it has started no batch is run: requests before the signal wait.
"""

import signal
import sys
from typing import Any

from xgr_runtime import Engine
from xgr_runtime.cli import main

start = Engine.start


def die_at_signal(engine: Engine) -> None:
    """Start the engine; from SIGUSR1 on its scheduler raises, as a defect would."""
    start(engine)
    scheduler: Any = engine._scheduler
    is_broken = False

    def schedule(*_: object, **options: object) -> None:
        if is_broken:
            raise SystemError("beyond repair")

    def on_signal(*_: object) -> None:
        nonlocal is_broken
        is_broken = True
        with engine._wake:
            engine._wake.notify_all()

    scheduler.schedule, scheduler.wait_s = schedule, lambda now: None
    signal.signal(signal.SIGUSR1, on_signal)


if __name__ == "__main__":
    patched: Any = Engine
    patched.start = die_at_signal
    sys.exit(main(["serve", "--config", sys.argv[1]]))
