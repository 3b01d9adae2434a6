"""The log's way to standard error, which a stalled reader cannot turn into a stalled service.

`logging.StreamHandler` writes in the thread that logs, here the loop of every call, and with its lock held: once the pipe is full,
nobody is answered and no signal heard. This handler only formats, so that no record and nothing of a request lives on in the queue,
and a thread of its own writes. What the queue cannot hold is dropped, and the log says how much and where.
"""

import logging
import threading
import time
from queue import SimpleQueue
from typing import TextIO

from xgr_runtime.service.output import encoded, write_all

# Some ten thousand lines. Of the waits at the end of the process, all together.
MAX_QUEUED_BYTES = 2 * 1024 * 1024
MAX_FLUSH_S = 1.0


class QueueingHandler(logging.Handler):
    """Logs to a stream that is a file of the system (it has a `fileno`), in order, without waiting for its reader.

    max_bytes: what may wait to be written; once there is more, lines are dropped until half of it is free.
    """

    def __init__(self, stream: TextIO, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        super().__init__()
        self._stream, self._max_bytes = stream, max_bytes
        self._writer = _Writer(stream.fileno())
        self._num_bytes = 0  # that were ever queued; changes under the handler's lock
        self._num_dropped = 0  # since the log last said so
        self._num_failed_told = 0
        self._flush_s = MAX_FLUSH_S
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's lines, or count it as dropped. `logging` calls it with the handler's lock held."""
        try:
            data = self._format(record)
        except Exception as error:  # noqa: BLE001 - a defect in a log line must not become one of the call
            data = self._format(_unformatted(record, error))
        limit = self._max_bytes // 2 if self._num_dropped else self._max_bytes
        if self._num_bytes - self._writer.num_bytes + len(data) > limit:
            self._num_dropped += 1
            return
        self._tell_dropped()
        self._put(data)

    def flush(self) -> None:
        """Wait until what is queued is written, at most MAX_FLUSH_S in the handler's life: for the end of the process."""
        self.acquire()
        try:
            self._tell_dropped()
        finally:
            self.release()
        written = threading.Event()
        self._writer.lines.put(written)
        start_s = time.monotonic()
        written.wait(self._flush_s)
        self._flush_s = max(0.0, self._flush_s - (time.monotonic() - start_s))

    def _format(self, record: logging.LogRecord) -> bytes:
        return encoded(self.format(record) + "\n", self._stream)

    def _put(self, data: bytes) -> None:
        self._num_bytes += len(data)
        self._writer.lines.put(data)

    def _tell_dropped(self) -> None:
        num_failed = self._writer.num_failed
        count = self._num_dropped + num_failed - self._num_failed_told
        if count:
            self._put(self._format(_dropped(count)))
            self._num_dropped, self._num_failed_told = 0, num_failed


class _Writer(threading.Thread):
    """Writes the lines of its queue; sets the events that it finds there."""

    def __init__(self, number: int) -> None:
        super().__init__(name="xgr-log", daemon=True)
        self._number = number
        self.lines: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self.num_bytes = 0
        self.num_failed = 0

    def run(self) -> None:
        """The thread itself."""
        while True:
            line = self.lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                write_all(self._number, line)
            except (
                OSError
            ):  # a full disk, a reader that went away: told when a later line gets through
                self.num_failed += 1
            self.num_bytes += len(line)


def _dropped(count: int) -> logging.LogRecord:
    text = "%d log lines before this one were dropped: standard error was not read or could not be written"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (count,), None)


def _unformatted(record: logging.LogRecord, error: Exception) -> logging.LogRecord:
    text = "%s:%d logged what cannot be formatted (%s)"
    where = (record.pathname, record.lineno, type(error).__name__)
    return logging.LogRecord(__name__, logging.ERROR, __file__, 0, text, where, None)
