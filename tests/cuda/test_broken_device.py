"""A run whose device is lost in the middle ends with the test that lost it, and the helper for waits leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.cuda.waiting import no_waiting

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = """
from tests.cuda.broken_device import EndWithBrokenDevice
from xgr_runtime.hal.cpu import CpuDevice

class Breakable(CpuDevice):
    is_lost = False

    def synchronize(self):
        if self.is_lost:
            raise RuntimeError("an illegal memory access")

DEVICE = Breakable()
DEVICE.name = "a device"

def pytest_configure(config):
    config.pluginmanager.register(EndWithBrokenDevice(DEVICE))
"""
TESTS = """
from conftest import DEVICE

def test_wrong():
    assert not DEVICE.name

def test_fatal():
    DEVICE.is_lost = True
    DEVICE.synchronize()

def test_after():
    assert False, "never runs"
"""


def test_the_run_ends_with_the_test_that_broke_the_device(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    command += ["-c", str(ROOT / "pyproject.toml"), f"--confcutdir={tmp_path}"]
    command += [f"--rootdir={tmp_path}"]
    # Whatever other plugins are installed there, and whether this run is spread over processes.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    lost = "test_it.py::test_fatal broke a device: RuntimeError: an illegal memory access"
    assert f"{lost}; this process ends" in done.stdout
    assert f"Exit: {lost}" in done.stdout
    assert "2 failed" in done.stdout
    assert "never runs" not in done.stdout


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str | int]:
    """The modes that were set. Setting one warns as torch does: afterwards."""
    seen: list[str | int] = [0]

    def note(mode: str | int) -> None:
        seen.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", note)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: seen[-1])
    return seen


def nothing() -> None:
    """The block ends by itself."""


def wait() -> None:
    raise RuntimeError("called a synchronizing CUDA operation")


@pytest.mark.parametrize("block", [nothing, wait])
def test_the_mode_that_was_is_set_again(modes: list[str | int], block: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of setting it again; torch's own comes once a process
        try:
            with no_waiting():
                assert modes == [0, "error"]
                block()
        except RuntimeError:
            assert block is wait
    assert modes == [0, "error", 0]
