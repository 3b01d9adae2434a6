"""Stop signals before, during and after serving: what they do, and whose handler is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.service.waiting import PATIENCE_S
from xgr_runtime.service.stop_signals import (
    EXIT_AT_ONCE,
    EXIT_CUT_OFF,
    STOP_SIGNALS,
    StopSignals,
    exiting_before_serving,
)

ROOT = Path(__file__).resolve().parents[2]


def test_sigterm_raises_an_exit_without_a_failure() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, exiting_before_serving():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_else_is_raised_inside_leaves_the_handler_of_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), exiting_before_serving():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("second", ["SIGHUP", "SIGTERM"])
def test_a_terminal_that_closes_during_the_start_is_a_sigterm(second: str) -> None:
    code = """
import signal, sys, threading
from xgr_runtime.service.stop_signals import exiting_before_serving
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with exiting_before_serving():
    try:
        signal.raise_signal(signal.SIGHUP)
    except SystemExit as end:
        assert end.code == 0
    signal.raise_signal(signal.{second})
    threading.Event().wait()
"""
    assert run(code.format(second=second)) == EXIT_AT_ONCE


def test_an_ignored_sighup_stays_ignored() -> None:
    """As `nohup` leaves it to the process: before serving, while it serves, and afterwards."""
    code = """
import asyncio, signal, sys
from xgr_runtime.service.stop_signals import StopSignals, exiting_before_serving
signal.signal(signal.SIGHUP, signal.SIG_IGN)

async def serve():
    with StopSignals(lambda: sys.exit(9)) as signals:
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0.05)
        signals.exit_from_now()
        signal.raise_signal(signal.SIGHUP)

with exiting_before_serving():
    signal.raise_signal(signal.SIGHUP)
    asyncio.run(serve())
signal.raise_signal(signal.SIGHUP)
"""
    assert run(code) == 0


def run(code: str) -> int:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode


def test_a_second_one_ends_the_process_whatever_it_waits_for() -> None:
    code = """
import signal, threading
from xgr_runtime.service.stop_signals import exiting_before_serving
with exiting_before_serving():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGTERM)
        threading.Event().wait()
"""
    assert run(code) == EXIT_AT_ONCE


SERVING = """
import asyncio, os, signal, sys, threading
from xgr_runtime.service.stop_signals import STOP_SIGNALS, StopSignals, exiting_before_serving
signal.signal(signal.SIGHUP, signal.SIG_DFL)

async def serve():
    seen = []
    with StopSignals(lambda: seen.append(1)) as signals:
        for number in STOP_SIGNALS:
            # From another thread, while the loop sleeps: nothing but the signal wakes it.
            timer = threading.Timer(0.1, os.kill, (os.getpid(), number))
            timer.start()
            count = len(seen)
            while len(seen) == count:
                await asyncio.sleep(0 if timer.is_alive() else 1e-3)
        {end}

with exiting_before_serving():
    asyncio.run(serve())
for number in STOP_SIGNALS:
    signal.raise_signal(number)
"""


def test_a_process_that_has_nothing_left_to_do_ends_as_it_would() -> None:
    assert run(SERVING.format(end="signals.ignore_from_now()")) == 0


def test_a_process_that_has_cut_off_requests_ends_at_the_next_signal() -> None:
    assert run(SERVING.format(end="signals.exit_from_now()")) == EXIT_CUT_OFF


def test_the_handlers_of_before_are_back_when_serving_fails() -> None:
    async def serve() -> None:
        with StopSignals(lambda: None):
            assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
            raise ZeroDivisionError

    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(ZeroDivisionError):
        asyncio.run(serve())
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_signal_wakes_a_loop_that_waits() -> None:
    async def serve() -> None:
        heard = asyncio.Event()
        with StopSignals(heard.set):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            await asyncio.wait_for(heard.wait(), PATIENCE_S)

    asyncio.run(serve())
