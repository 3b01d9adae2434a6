"""Progress of a long benchmark: each line with the seconds since the program began, so that a slow step is seen."""

from __future__ import annotations

import time

from tools._bench.timing import progress as plain

_BEGAN = time.monotonic()


def progress(text: str) -> None:
    """One line on stderr."""
    plain(f"{time.monotonic() - _BEGAN:6.1f} s  {text}")
