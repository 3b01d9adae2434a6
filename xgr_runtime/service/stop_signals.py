"""SIGTERM, ctrl-C and a terminal that closes (SIGHUP) before, during and after serving.

Before: a container's first process ignores every signal that it has no handler for, so a stop that comes while the model
loads would be lost and end as a kill. After: everything was answered, and a signal that comes while the device is closed
must not turn that into a failure.

asyncio's own handlers are not used: it takes them away by setting the default, which kills, so that a process that has answered
everyone would end as a failure if a signal came in that moment. Here one handler replaces the other.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
EXIT_AT_ONCE = 128 + signal.SIGTERM
EXIT_CUT_OFF = 1


@contextmanager
def exiting_before_serving() -> Iterator[None]:
    """Inside, until the server has its own handlers, SIGTERM and SIGHUP raise SystemExit(0): nothing was accepted yet.

    A second one ends the process at once. The handlers of before are back only when what is inside raises. Ctrl-C stays Python's.
    """
    numbers = [number for number in STOP_SIGNALS if number != signal.SIGINT]
    before = {number: signal.signal(number, _exit) for number in _heard(numbers)}
    try:
        yield
    except BaseException:
        for number, handler in before.items():
            signal.signal(number, handler)
        raise


class StopSignals:
    """Inside, each stop signal calls `on_signal` in the running loop, which must be the main thread's.

    Afterwards the handlers are those that `ignore_from_now` or `exit_from_now` chose, else those of before.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._afterwards: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._loop = asyncio.get_running_loop()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._loop.add_reader(self._reader, self._read)
        # Python writes the number of every signal there, in whichever thread it arrives, which wakes the loop.
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._afterwards = {number: signal.signal(number, _wake) for number in _heard(STOP_SIGNALS)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._afterwards.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._loop.remove_reader(self._reader)
        self._reader.close()
        self._writer.close()

    def ignore_from_now(self) -> None:
        """For a process that has nothing left to do but to end."""
        self._leave(signal.SIG_IGN)

    def exit_from_now(self) -> None:
        """The next one ends the process at once, as one that has cut off requests."""
        self._leave(_exit_cut_off)

    def _leave(self, handler: Any) -> None:
        for number in self._afterwards:
            signal.signal(number, handler)
            self._afterwards[number] = handler

    def _read(self) -> None:
        for number in self._reader.recv(4096):
            if number in self._afterwards:
                self._on_signal()


def _heard(numbers: Iterable[int]) -> list[int]:
    """Without SIGHUP where it is ignored: `nohup` does that for processes that outlive their terminal."""
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in numbers if not (is_kept and number == signal.SIGHUP)]


def _wake(_: int, __: FrameType | None) -> None:
    """The loop hears of the signal through its socket."""


def _exit(_: int, __: FrameType | None) -> NoReturn:
    for stop in STOP_SIGNALS:
        if signal.getsignal(stop) is _exit:
            signal.signal(stop, _exit_at_once)
    raise SystemExit(0)


def _exit_at_once(_: int, __: FrameType | None) -> NoReturn:
    os._exit(EXIT_AT_ONCE)


def _exit_cut_off(_: int, __: FrameType | None) -> NoReturn:
    os._exit(EXIT_CUT_OFF)
