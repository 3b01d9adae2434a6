"""Thousands of random and mutated messages against a serving process: each gets the status it deserves, and nothing more.

The process is a real one with the real engine: what it prints and whether it still answers is part of the test.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import re
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from tests.service.hostile.payloads import PayloadSource
from tests.service.hostile.verdicts import Judge
from tests.service.process import serving
from tests.service.waiting import PATIENCE_S
from tests.service.world import PREFIX, SUFFIX, World, make_world
from xgr_runtime import RuntimeConfig
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service.translate import request_to_proto
from xgr_runtime.service.translate_result import result_from_proto
from xgr_runtime.types import RecRequest, Search, SearchResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.service.hostile.payloads import Payload

pytestmark = pytest.mark.e2e
METHOD = "/xgr.v1.RecommendService/Recommend"
OVERRIDES = (
    "limits.max_input_items=200",
    "limits.max_exclusions=100",
    "limits.max_tags=8",
    "limits.max_message_bytes=65536",
    "limits.max_num_results=500",
    "search.num_results=50",
)
BETWEEN_GOOD_ONES = 100
CONCURRENT = 16
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING) xgr_runtime[.\w]*: .*")
MAX_LOG_BYTES_PER_CALL = 2048
# What would tell a caller about the inside of the server.
INSIDE = re.compile(
    r"Traceback|\.py\b|File \"|xgr_runtime|site-packages|0x[0-9a-f]{6}|\w+Error\(|/\w+/\w+/"
)


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a caller got; data: the reply's bytes, empty for a failure."""

    code: str
    message: str
    trailing: dict[str, Any]
    data: bytes


async def send(channel: Any, data: bytes, timeout_s: float = PATIENCE_S) -> Reply:
    call = channel.unary_unary(METHOD)(data, timeout=timeout_s)
    try:
        reply = await call
    except grpc.aio.AioRpcError as error:
        trailing = dict(tuple(error.trailing_metadata() or ()))
        return Reply(error.code().name, error.details() or "", trailing, b"")
    return Reply("OK", "", dict(tuple(await call.trailing_metadata())), reply)


def check_failure(reply: Reply) -> None:
    """A refusal is short, printable, says nothing about the inside, and lists its faults in both forms."""
    assert reply.message
    assert reply.message.isprintable()
    assert len(reply.message.encode()) <= 1024
    assert INSIDE.search(reply.message) is None, reply.message
    if reply.code == "INVALID_ARGUMENT" and "ended without" not in reply.message:
        status = status_pb2.Status.FromString(reply.trailing["grpc-status-details-bin"])
        assert status.message == reply.message
        bad = error_details_pb2.BadRequest.FromString(status.details[0].value)
        assert bad.field_violations
        for violation in bad.field_violations:
            assert violation.description
            assert violation.field.isprintable()
            assert violation.description.isprintable()
            assert INSIDE.search(violation.field + violation.description) is None


def check_answer(judge: Judge, data: bytes, reply: Reply) -> None:
    """Only items that the rules of the message allow, in order, as many as it asks for, with their own keys and codes."""
    message = pb.RecommendRequest.FromString(data)
    result = result_from_proto(pb.RecommendResponse.FromString(reply.data))
    (found,) = result.results
    allowed = judge.allowed(message)
    search = message.searches[0]
    assert found.status == "ok"
    assert bool(found.num_items) == bool(allowed) == bool(found.num_valid)
    assert found.num_items <= (search.num_results or 50)
    assert len(set(found.item_ids.tolist())) == found.num_items
    assert np.isfinite(found.scores).all()
    assert (np.diff(found.scores) <= 0).all()
    assert found.keys is not None
    for item_id, key, sid in zip(found.item_ids.tolist(), found.keys, found.sids, strict=True):
        item = allowed[item_id]
        assert (key, tuple(sid.tolist())) == (item.key, item.sid)
    if message.request_id:
        assert result.request_id == reply.trailing["x-request-id"] == message.request_id


