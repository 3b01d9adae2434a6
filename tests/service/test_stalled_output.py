"""Nobody reads what the service says: it answers, it drops log lines and says so, and it ends when it is told to."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.service.process import ROOT, at_once, hearing_hangups, serving, start
from tests.service.scrape import free_port, get
from tests.service.waiting import PATIENCE_S, PROCESS_S, wait_until
from tests.service.world import make_world
from xgr_runtime.service.address import read_address
from xgr_runtime.service.client import RecommendClient
from xgr_runtime.service.log_queue import QueueingHandler
from xgr_runtime.service.logs import JsonFormatter
from xgr_runtime.types import RecRequest, Search

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Of Linux; `fcntl` has the names of both from Python 3.10 on, but not for every system.
F_SETPIPE_SZ, F_GETPIPE_SZ = 1031, 1032
SMALL_PIPE_BYTES = 8 * 1024
REQUEST_ID = "r" * 120


def full_pipe() -> tuple[int, int]:
    """A pipe that holds nothing more."""
    reader, writer = os.pipe()
    os.write(writer, b"." * fcntl.fcntl(writer, F_GETPIPE_SZ))
    return reader, writer


@contextmanager
def logging_to_a_pipe(max_bytes: int) -> Iterator[tuple[logging.Logger, QueueingHandler, int]]:
    """A logger, its handler, and the end to read; the pipe is full to begin with."""
    reader, writer = full_pipe()
    logger = logging.Logger("xgr_runtime.x")
    with open(writer, "w", encoding="utf-8") as stream:
        handler = QueueingHandler(stream, max_bytes)
        handler.setFormatter(JsonFormatter())
        logger.addHandler(handler)
        try:
            yield logger, handler, reader
        finally:
            read_written(reader, handler)  # its thread must not write to a closed file
            handler.flush()
            wait_until(lambda: handler._writer.lines.empty())
    os.close(reader)


def is_written(handler: QueueingHandler) -> bool:
    """Whether its thread has written, or failed to, all that was ever queued."""
    return handler._writer.num_bytes == handler._num_bytes


def read_written(reader: int, handler: QueueingHandler) -> bytes:
    """Reads until all that the handler has queued is written, however long its thread takes."""
    os.set_blocking(reader, False)
    text, end_s = b"", time.monotonic() + PATIENCE_S
    while True:
        was_written = is_written(handler)  # asked before: what is read afterwards is all of it
        try:
            text += os.read(reader, 1 << 20)
        except BlockingIOError:
            if was_written:
                return text
            assert time.monotonic() < end_s, "the thread does not write"
            time.sleep(0.001)


def entries(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.lstrip(b".").splitlines()]


def test_what_fits_comes_in_order_and_what_does_not_is_counted_where_it_is_missing() -> None:
    with logging_to_a_pipe(20_000) as (logger, handler, reader):
        start_s = time.monotonic()
        for number in range(1000):
            logger.info("%d", number)
        assert time.monotonic() - start_s < PATIENCE_S
        first = entries(read_written(reader, handler))
        logger.info("1000")
        handler.flush()
        second = entries(read_written(reader, handler))
    kept = [int(entry["message"]) for entry in first]
    assert kept == list(range(len(kept)))
    assert 20_000 - 200 < sum(len(json.dumps(entry)) + 1 for entry in first) <= 20_000
    notice, last = second
    assert (notice["level"], last["message"]) == ("warning", "1000")
    assert notice["message"].startswith(
        f"{1000 - len(kept)} log lines before this one were dropped"
    )


def test_the_end_waits_a_second_in_all_and_tells_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float | None] = []
    wait = threading.Event.wait

    def noted(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            waits.append(timeout)
        return wait(event, timeout)

    with logging_to_a_pipe(300) as (logger, handler, reader):
        for number in range(10):
            logger.info("%d", number)
        start_s = time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Event, "wait", noted)
            for _ in range(3):
                handler.flush()
        assert 0.9 < time.monotonic() - start_s < PATIENCE_S
        first, *others = [10 * PATIENCE_S if one is None else one for one in waits]
        assert (first, len(others)) == (1.0, 2)
        assert sum(others) < 0.1, others
        found = entries(read_written(reader, handler))
    kept = [entry["message"] for entry in found[:-1]]
    assert kept == ["0", "1", "2"], "those of 300 bytes"
    assert found[-1]["message"].startswith("7 log lines before")


def test_no_record_lives_on_in_the_queue() -> None:
    class Weighty:
        def __str__(self) -> str:
            return "weighty"

        def __del__(self) -> None:
            gone.append(1)

    gone: list[int] = []
    with logging_to_a_pipe(20_000) as (logger, _, __):
        for _ in range(3):
            logger.info("%s", Weighty())
        assert len(gone) == 3


def test_a_line_that_cannot_be_formatted_is_told_and_raises_nothing() -> None:
    with logging_to_a_pipe(20_000) as (logger, handler, reader):
        read_written(reader, handler)
        logger.info("%d of it", "text")
        handler.flush()
        (found,) = entries(read_written(reader, handler))
    assert found["level"] == "error"
    assert found["message"].endswith("logged what cannot be formatted (TypeError)")
    assert "test_stalled_output.py:" in found["message"]


def test_a_disk_that_is_full_is_told_when_it_is_not_any_more(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file, open("/dev/full", "w") as full:
        number = os.dup(file.fileno())
        os.dup2(full.fileno(), file.fileno())
        logger, handler = logging.Logger("x"), QueueingHandler(file)
        logger.addHandler(handler)
        logger.info("lost")
        handler.flush()
        wait_until(lambda: is_written(handler))
        os.dup2(number, file.fileno())
        os.close(number)
        logger.info("back")
        handler.flush()
        wait_until(lambda: is_written(handler))
        first, second = path.read_text().splitlines()
    assert first.startswith("1 log lines before this one were dropped")
    assert second == "back"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world")).config


def serve_command(config: Path, *options: str) -> list[str]:
    command = ["-m", "xgr_runtime.cli", "serve", "--config", str(config), "--port", "0"]
    for option in options:
        command += ["--set", f"service.{option}"]
    return command


@pytest.mark.e2e
def test_an_unread_log_holds_up_no_answer_and_no_end(config: Path) -> None:
    at_once(partial(fill_the_log_and_end, config), [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])


def fill_the_log_and_end(config: Path, number: int) -> None:
    port = free_port()
    command = serve_command(config, "log_requests=true", "drain_s=600", f"metrics_port={port}")
    searches = (Search(beam_width=1, num_results=1),)
    request = RecRequest(REQUEST_ID, history_item_ids=np.array([1, 2], np.int64), searches=searches)
    with serving(hearing_hangups(command)) as (process, target):
        assert process.stderr is not None
        fcntl.fcntl(process.stderr.fileno(), F_SETPIPE_SZ, SMALL_PIPE_BYTES)
        with RecommendClient(target, timeout_s=PATIENCE_S) as client:
            for _ in range(2 * SMALL_PIPE_BYTES // len(REQUEST_ID)):
                assert client.recommend(request).results
        assert asyncio.run(get(port))[0] == 200
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0, "neither the drain nor the log's reader is waited for"
        _, errors = process.communicate()
    assert errors.count(REQUEST_ID) > 10
    assert len(errors) <= SMALL_PIPE_BYTES


@pytest.mark.e2e
def test_a_full_pipe_as_standard_output_does_not_keep_the_process(config: Path) -> None:
    """The address cannot be told; SIGTERM ends it all the same, and the second one too."""
    at_once(partial(end_with_a_full_pipe, config), [False, True])


def end_with_a_full_pipe(config: Path, is_second: bool) -> None:
    reader, writer = full_pipe()
    port = free_port()
    command = serve_command(config, f"metrics_port={port}", "drain_s=600")
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=writer, stderr=subprocess.DEVNULL
    )
    try:
        wait_until_scraped(port)
        process.send_signal(signal.SIGTERM)
        if is_second:
            time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)


def wait_until_scraped(port: int) -> None:
    end_s = time.monotonic() + PROCESS_S
    while time.monotonic() < end_s:
        try:
            asyncio.run(get(port))
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the service did not come up")


@pytest.mark.e2e
def test_requests_cut_off_with_nobody_to_tell(config: Path) -> None:
    """The last line does not fit into standard error, and the exit code still says it."""
    num_threads = threading.active_count()
    reader, writer = full_pipe()
    command = serve_command(config)
    faulty = ["-m", "tests.service.serve_faulty", "idle", *command[3:]]
    with open(writer, "w") as errors:
        process = start(faulty, errors)
        try:
            assert read_address(process.stdout, PROCESS_S)
            process.send_signal(signal.SIGUSR1)
            assert process.wait(PATIENCE_S) == 1
        finally:
            process.kill()
            process.communicate()
    os.close(reader)
    assert threading.active_count() <= num_threads
