"""Which pages a large temporary gets: a fact of the process that changes some timings threefold, so benchmarks fix it.

glibc serves a request of 32 MiB and more (the buffer of a top-k over 512 x 8,192 is 64 MiB) with fresh pages from the
system, each of which costs a fault, unless the heap by chance has a free piece that large. FRESH_PAGES is that usual
case, made certain. KEPT_PAGES lets the heap grow and keep what it has: no faults after the first time.
"""

from __future__ import annotations

import ctypes
import platform
import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FRESH_PAGES, KEPT_PAGES = "fresh_pages", "kept_pages"

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_SETUP_THRESHOLD = 1 << 20
_LARGEST = 2**31 - 1


def can_set_pages() -> bool:
    """Only glibc has these switches."""
    return platform.libc_ver()[0] == "glibc"


def prepare_pages() -> None:
    """Call before building inputs: what they free goes back to the system and leaves no large hole in the heap."""
    _set({_MMAP_MAX: 1 << 16, _MMAP_THRESHOLD: _SETUP_THRESHOLD, _TRIM_THRESHOLD: 64 << 20})


def set_pages(regime: str) -> None:
    """Switch to FRESH_PAGES (glibc's own largest threshold) or KEPT_PAGES, from now on in this process."""
    if regime == FRESH_PAGES:
        _set({_MMAP_MAX: 1 << 16, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20})
    else:
        _set({_MMAP_MAX: 0, _TRIM_THRESHOLD: _LARGEST})


def page_faults(run: Callable[[], object]) -> int:
    """How many pages one run had to ask for."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _set(values: dict[int, int]) -> None:
    if not can_set_pages():
        return
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in values.items():
        if mallopt(parameter, value) != 1:
            raise OSError(f"mallopt({parameter}, {value}) was refused")
