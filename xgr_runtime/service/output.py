"""Writing to a pipe that its reader may have stopped reading.

A write to a full pipe waits for the reader, for ever if need be, and whoever waits inside Python's own `sys.stderr` holds a lock
that the end of the process asks for. So a service writes straight to the file's number, in a thread that nobody has to wait for.
"""

import io
import os
import select
import sys
from concurrent.futures import wait
from functools import partial
from typing import TextIO

from xgr_runtime.service.worker_thread import WorkerThread


def write_all(number: int, data: bytes) -> None:
    """Write to the open file of this number; waits for its reader. Raises the system's OSError."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(number, rest) :]
        except BlockingIOError:  # another process has made the shared file one that does not wait
            select.select([], [number], [])


def write_text(stream: TextIO, text: str) -> None:
    """Write past the stream's own buffer; waits for the reader of its file. Raises the system's OSError."""
    if (number := file_number(stream)) is None:
        stream.write(text)
    else:
        write_all(number, encoded(text, stream))


def file_number(stream: TextIO) -> int | None:
    """The number of the stream's file; None for a buffer in memory, which whoever calls a command from Python may put there."""
    try:
        return stream.fileno()
    except io.UnsupportedOperation:
        return None


def say(text: str, limit_s: float) -> bool:
    """Write to standard error and wait at most `limit_s` seconds for its reader; False if it was not written by then."""
    if sys.stderr is None:
        return False
    writing = WorkerThread("xgr-say").submit(partial(write_text, sys.stderr, text))
    return bool(wait([writing], limit_s).done) and writing.exception() is None


def encoded(text: str, stream: TextIO) -> bytes:
    """The bytes that `stream` would write, escapes for what its encoding lacks."""
    return text.encode(stream.encoding or "utf-8", "backslashreplace")
