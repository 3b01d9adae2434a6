"""A serving process as tests and operators see it: a line when it listens, signals, an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from tests.service.waiting import PROCESS_S
from xgr_runtime.service.address import read_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
# In front of a module with a server, where its callers never pause.
PATIENT = ("-m", "tests.service.patient_stop")
Case = TypeVar("Case")


def start(arguments: Sequence[str], errors: IO[str] | None = None) -> subprocess.Popen[str]:
    """`python ARGUMENTS` in the repository's root, its output piped; what it says to stderr may go to a file."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        stdout=subprocess.PIPE,
        stderr=errors or subprocess.PIPE,
        text=True,
    )


@contextmanager
def serving(
    arguments: Sequence[str], errors: IO[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address; killed at the end if it still runs. errors: a file for a log that no pipe could hold."""
    process = start(arguments, errors)
    try:
        address = read_address(process.stdout, PROCESS_S)
        if not address:
            process.kill()
            raise AssertionError(f"the server did not come up: {process.communicate()}")
        yield process, address
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def at_once(run: Callable[[Case], None], cases: Iterable[Case]) -> None:
    """Each case in a thread of its own, where most of a case is the start of a process; fails with the first that failed."""
    with ThreadPoolExecutor() as pool:
        ends = [(case, pool.submit(run, case)) for case in cases]
    for case, end in ends:
        error = end.exception()
        if error is not None:
            raise AssertionError(f"{case}: {error!r}") from error


def hearing_hangups(arguments: Sequence[str]) -> list[str]:
    """`python ARGUMENTS`, with the SIGHUP of a terminal's process, whoever runs these tests."""
    code = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    return ["-c", code, *arguments]
