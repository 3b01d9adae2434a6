"""`python -m tests.e2e.serve_held ARGUMENTS`: `xgr serve ARGUMENTS` with an engine that issues no batch from SIGUSR1 to SIGUSR2.

So calls that came in between are in flight for as long as a test wants, on whatever machine.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from xgr_runtime import Engine
from xgr_runtime.cli import main

if TYPE_CHECKING:
    from xgr_runtime.xschedule.batch import Batch

start = Engine.start


def start_with_gate(engine: Engine) -> None:
    start(engine)
    may_issue, submit = threading.Event(), engine.worker.submit
    may_issue.set()

    def held(batch: Batch) -> Any:
        may_issue.wait()
        return submit(batch)

    engine.worker.submit = held  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda *_: may_issue.clear())
    signal.signal(signal.SIGUSR2, lambda *_: may_issue.set())


if __name__ == "__main__":
    whole: Any = Engine
    whole.start = start_with_gate
    sys.exit(main(["serve", *sys.argv[1:]]))
