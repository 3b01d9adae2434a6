"""The processes of a rung: each with a limit, its output appended to the rung's log, ended with all it started."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

TAIL_LINES = 40
LINE_LENGTH = 300


@dataclass
class Processes:
    """Starts processes and knows those that run, so that an interrupted ladder leaves none behind."""

    cwd: Path
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_stopped: bool = False

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float
    ) -> int:
        """The exit code. Raises TimeoutError after the limit, when the process and its children have been ended."""
        with log.open("ab") as output:
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
            with self.lock:
                if self.is_stopped:
                    raise TimeoutError("the ladder was interrupted")
                process = subprocess.Popen(
                    command,
                    cwd=self.cwd,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self.running.add(process)
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"longer than {limit_s:.0f} s: {shlex.join(command)}") from error
        finally:
            _end(process)
            with self.lock:
                self.running.discard(process)

    def stop(self) -> None:
        """End everything that runs; nothing starts afterwards."""
        with self.lock:
            self.is_stopped = True
            for process in self.running:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that runs, with its children. One that has ended is left alone: its number may be another's by now."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(log: Path, num_lines: int = TAIL_LINES) -> str:
    """The last lines of a log, long ones cut."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join(line[:LINE_LENGTH] for line in lines[-num_lines:])


def junit_counts(path: Path) -> dict[str, int]:
    """What pytest's junit file counts: tests that passed, failed (errors included) and were not carried out."""
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in ET.parse(path).getroot().iter("testsuite"):
        for name in totals:
            totals[name] += int(suite.get(name, "0"))
    failed = totals["failures"] + totals["errors"]
    return {
        "passed": totals["tests"] - failed - totals["skipped"],
        "failed": failed,
        "skipped": totals["skipped"],
    }
