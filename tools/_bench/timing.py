"""What every benchmark shares: interleaved timing, the facts of the machine, one JSON object as the answer."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tools._bench.command import out_file

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

MIN_RUNS = 9


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the runs of one case."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    runs: int

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> Timing:
        """The summary of single times."""
        low, high = np.percentile(times_ms, [20, 80]).round(4).tolist()
        return cls(round(statistics.median(times_ms), 4), low, high, len(times_ms))


def time_interleaved(
    cases: Mapping[str, Callable[[], object]], runs: int, warmup_runs: int = 2
) -> dict[str, Timing]:
    """Time the cases in turn (A, B, A, B, ...), so that a slow moment of the machine falls on all of them.

    Every second turn goes backwards: no case always follows the same other one.
    """
    names = list(cases)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup_runs + runs):
        for name in names if turn % 2 == 0 else reversed(names):
            start = time.perf_counter()
            cases[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: Timing.of(all_ms[warmup_runs:]) for name, all_ms in times.items()}


def ratio(timings: Mapping[str, Timing], ours: str, theirs: str) -> float:
    """Median over median."""
    return round(timings[ours].median_ms / timings[theirs].median_ms, 4)


def environment() -> dict[str, Any]:
    """Where and with what a figure was measured."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def progress(text: str) -> None:
    """One line on stderr; stdout belongs to the answer."""
    print(text, file=sys.stderr, flush=True)


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """`--json` and `--out FILE`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--out", type=out_file, help="also write the JSON object to this file")


def write_report(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Answer as `add_output_arguments` promised; without --json the figures are listed line by line."""
    text = json.dumps(report, indent=2)
    if args.out is not None:
        args.out.write_text(text + "\n")
    if args.json:
        print(text)
    else:
        for key, value in report.items():
            print(f"{key}: {json.dumps(value)}")


def as_dict(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    """The timings as plain data."""
    return {name: asdict(timing) for name, timing in timings.items()}


def _commit() -> str:
    """The short commit of the working tree, with "+" when tracked files differ from it; "" outside git."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "--short", "HEAD")
        is_dirty = _git(folder, "status", "--porcelain", "--untracked-files=no") != ""
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + ("+" if is_dirty else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_name() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
