"""Checks of ops in processes of their own: one that crashes loses itself alone, and several compile at the same time.

Compiling kernels is what takes their time. An op whose checks take long has a process for the cases of each provider and one for
the calls that are timed; the others have one for all of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from xgr_runtime.conformance.parity import implementations
from xgr_runtime.hal.registry import REFERENCE, all_ops

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

CHECKERS = 14  # processes at the same time
CALLS = "calls"  # what is not a provider's conformance cases
# Checks that take longest: they begin first, each provider's cases in a process of their own.
LONG = ("beam_attention", "select_beams", "head_logsumexp", "prefill_attention", "shared_attention")


def check_tasks(names: Sequence[str], kind: str) -> list[tuple[str, str]]:
    """(op, what of it) of each process, the longest first; "" is everything, else the calls or the cases of a provider."""
    found = []
    for name in LONG:
        if name in names:
            by = [p for p, _ in implementations(all_ops()[name], kind) if p != REFERENCE]
            found += [(name, what) for what in (*by, CALLS)]
    return [*found, *((name, "") for name in names if name not in LONG)]


def ask_checks(
    tool: str, args: argparse.Namespace, name: str, only: str, seconds: float
) -> dict[str, Any]:
    """An op's checks out of a process of that tool of its own; `lost` and `late` say what did not come of them."""
    command = [sys.executable, tool, "--check", "--op", name, "--only", only]
    command += ["--device", args.device, "--dtype", args.dtype, "--items", str(args.items)]
    is_late = False
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=seconds)
        output, ended = done.stdout, f"with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, ended, is_late = error.stdout or b"", f"after {seconds:.0f} s", True
    found = _last_report(output)
    wanted = {"": {"checks", "parity"}, CALLS: {"checks"}}.get(only, {"parity"})
    missing = wanted - found.keys()
    if not missing:  # also where the process had not ended yet
        return found
    cases = f"{name}{f' by {only}' if only else ''}: conformance cases"
    row = cases if missing == {"parity"} else name
    if is_late:
        return {**found, "late": [{"row": row, "reason": f"not done {ended}: no time was left"}]}
    return {**found, "lost": [{"row": row, "reason": f"ended {ended} and no report"}]}


def _last_report(output: bytes) -> dict[str, Any]:
    """Of a process that was killed the last line may be cut."""
    for line in reversed(output.decode(errors="replace").splitlines()):
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        return found
    return {}


def check_elsewhere(
    tool: str, args: argparse.Namespace, tasks: Sequence[tuple[str, str]], end_s: float
) -> dict[str, Any]:
    """Each in a process of its own, several at a time: one that crashes loses itself alone, and kernels are compiled."""
    merged: dict[str, Any] = {"parity": [], "checks": [], "lost": [], "late": []}
    with ThreadPoolExecutor(min(CHECKERS, max(1, (os.cpu_count() or 2) - 2))) as pool:
        asked = [
            pool.submit(
                lambda task: ask_checks(tool, args, *task, max(1.0, end_s - time.monotonic())), task
            )
            for task in tasks
        ]
        for answer in asked:
            for key, entries in answer.result().items():
                merged[key] += entries
    return merged
