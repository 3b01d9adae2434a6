"""A tool that runs beside the tests, at a lower priority, until one of them asks how it ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


class Background:
    """A Python module as a command of its own, in the root of the repository."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            ["nice", "-n", "10", sys.executable, "-m", *command],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self) -> tuple[int, str]:
        """Its exit code and what it printed."""
        output, _ = self._process.communicate()
        return self._process.returncode, output

    def stop(self) -> None:
        """End it unless it has ended."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
