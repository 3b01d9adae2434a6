"""Log lines: one a record whatever it holds, bounded, and machine-readable as JSON."""

from __future__ import annotations

import ast
import io
import json
import logging
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.servers import running_in_thread
from tests.service.stand_in import StandInEngine
from tests.service.waiting import PATIENCE_S
from xgr_runtime.config import ServiceConfig
from xgr_runtime.service import logs
from xgr_runtime.service.client import RecommendClient
from xgr_runtime.service.logs import (
    FIELDS,
    INDENT,
    MAX_ID,
    MAX_IDS,
    MAX_MESSAGE,
    MAX_TRACEBACK,
    JsonFormatter,
    TextFormatter,
    configure_logging,
)
from xgr_runtime.service.rpc_errors import ServiceError
from xgr_runtime.types import RecRequest, Search

if TYPE_CHECKING:
    from collections.abc import Iterator

INJECTED = (
    '"}\n2026-01-31 12:00:00,000 INFO xgr: all is well\r\n\x1b[31m\u2028\x85\x00{"level": "info"}'
)


def record(
    message: str, exception: BaseException | None = None, **fields: Any
) -> logging.LogRecord:
    exc_info = None if exception is None else (type(exception), exception, exception.__traceback__)
    made = logging.LogRecord("xgr_runtime.x", logging.INFO, "f.py", 1, message, None, exc_info)
    made.__dict__.update(fields)
    return made


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


@given(st.text(max_size=200), st.text(max_size=50))
def test_any_record_is_one_line_of_json(message: str, request_id: str) -> None:
    line = JsonFormatter().format(record(message, request_id=request_id))
    assert line.isascii()
    assert line.isprintable()
    entry = json.loads(line)
    assert entry["message"] == message
    assert entry["request_id"] == request_id
    assert set(entry) == {"time", "level", "logger", "message", "request_id"}


@given(st.text(max_size=200))
def test_any_record_is_one_line_of_text(message: str) -> None:
    line = TextFormatter().format(record(message))
    assert line.isprintable()
    assert " INFO xgr_runtime.x: " in line


def test_an_exception_is_a_field_and_cannot_make_lines() -> None:
    error = raised(ZeroDivisionError(INJECTED))
    entry = json.loads(JsonFormatter().format(record("failed", error, request_id="r1")))
    assert entry["exception"]["type"] == "ZeroDivisionError"
    assert entry["exception"]["message"] == INJECTED
    assert entry["exception"]["traceback"].startswith("Traceback (most recent call last):\n")
    assert "test_logs.py" in entry["exception"]["traceback"]
    lines = TextFormatter().format(record("failed", error)).split("\n")
    assert lines[0].endswith("INFO xgr_runtime.x: failed")
    assert len(lines) > 3
    for line in lines[1:]:
        assert line.startswith(INDENT)
        assert line.isprintable()


def test_everything_is_bounded() -> None:
    error = raised(ValueError("e" * 10**6))
    ids = tuple("i" * 10**4 for _ in range(10**3))
    noisy = record("m" * 10**6, error, request_id="r" * 10**6, request_ids=ids)
    entry = json.loads(JsonFormatter().format(noisy))
    assert len(entry["message"]) == len(entry["exception"]["message"]) == MAX_MESSAGE
    assert len(entry["exception"]["traceback"]) == MAX_TRACEBACK
    assert len(entry["request_id"]) == MAX_ID
    assert len(entry["request_ids"]) == MAX_IDS
    assert len(TextFormatter().format(noisy)) < MAX_MESSAGE + 2 * MAX_TRACEBACK


def test_fields_keep_their_types_and_others_stay_out() -> None:
    made = record("x", request_ids=("a", "b"), status="OK", duration_ms=1.23456, password="no")
    entry = json.loads(JsonFormatter().format(made))
    assert entry["request_ids"] == ["a", "b"]
    assert (entry["status"], entry["duration_ms"]) == ("OK", 1.235)
    assert set(entry) - {"time", "level", "logger", "message"} <= set(FIELDS)
    assert json.loads(JsonFormatter().format(record("x", duration_ms=float("nan")))) is not None


def test_the_time_is_utc_with_milliseconds() -> None:
    made = record("x")
    made.created, made.msecs = 0.25, 250.0
    assert json.loads(JsonFormatter().format(made))["time"] == "1970-01-01T00:00:00.250Z"


@contextmanager
def configured(**options: Any) -> Iterator[io.StringIO]:
    """The root logger as the command configures it, and as it was afterwards."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    try:
        configure_logging(ServiceConfig(**options), stream)
        yield stream
    finally:
        root.handlers, root.level = handlers, level


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_format_and_level(log_format: Literal["text", "json"]) -> None:
    with configured(log_format=log_format, log_level="warning") as stream:
        logging.getLogger("xgr_runtime.a").info("not shown")
        logging.getLogger("xgr_runtime.a").warning("shown %d", 5, extra={"request_id": "r"})
        configure_logging(ServiceConfig(log_level="debug"), stream)
        logging.getLogger("xgr_runtime.a").error("once")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    if log_format == "json":
        first, second = map(json.loads, lines)
        assert (first["level"], first["message"], first["request_id"]) == (
            "warning",
            "shown 5",
            "r",
        )
        assert second["message"] == "once"
    else:
        assert lines[0].endswith(" WARNING xgr_runtime.a: shown 5")


@pytest.mark.parametrize("name", ["ZeroDivisionError", "OpUnavailable"])
def test_a_failed_call_is_an_exception_under_its_id(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """What the client must not see is in the log, under the id that the client has."""
    ids = np.array([1], np.int64)
    with (
        running_in_thread(StandInEngine()) as target,
        RecommendClient(target, timeout_s=PATIENCE_S) as client,
        pytest.raises(ServiceError, match="INTERNAL"),
    ):
        client.recommend(
            RecRequest("r1", history_item_ids=ids, searches=(Search(catalog=f"raise:{name}"),))
        )
    (made,) = [one for one in caplog.records if one.levelname == "ERROR"]
    entry = json.loads(JsonFormatter().format(made))
    assert (entry["request_id"], entry["level"]) == ("r1", "error")
    assert entry["exception"]["type"] == name
    assert "secret detail" in entry["exception"]["message"]


def test_who_logs_an_id_gives_it_as_a_field() -> None:
    """In every file of the service: a line that names a request id in its text carries it as `extra` too."""
    folder = Path(logs.__file__).parent
    found = []
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger."):
                text = [ast.unparse(argument) for argument in node.args[1:]]
                if any("request_id" in argument for argument in text):
                    found.append((path.name, {keyword.arg for keyword in node.keywords}))
    assert len(found) >= 5
    assert [place for place in found if "extra" not in place[1]] == []


def test_importing_configures_nothing() -> None:
    code = (
        "import logging, xgr_runtime, xgr_runtime.cli, xgr_runtime.service.server\n"
        "names = [n for n in logging.root.manager.loggerDict if n.startswith('xgr')]\n"
        "own = [logging.getLogger(n) for n in names]\n"
        "print(logging.root.handlers, [g for g in own if g.handlers or g.level], logging.root.level)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[] [] 30\n", "")
