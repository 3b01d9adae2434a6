"""What commands under load share: arguments in a range, an output file that can be written, a reader that may go away."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from xgr_runtime.errors import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE
EXIT_TERMINATED = 128 + signal.SIGTERM
MAX_COUNT = 10**8  # of what is made one by one
NO_LIMIT = 2**62


def whole(lowest: int, highest: int) -> Callable[[str], int]:
    """A whole number of that range, for argparse."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if not lowest <= value <= highest:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {lowest} to {highest}, got {shown(text)}"
            )
        return value

    return parse


def number(lowest: float, highest: float, *, is_open: bool = False) -> Callable[[str], float]:
    """A number of that range, for argparse; `is_open`: above the lowest."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not lowest <= value <= highest or (is_open and value == lowest):
            words = f"above {lowest:g} and at most {highest:g}"
            wanted = words if is_open else f"from {lowest:g} to {highest:g}"
            raise argparse.ArgumentTypeError(f"must be a number {wanted}, got {shown(text)}")
        return value

    return parse


def out_file(text: str) -> Path:
    """A file that can be written when the figures are there, which may be in an hour; for argparse."""
    path = Path(text)
    place = path if path.exists() else path.parent
    is_right = place.is_file() if place is path else place.is_dir()
    if not is_right or not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot be written: {shown(text)}")
    return path


def exit_code_of(main: Callable[[Sequence[str] | None], int]) -> int:
    """Run a command; a reader of its output that goes away, as `head` does, is no error that needs a traceback.

    SIGTERM ends it as ctrl-C does: its processes and its temporary files go with it.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = main(None)
        sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # the interpreter writes what is left
        os.close(null)
        return EXIT_PIPE_CLOSED
    return code


def _terminate(_: int, __: FrameType | None) -> NoReturn:
    raise SystemExit(EXIT_TERMINATED)
