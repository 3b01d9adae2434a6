"""The log of a serving process: every line an object, the calls in it by their ids, nothing that a caller wrote as a line."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from tests.service.process import at_once, serving, start
from tests.service.scrape import by_label, free_port, get, parse
from tests.service.waiting import PATIENCE_S, PROCESS_S
from tests.service.world import make_world
from xgr_runtime.errors import XgrError
from xgr_runtime.service.client import RecommendClient
from xgr_runtime.types import RecRequest, Rules, Search

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e
LINE_OF_THEIRS = '\n{"level": "info", "request_id": "r1", "message": "forged"}\n2026-01-01 INFO xgr: forged\r\x1b[31m'
METHOD = "/xgr.v1.RecommendService/Recommend"


def hostile_requests() -> list[RecRequest]:
    ids = np.array([1, 2], np.int64)
    return [
        RecRequest("r1", history_item_ids=ids),
        RecRequest("r2", history_keys=(LINE_OF_THEIRS,), on_unknown="error"),
        RecRequest("r3", history_item_ids=ids, searches=(Search(catalog=LINE_OF_THEIRS),)),
        RecRequest("r4", history_item_ids=ids, searches=(Search(catalog_version="v\u2028v"),)),
        RecRequest(
            "r5",
            history_item_ids=ids,
            searches=(Search(rules=Rules(require=((LINE_OF_THEIRS,),))),),
        ),
        RecRequest(LINE_OF_THEIRS[:100], history_item_ids=ids),
    ]


def test_no_line_is_a_callers(tmp_path: Path) -> None:
    at_once(partial(log_hostile_requests, make_world(tmp_path).config), ["json", "text"])


def log_hostile_requests(config: Path, log_format: str) -> None:
    port = free_port()
    command = ["-m", "xgr_runtime.cli", "serve", "--config", str(config), "--port", "0"]
    for option in (f"log_format={log_format}", f"metrics_port={port}"):
        command += ["--set", f"service.{option}"]
    num_ok = 0
    with serving(command) as (process, target):
        with RecommendClient(target, timeout_s=PATIENCE_S) as client:
            for request in hostile_requests():
                try:
                    client.recommend(request)
                    num_ok += 1
                except XgrError:
                    continue
        with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(METHOD)(b"\xff\xff\xff", metadata=(("x-request-id", "raw"),))
        samples = parse(asyncio.run(get(port))[2])
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert by_label(samples, "xgr_requests_total", "code")["OK"] == num_ok >= 2
    lines = errors.split("\n")
    assert lines.pop() == ""
    assert len([line for line in lines if "listening" not in line]) > 10
    for line in lines:
        assert line.isprintable()
        if log_format == "text":
            assert not line.startswith(("{", "2026-01-01"))
    if log_format == "json":
        check_objects([json.loads(line) for line in lines])


def check_objects(entries: list[dict[str, Any]]) -> None:
    assert {entry["level"] for entry in entries} == {"info"}
    calls = [entry for entry in entries if entry["logger"].endswith("call_record")]
    statuses = {entry["request_id"]: entry["status"] for entry in calls}
    assert len(calls) == len(hostile_requests()) + 1
    assert {name: statuses[name] for name in ("r1", "r2", "r3", "r4", "r5", "raw")} == {
        "r1": "OK",
        "r2": "INVALID_ARGUMENT",
        "r3": "NOT_FOUND",
        "r4": "NOT_FOUND",
        "r5": "OK",
        "raw": "INVALID_ARGUMENT",
    }
    (made,) = set(statuses) - {"r1", "r2", "r3", "r4", "r5", "raw"}
    assert len(made) == 32
    assert statuses[made] == "INVALID_ARGUMENT"
    others = [entry for entry in entries if entry not in calls]
    assert not any("request_id" in entry for entry in others)
    assert any("metrics at http://" in entry["message"] for entry in others)


def test_a_metrics_port_in_use_ends_the_command_in_one_line(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        command = ["-m", "xgr_runtime.cli", "serve", "--config", str(world.config)]
        process = start([*command, "--log-level", "error", "--set", f"service.metrics_port={port}"])
        output, errors = process.communicate(timeout=PROCESS_S)
    assert (process.returncode, output) == (2, "")
    assert errors.startswith(f"xgr: ConfigError: cannot serve metrics on 127.0.0.1:{port}: ")
    assert errors.count("\n") == 1
