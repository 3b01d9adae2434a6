"""A serving process as tests and operators see it: a line when it listens, signals, an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
LISTENING = "xgr serve: listening on "


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """`python ARGUMENTS` in the repository's root, its output piped."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address; killed at the end if it still runs."""
    process = start(arguments)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith(LISTENING):
            process.kill()
            _, errors = process.communicate()
            raise AssertionError(f"the server did not come up: {line}{errors}")
        yield process, line.removeprefix(LISTENING).strip()
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
