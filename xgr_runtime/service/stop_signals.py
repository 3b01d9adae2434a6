"""SIGTERM before and after serving; while it serves, the server has its own handlers.

Before: a container's first process ignores every signal that it has no handler for, so a stop that comes while the model
loads would be lost and end as a kill. After: everything was answered, and a signal that comes while the device is closed
must not turn that into a failure.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

EXIT_AT_ONCE = 128 + signal.SIGTERM


@contextmanager
def exiting_at_sigterm() -> Iterator[None]:
    """Inside, until the server has its own handlers, SIGTERM raises SystemExit(0): nothing was accepted, so nothing is lost.

    A second one ends the process at once. The handler of before is back only when what is inside raises.
    """
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    except BaseException:
        signal.signal(signal.SIGTERM, before)
        raise


def ignore_stop_signals() -> None:
    """For a process that has nothing left to do but to end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    signal.signal(number, _exit_at_once)
    raise SystemExit(0)


def _exit_at_once(_: int, __: FrameType | None) -> NoReturn:
    os._exit(EXIT_AT_ONCE)
