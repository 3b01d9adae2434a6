"""Lines of a file or pipe for an asyncio program.

They are read in a thread, because a slow pipe must not hold up the answers of the lines before. The thread is a daemon and owns
the file: nothing can wake a thread that waits for a silent pipe, so neither the loop nor the interpreter may wait for it.
"""

import asyncio
import queue
import sys
import threading
from collections.abc import AsyncIterator
from typing import BinaryIO, TypeAlias

from xgr_runtime.errors import ConfigError

Wanted: TypeAlias = "asyncio.Future[bytes | None] | None"


def open_input(name: str) -> BinaryIO:
    """A file, or standard input for "-", as bytes: a line may be no text at all. Raises ConfigError."""
    try:
        if name != "-":
            return open(name, "rb")
        if sys.stdin is None:
            raise ConfigError("cannot read standard input: it is closed")
        # Not sys.stdin.buffer: the interpreter would wait at its end for the thread that reads from it.
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from error


async def lines_of(file: BinaryIO) -> AsyncIterator[bytes]:
    """The lines of a file, which is closed after the last one. Raises ConfigError when reading fails."""
    loop = asyncio.get_running_loop()
    wanted: queue.SimpleQueue[Wanted] = queue.SimpleQueue()
    arguments = (file, loop, wanted)
    threading.Thread(target=_pump, args=arguments, name="xgr-client-input", daemon=True).start()
    try:
        while True:
            future: asyncio.Future[bytes | None] = loop.create_future()
            wanted.put(future)
            try:
                line = await future
            except OSError as error:
                raise ConfigError(f"cannot read the input: {error.strerror}") from error
            if line is None:
                return
            yield line
    finally:
        wanted.put(None)


def _pump(
    file: BinaryIO, loop: asyncio.AbstractEventLoop, wanted: "queue.SimpleQueue[Wanted]"
) -> None:
    """Read a line for every future until None is wanted."""
    with file:
        while (future := wanted.get()) is not None:
            line: bytes | OSError | None
            try:
                line = next(file, None)
            except OSError as error:
                line = error
            try:
                loop.call_soon_threadsafe(_resolve, future, line)
            except RuntimeError:  # the loop is closed: nobody waits for this line
                return


def _resolve(future: "asyncio.Future[bytes | None]", line: bytes | OSError | None) -> None:
    if future.cancelled():
        return
    if isinstance(line, OSError):
        future.set_exception(line)
    else:
        future.set_result(line)
