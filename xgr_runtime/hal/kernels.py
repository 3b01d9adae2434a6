"""Kernels that are compiled when they are first started: found before anything runs, and compiled side by side.

What a start compiles depends on what the call passes: types, constants, whether an address or a number is a multiple of 16. So
the only list of kernels is what ops would start. While a thread looks for them (`noting`), whoever is about to compile a
kernel hands it to `note` instead and starts nothing; a `Device` says how its ops get as far as that without running.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager

from xgr_runtime.hal.device import Kernel

MOST_THREADS = 32
_NOTED = threading.local()


@contextmanager
def noting() -> Iterator[dict[Kernel, None]]:
    """While it lasts, kernels that this thread's ops would compile are noted, each once, in the order of their first start."""
    outer = getattr(_NOTED, "kernels", None)
    found: dict[Kernel, None] = {}
    _NOTED.kernels = found
    try:
        yield found
    finally:
        _NOTED.kernels = outer


def is_noting() -> bool:
    """Whether this thread looks for kernels."""
    return getattr(_NOTED, "kernels", None) is not None


def note(kernel: Kernel) -> bool:
    """Whether this thread looks for kernels: then it is noted, and the caller neither compiles nor starts it."""
    found: dict[Kernel, None] | None = getattr(_NOTED, "kernels", None)
    if found is None:
        return False
    found[kernel] = None
    return True


def num_processors() -> int:
    """Processors that this process may use, where the system tells; else those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Compilation:
    """Kernels being compiled, on threads of their own: a compiler spends most of its time outside of Python.

    seconds: of each that is done. failed: whose error `wait` has raised. Belongs to one thread.
    """

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.kernels = tuple(kernels)
        self.seconds: dict[Kernel, float] = {}
        self.failed: Kernel | None = None
        self._pool = ThreadPoolExecutor(
            max(1, min(len(self.kernels), num_processors(), MOST_THREADS)), "compiler"
        )
        self._futures = [self._pool.submit(self._make_ready, kernel) for kernel in self.kernels]

    @property
    def num_done(self) -> int:
        """How many are compiled."""
        return len(self.seconds)

    @property
    def first_open(self) -> Kernel | None:
        """The first that is not compiled yet."""
        return next((kernel for kernel in self.kernels if kernel not in self.seconds), None)

    def wait(self, seconds: float) -> bool:
        """Whether all are compiled, after so long at most. Raises what the first of the list that failed has raised."""
        done, still_open = wait(self._futures, seconds, return_when=FIRST_EXCEPTION)
        for kernel, future in zip(self.kernels, self._futures, strict=True):
            if future in done and not future.cancelled() and future.exception() is not None:
                self.failed = kernel
                self.cancel()
                future.result()
        if not still_open:
            self._pool.shutdown()
        return not still_open

    def cancel(self) -> None:
        """Begin no more of them; what is under way ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make_ready(self, kernel: Kernel) -> None:
        start_s = time.monotonic()
        kernel.make_ready()
        self.seconds[kernel] = time.monotonic() - start_s
