"""What `xgr serve` logs, as text or as JSON: a record a line, whatever the record holds.

The library only calls `logging`; nothing is configured before `configure_logging`, which the command calls. Texts of
requests reach the log inside messages and exceptions, so every control character is escaped and every part is bounded: no
caller can write a line of its own, or a line without an end. Tracebacks are a field in JSON, and in text indented lines,
which no record begins with.
"""

import json
import logging
import sys
import time
import traceback
from typing import Any, TextIO

from xgr_runtime.config import ServiceConfig
from xgr_runtime.errors import printable
from xgr_runtime.service.log_queue import QueueingHandler
from xgr_runtime.service.output import file_number

MAX_MESSAGE, MAX_ID, MAX_TRACEBACK = 4096, 1024, 16384  # characters
MAX_IDS = 64
INDENT = "    "
# What a record may carry beside its message (the `extra` of a call), by name.
FIELDS = ("request_id", "request_ids", "status", "duration_ms")


def configure_logging(config: ServiceConfig, stream: TextIO | None = None) -> None:
    """Log to `stream` as the configuration says, unless the process has set up logging already.

    Without a stream to standard error, without ever waiting for its reader, and Python's warnings too, which would wait.
    """
    if logging.getLogger().handlers:
        return
    handler = _handler_of(stream)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])


def flush_logs() -> None:
    """Have what was logged written; waits for a stalled reader a second in all, however often it is called."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _handler_of(stream: TextIO | None) -> logging.Handler:
    if stream is not None:
        return logging.StreamHandler(stream)
    logging.captureWarnings(True)
    if sys.stderr is None:
        return logging.NullHandler()
    if file_number(sys.stderr) is None:
        return logging.StreamHandler(sys.stderr)
    return QueueingHandler(sys.stderr)


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00,123 INFO xgr_runtime.service.server: text`, tracebacks indented below."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the lines of an exception."""
        message = printable(record.getMessage(), MAX_MESSAGE)
        line = f"{self.formatTime(record)} {record.levelname} {record.name}: {message}"
        below = [text for text in (_traceback_of(record), record.stack_info) if text]
        return "\n".join(
            [line, *(INDENT + printable(part) for text in below for part in text.splitlines())]
        )


class JsonFormatter(logging.Formatter):
    """One JSON object in ASCII: time (UTC), level, logger, message, the fields of FIELDS, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage(), MAX_MESSAGE),
        }
        for name in FIELDS:
            if name in record.__dict__:
                entry[name] = _plain(record.__dict__[name])
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = {
                "type": record.exc_info[0].__name__,
                "message": _cut(str(record.exc_info[1]), MAX_MESSAGE),
                "traceback": _traceback_of(record),
            }
        if record.stack_info:
            entry["stack"] = _tail(record.stack_info)
        return json.dumps(entry, ensure_ascii=True, allow_nan=False)


def _plain(value: object) -> Any:
    if isinstance(value, float):
        return round(value, 3) if abs(value) < float("inf") else None
    if isinstance(value, int):
        return value
    if isinstance(value, (tuple, list)):
        return [_cut(str(element), MAX_ID) for element in value[:MAX_IDS]]
    return _cut(str(value), MAX_ID)


def _traceback_of(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[0] is None:
        return ""
    return _tail("".join(traceback.format_exception(*record.exc_info)))


def _tail(text: str) -> str:
    """The end of a traceback says what went wrong."""
    return text if len(text) <= MAX_TRACEBACK else f"...{text[3 - MAX_TRACEBACK :]}"


def _cut(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else f"{text[: max_characters - 3]}..."