class Trial:
    """One serving process under fire; counts what came back."""

    def __init__(self, world: World, target: str) -> None:
        self.world, self.target = world, target
        self.config = RuntimeConfig.from_yaml(world.config, OVERRIDES)
        self.judge = Judge(
            world.catalog, self.config.limits, "items", 64, len(PREFIX) + len(SUFFIX)
        )
        self.counts: collections.Counter[str] = collections.Counter()
        history = world.catalog.items[3:9]
        self.good = RecRequest(
            "good",
            history_item_ids=np.array([item.item_id for item in history]),
            searches=(Search(beam_width=8, num_results=500),),
        )
        self.good_history = history
        self.expected: SearchResult | None = None

    async def run(self, payloads: Sequence[Payload]) -> None:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(self.target, options=options) as channel:
            for start in range(0, len(payloads), BETWEEN_GOOD_ONES):
                await self._check_good(channel)
                left = list(reversed(payloads[start : start + BETWEEN_GOOD_ONES]))
                await asyncio.gather(*(self._work(channel, left) for _ in range(CONCURRENT)))
            await self._check_good(channel)

    async def _work(self, channel: Any, left: list[Payload]) -> None:
        while left:
            payload = left.pop()
            reply = await send(channel, payload.data)
            try:
                self._check(payload, reply)
            except AssertionError as error:
                raise AssertionError(f"payload {payload}: {reply}: {error}") from error

    def _check(self, payload: Payload, reply: Reply) -> None:
        self.counts[reply.code] += 1
        self.counts[f"{payload.kind} {reply.code}"] += 1
        assert reply.code == self.judge.verdict(payload.data)
        if reply.code == "OK":
            check_answer(self.judge, payload.data, reply)
        else:
            check_failure(reply)
        if "x-request-id" in reply.trailing:
            assert all(" " < c <= "~" for c in reply.trailing["x-request-id"])
        else:
            is_beyond = len(payload.data) > self.config.limits.max_message_bytes + 2**20
            assert is_beyond, "gRPC itself refuses only what is far too large"

    async def _check_good(self, channel: Any) -> None:
        """The same request has the same right answer before, between and after; what is cached of it rounds otherwise."""
        from_wire = request_bytes(self.good)
        reply = await send(channel, from_wire)
        assert reply.code == "OK", reply
        result = result_from_proto(pb.RecommendResponse.FromString(reply.data))
        (found,) = result.results
        if self.expected is None:
            self.world.check(self.good, list(self.good_history), found)
            self.expected = found
        assert found.item_ids.tolist() == self.expected.item_ids.tolist()
        np.testing.assert_allclose(found.scores, self.expected.scores, rtol=0, atol=1e-5)


def request_bytes(request: RecRequest) -> bytes:
    return request_to_proto(request).SerializeToString()


def put_on_trial(world: World, count: int, seed: int) -> tuple[Trial, float]:
    """Send `count` payloads to a process of its own; check its log and its end."""
    sets = [part for override in OVERRIDES for part in ("--set", override)]
    command = ["-m", "xgr_runtime.cli", "serve", "--config", str(world.config), *sets]
    log = world.config.parent / "log.txt"
    with log.open("w") as errors, serving(command, errors) as (process, target):
        trial = Trial(world, target)
        source = PayloadSource(seed, world.catalog, trial.config.limits, vocab_size=64)
        payloads = source.draw(count)
        start_s = time.monotonic()
        asyncio.run(trial.run(payloads))
        seconds = time.monotonic() - start_s
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    lines = log.read_text(encoding="utf-8").splitlines()
    wrong = [line for line in lines if LOG_LINE.fullmatch(line) is None]
    assert not wrong, wrong[:5]
    assert log.stat().st_size <= MAX_LOG_BYTES_PER_CALL * (count + 1000)
    return trial, seconds


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def run_and_report(
    world: World, count: int, seed: int, capsys: pytest.CaptureFixture[str]
) -> collections.Counter[str]:
    trial, seconds = put_on_trial(world, count, seed)
    with capsys.disabled():
        counts = dict(sorted(trial.counts.items()))
        sys.stdout.write(f"\n{count} payloads, seed {seed}: {seconds:.1f} s: {counts}\n")
    return trial.counts


def test_payloads_get_the_status_they_deserve(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = run_and_report(world, 400, 1, capsys)
    assert counts["OK"] >= 80
    assert counts["INVALID_ARGUMENT"] >= 80


@pytest.mark.slow
def test_ten_thousand_payloads_get_the_status_they_deserve(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = run_and_report(world, 10_000, 2, capsys)
    assert counts["OK"] >= 2000
    assert counts["INVALID_ARGUMENT"] >= 2000
    assert counts["NOT_FOUND"] >= 20
    assert counts["RESOURCE_EXHAUSTED"] >= 50
