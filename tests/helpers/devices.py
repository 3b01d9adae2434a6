"""The device of this run, for helpers that build engines: `--device` as conftest opened it, else the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xgr_runtime.hal.cpu import CpuDevice

if TYPE_CHECKING:
    from xgr_runtime.hal.device import Device


class _OfThisRun:
    device: Device = CpuDevice()


def use(device: Device) -> None:
    """Make `device` the one of this run."""
    _OfThisRun.device = device


def of_this_run() -> Device:
    """The device that engines of the helpers run on."""
    return _OfThisRun.device
