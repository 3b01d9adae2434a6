"""Where a figure was measured: the device, its driver, and what it does on the day with a product and with a copy."""

from __future__ import annotations

import datetime
import os
import statistics
import subprocess
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from tools._bench.timing import environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from xgr_runtime.hal.device import Device

COMMIT_VARIABLE = "XGR_COMMIT"
PRODUCT_SIZE, COPY_BYTES = 8192, 1 << 31
REPETITIONS, CALLS = 15, 8


def device_facts(device: Device, *, is_tiny: bool = False) -> dict[str, Any]:
    """Names and versions, and the two rates: a bf16 product of 8192^3 and a copy within the device; smaller ones to try a tool."""
    scale = 1 if device.kind == "cuda" and not is_tiny else 16
    facts = environment()
    del facts["commit"]  # of the folder; a report has the one that is measured
    return {
        **facts,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "device": device.name,
        "device_kind": device.kind,
        "driver": _driver(),
        "triton": _version("triton"),
        "cuda": torch.version.cuda or "",
        "bf16_product_tflops": round(product_tflops(device, PRODUCT_SIZE // scale), 1),
        "copy_tb_per_s": round(copy_tb_per_s(device, COPY_BYTES // scale**2), 3),
    }


def commit_of(root: Path, given: str) -> str:
    """The commit that is measured: as given, or XGR_COMMIT, or git's; ends the program where nobody knows."""
    named = given or os.environ.get(COMMIT_VARIABLE, "") or environment()["commit"]
    if not named:
        raise SystemExit(
            f"the commit is not known: {root} is no git checkout; give --commit or set {COMMIT_VARIABLE}"
        )
    return str(named)


def seconds_of(device: Device, fn: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Median seconds of a call on the device: of several calls in a row, so that none waits for the host; the first three warm up."""
    times = []
    for number in range(repetitions + 3):
        if device.kind == "cuda":
            start, end = _event(), _event()
            start.record()
            for _ in range(CALLS):
                fn()
            end.record()
            end.synchronize()
            seconds = float(start.elapsed_time(end)) / 1e3 / CALLS
        else:
            begin = time.perf_counter()
            fn()
            seconds = time.perf_counter() - begin
        if number >= 3:
            times.append(seconds)
    return statistics.median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def product_tflops(device: Device, size: int) -> float:
    """Rate of one bf16 product of size^3, operands from a normal distribution."""
    place = device.torch_device
    one, two = (torch.randn(size, size, device=place).bfloat16() for _ in range(2))
    out = torch.empty_like(one)
    seconds = seconds_of(device, lambda: torch.mm(one, two, out=out))
    return float(2 * size**3 / seconds / 1e12)


def copy_tb_per_s(device: Device, num_bytes: int) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    source = torch.randn(num_bytes // 4, device=device.torch_device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(device, lambda: target.copy_(source)) / 1e12


def _driver() -> str:
    """Version of the NVIDIA driver, "" where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
