"""SIGTERM before serving: what it raises, what the second one does, and whose handler is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from xgr_runtime.service.stop_signals import EXIT_AT_ONCE, exiting_at_sigterm

ROOT = Path(__file__).resolve().parents[2]


def test_sigterm_raises_an_exit_without_a_failure() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, exiting_at_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_else_is_raised_inside_leaves_the_handler_of_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), exiting_at_sigterm():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before


def run(code: str) -> int:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode


def test_a_second_one_ends_the_process_whatever_it_waits_for() -> None:
    code = """
import signal, threading
from xgr_runtime.service.stop_signals import exiting_at_sigterm
with exiting_at_sigterm():
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGTERM)
        threading.Event().wait()
"""
    assert run(code) == EXIT_AT_ONCE


def test_a_process_that_has_nothing_left_to_do_ends_as_it_would() -> None:
    code = """
import signal
from xgr_runtime.service.stop_signals import exiting_at_sigterm, ignore_stop_signals
with exiting_at_sigterm():
    ignore_stop_signals()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.raise_signal(number)
"""
    assert run(code) == 0
