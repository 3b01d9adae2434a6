"""The real engine behind the real service: many kinds of requests at once, and the process from its start to SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.helpers.catalogs import TAGS
from tests.service.process import ROOT, serving
from tests.service.scrape import free_port, get, parse, value
from tests.service.servers import DRAIN_S, is_taken_in, running, running_in_thread
from tests.service.waiting import PATIENCE_S, PROCESS_S, until, wait_until_idle
from tests.service.world import World, make_world
from tests.xschedule.running import Gate
from xgr_runtime import Engine, RuntimeConfig
from xgr_runtime.cli import main
from xgr_runtime.conformance.same_answer import SameAnswerTotals
from xgr_runtime.errors import (
    DeadlineExceeded,
    DeviceError,
    EngineClosed,
    InvalidRequest,
    NotFound,
    Overloaded,
)
from xgr_runtime.hal.discovery import open_device
from xgr_runtime.service.client import AsyncRecommendClient, RecommendClient
from xgr_runtime.service.rpc_errors import ServiceError
from xgr_runtime.types import NORMALIZATIONS, RecRequest, RecResult, Rules, Search

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.helpers.oracle import Item

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def engine(world: World) -> Iterator[Engine]:
    with Engine.from_config(RuntimeConfig.from_yaml(world.config)) as started:
        yield started


def random_request(
    world: World, rng: np.random.Generator, number: int
) -> tuple[RecRequest, list[Item]]:
    """A legal request in one of the four forms, and its history."""
    histories = np.random.default_rng(number % 12)
    history = [
        world.catalog.items[i]
        for i in histories.integers(len(world.catalog.items), size=histories.integers(0, 20))
    ]
    form = rng.choice(["history_item_ids", "history_keys", "history_sids", "prompt_token_ids"])
    given: Any = {
        "history_item_ids": np.array([i.item_id for i in history], np.int64),
        "history_keys": tuple(i.key for i in history),
        "history_sids": np.array([i.sid for i in history], np.uint32).reshape(-1, 3),
        "prompt_token_ids": np.array(world.prompt(history), np.int64),
    }[str(form)]
    rules = [
        Rules(),
        Rules(require=((TAGS[0], TAGS[1]), (TAGS[2],))),
        Rules(exclude_tags=(TAGS[3],)),
        Rules(exclude_item_ids=np.array([i.item_id for i in world.catalog.items[:60]], np.int64)),
        Rules(exclude_keys=tuple(i.key for i in world.catalog.items[40:90])),
        Rules(exclude_history=form in ("history_item_ids", "history_keys")),
    ]
    search = Search(
        beam_width=int(rng.integers(1, 65)),
        normalization=NORMALIZATIONS[rng.integers(3)],
        rules=rules[rng.integers(len(rules))],
        max_items_per_sid=int(rng.integers(1, 4)) if rng.random() < 0.3 else None,
        return_level_scores=bool(rng.random() < 0.3),
    )
    if rng.random() < 0.5:
        widths = tuple(rng.integers(1, 65, 3).tolist())
        search = dataclasses.replace(search, beam_width=None, beam_widths=widths)
    return RecRequest(f"r{number}", searches=(search,), **{str(form): given}), history


async def send(
    client: AsyncRecommendClient, request: RecRequest, cancel_after_s: float | None
) -> RecResult | BaseException:
    task = asyncio.ensure_future(client.recommend(request))
    if cancel_after_s is not None:
        await asyncio.sleep(cancel_after_s)
        task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    return outcome


def check_at_rest(engine: Engine) -> None:
    """Once nothing is asked of it, every page is to be had."""
    wait_until_idle(engine)
    assert engine.pages.num_available == engine.pages.allocator.num_pages - 1
    engine.pages.check_conservation()


@pytest.mark.parametrize("num_requests", [125, pytest.param(200, marks=pytest.mark.slow)])
def test_concurrent_requests_are_right_or_have_a_proper_status(
    world: World, engine: Engine, capsys: pytest.CaptureFixture[str], num_requests: int
) -> None:
    rng = np.random.default_rng(0)
    asked = [random_request(world, rng, i) for i in range(num_requests)]
    cancel_after_s = [
        float(rng.random() * 0.5) if rng.random() < 0.15 else None for _ in range(num_requests)
    ]
    start_s = time.monotonic()
    for i in range(0, num_requests, 25):  # some break the contract, some have hardly any time
        request, history = asked[i]
        bad = dataclasses.replace(request.searches[0], beam_width=None, beam_widths=(3, 3))
        asked[i] = (dataclasses.replace(request, searches=(bad,)), history)
        request, history = asked[i + 1]
        late = dataclasses.replace(request, deadline_s=start_s + i / 1000)
        asked[i + 1] = (late, history)
        cancel_after_s[i] = cancel_after_s[i + 1] = None  # theirs is the only end they may have

    async def drive() -> list[RecResult | BaseException]:
        async with (
            running(engine, engine.config) as (_, target),
            AsyncRecommendClient(target, timeout_s=120) as client,
        ):
            sends = [
                send(client, request, cancel)
                for (request, _), cancel in zip(asked, cancel_after_s, strict=True)
            ]
            return await asyncio.gather(*sends)

    outcomes = asyncio.run(drive())
    check_at_rest(engine)
    totals, counts = SameAnswerTotals(), dict.fromkeys(("ok", "sent alone", "same list"), 0)
    for i, ((request, history), outcome) in enumerate(zip(asked, outcomes, strict=True)):
        if isinstance(outcome, BaseException):
            kind = type(outcome).__name__
            counts[kind] = counts.get(kind, 0) + 1
            assert not isinstance(outcome, InvalidRequest) or i % 25 == 0
            assert not isinstance(outcome, asyncio.CancelledError) or cancel_after_s[i] is not None
            assert not isinstance(outcome, DeadlineExceeded) or request.deadline_s is not None
            proper = (InvalidRequest, asyncio.CancelledError, Overloaded, DeadlineExceeded)
            assert isinstance(outcome, proper), (request, outcome)
            continue
        assert i % 25, "a request that breaks the contract was answered"
        assert outcome.request_id == request.request_id
        assert (outcome.model_version, outcome.template_version) == ("m1", "t1")
        (got,) = outcome.results
        totals.add(world.check(request, history, got))
        if request.searches[0].return_level_scores:
            assert got.level_scores is not None
            np.testing.assert_allclose(got.level_scores.sum(axis=1), got.scores, atol=1e-4)
        counts["ok"] += 1
        if i % 3 == 0:
            (alone,) = engine.recommend([dataclasses.replace(request, deadline_s=None)])
            world.check(request, history, alone.results[0])
            counts["sent alone"] += 1
            counts["same list"] += got.item_ids.tolist() == alone.results[0].item_ids.tolist()
    with capsys.disabled():
        sys.stdout.write(f"\n{num_requests} concurrent requests: {counts}; {totals}\n")
    assert counts["ok"] >= num_requests / 2
    assert counts["InvalidRequest"] >= 5
    assert counts["DeadlineExceeded"] >= 1
    assert counts["same list"] >= 0.95 * counts["sent alone"] > 25


def test_a_full_queue_is_resource_exhausted_and_is_not_kept_full(world: World) -> None:
    config = RuntimeConfig.from_yaml(world.config, ["scheduler.max_queue=4"])
    request = RecRequest(history_keys=(), searches=(Search(beam_width=8),))

    async def drive(engine: Engine) -> list[Any]:
        gate = Gate(engine)
        async with (
            running(engine, config) as (_, target),
            AsyncRecommendClient(target, timeout_s=PATIENCE_S) as client,
        ):
            calls = [asyncio.ensure_future(send(client, request, None)) for _ in range(100)]
            try:  # none is answered until the others were refused
                await until(lambda: sum(call.done() for call in calls) >= 96)
                assert engine.describe()["num_unanswered"] == 4
            finally:
                gate.open()
            outcomes = await asyncio.gather(*calls)
            await client.recommend(request)
            return outcomes

    with Engine.from_config(config) as engine:
        wait_until_idle(engine)
        outcomes = asyncio.run(drive(engine))
        check_at_rest(engine)
    assert Counter(map(type, outcomes)) == {RecResult: 4, Overloaded: 96}


def test_errors_that_need_the_catalogue_name_the_field(world: World, engine: Engine) -> None:
    ids = np.array([world.catalog.items[0].item_id, 10**9], np.int64)
    cases: list[tuple[RecRequest, type[Exception], str]] = [
        (RecRequest(history_item_ids=ids, on_unknown="error"), InvalidRequest, "history_item_ids"),
        (RecRequest(history_sids=np.zeros((1, 2), np.uint32)), InvalidRequest, "history_sids"),
        (RecRequest(prompt_token_ids=np.array([64])), InvalidRequest, "prompt_token_ids"),
        (RecRequest(history_keys=(), searches=(Search(catalog="films"),)), NotFound, "films"),
        (
            RecRequest(history_keys=(), searches=(Search(catalog_version="v9"),)),
            NotFound,
            "v9",
        ),
        (
            RecRequest(
                prompt_token_ids=np.array([1]),
                searches=(Search(rules=Rules(exclude_history=True)),),
            ),
            InvalidRequest,
            "exclude_history",
        ),
    ]

    async def drive() -> None:
        async with (
            running(engine, engine.config) as (_, target),
            AsyncRecommendClient(target, timeout_s=PATIENCE_S) as client,
        ):
            for request, kind, text in cases:
                with pytest.raises(kind, match=text):
                    await client.recommend(request)
            skipped = await client.recommend(RecRequest(history_item_ids=ids))
            assert (skipped.num_history_used, skipped.num_history_unknown) == (1, 1)
            unknown = Search(rules=Rules(require=(("no such tag\x1b[31m" + "x" * 240,),)))
            empty = await client.recommend(RecRequest(history_keys=(), searches=(unknown,)))
            assert (empty.results[0].status, empty.results[0].num_items) == ("ok", 0)
            reason = empty.results[0].reason
            assert "no such tag\\x1b[31mxxx" in reason
            assert reason.isprintable()
            assert len(reason) <= 210

    asyncio.run(drive())
    check_at_rest(engine)


def xgr(*arguments: str, timeout_s: float = PROCESS_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xgr_runtime.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


async def until_draining(target: str) -> None:
    """Until the service tells balancers that it ends: calls that come from now on are refused."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
            pass


async def until_queued(port: int, num_requests: int) -> None:
    """Until the engine of a service with metrics on this port has so many requests."""
    names = ("xgr_waiting_requests", "xgr_running_requests")
    end = time.monotonic() + PATIENCE_S
    while True:
        samples = parse((await get(port))[2])
        if sum(value(samples, name) for name in names) == num_requests:
            return
        assert time.monotonic() < end, samples
        await asyncio.sleep(0.01)


def test_the_commands_serve_ask_and_drain_under_load(world: World, tmp_path: Path) -> None:
    """No batch runs between the first call of the load and the end of the last that comes too late."""
    hold, port = tmp_path / "hold", free_port()
    sets = ["--set", f"service.drain_s={DRAIN_S}", "--set", f"service.metrics_port={port}"]
    command = ["serve", "--config", str(world.config), "--log-level", "error", *sets]
    history = [world.catalog.items[i] for i in (1, 5, 9)]
    ids = ",".join(str(item.item_id) for item in history)
    sids = np.array([item.sid for item in history], np.uint32)
    request = RecRequest(history_sids=sids, searches=(Search(beam_width=4),))

    async def load() -> tuple[list[Any], list[Any], int]:
        async with AsyncRecommendClient(target, timeout_s=2 * PATIENCE_S) as client:
            calls = [asyncio.ensure_future(client.recommend(request)) for _ in range(40)]
            await until_queued(port, 40)
            num_open = sum(not call.done() for call in calls)
            process.send_signal(signal.SIGTERM)
            await until_draining(target)
            late = [client.recommend(request) for _ in range(20)]
            late_ends = await asyncio.gather(*late, return_exceptions=True)
            hold.unlink()
            return await asyncio.gather(*calls, return_exceptions=True), late_ends, num_open

    with serving(["-m", "tests.service.serve_faulty", f"held={hold}", *command[1:]]) as (
        process,
        target,
    ):
        options = ("--history-ids", ids, "--beam-width", "4", "--json")
        patience = ("--timeout-s", str(PATIENCE_S))
        asked = xgr("client", "--target", target, *options, *patience)
        assert (asked.returncode, asked.stderr) == (0, "")
        (found,) = json.loads(asked.stdout)["results"]
        with RecommendClient(target) as client:
            assert client.wait_until_serving(PATIENCE_S)
        hold.touch()
        outcomes, late, num_open = asyncio.run(load())
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, errors) == (0, "")
    assert num_open == 40
    for outcome in outcomes:
        assert isinstance(outcome, RecResult), outcome
        assert [i["item_id"] for i in found["items"]] == outcome.results[0].item_ids.tolist()
    world.check(request, history, outcomes[-1].results[0])
    assert len(late) == 20
    assert all(isinstance(o, (EngineClosed, ServiceError)) for o in late), late


@pytest.mark.parametrize("num_requests", [0, 5])
def test_a_process_whose_engine_dies_ends_by_itself(world: World, num_requests: int) -> None:
    """Nobody asks anything after the failure: health, the waiting requests and the exit code tell of it."""

    async def ask(target: str) -> list[Any]:
        request = RecRequest(history_item_ids=np.array([1, 2], np.int64))
        async with (
            AsyncRecommendClient(target, timeout_s=PATIENCE_S) as client,
            grpc.aio.insecure_channel(target) as channel,
        ):
            watch_stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = watch_stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            calls = [asyncio.ensure_future(client.recommend(request)) for _ in range(num_requests)]
            await asyncio.sleep(0)
            await is_taken_in(client)
            assert not any(call.done() for call in calls)
            process.send_signal(signal.SIGUSR1)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            return await asyncio.gather(*calls, return_exceptions=True)

    command = ["-m", "tests.service.serve_faulty", "idle", "--config", str(world.config)]
    command += ["--set", f"service.drain_s={DRAIN_S}"]
    with serving(command) as (process, target):
        outcomes = asyncio.run(ask(target))
        _, errors = process.communicate(timeout=PATIENCE_S)  # the drain is not used up
    assert len(outcomes) == num_requests
    assert all(isinstance(o, EngineClosed) for o in outcomes), outcomes
    assert not any("beyond repair" in str(o) for o in outcomes), "what it died of is for the log"
    assert process.returncode == 1, errors
    assert errors.splitlines()[-1] == "xgr serve: the engine stopped by itself"
    assert "SystemError: beyond repair" in errors


def absent_device() -> str:
    """A kind of device that this machine does not have."""
    for kind in ("npu", "cuda"):
        try:
            open_device(kind)
        except DeviceError:
            return kind
    raise AssertionError("this machine has every kind of device")


def test_what_cannot_be_loaded_is_exit_code_2_and_one_line(
    world: World, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = world.config.parent
    truncated = folder / "truncated.xgrc"
    truncated.write_bytes((folder / "items.xgrc").read_bytes()[:-1])
    with running_in_thread(engine, engine.config) as target:
        cases = [
            (("--set", "limits.max_beam_widht=3"), "unknown option limits.max_beam_widht"),
            (("--port", "70000"), "service.port"),
            (("--set", f"catalogs.items={truncated}"), "truncated.xgrc"),
            (("--set", f"catalogs.items={folder / 'none.xgrc'}"), "none.xgrc"),
            (("--set", f"model.path={folder / 'none'}"), "none"),
            (("--device", absent_device()), absent_device()),
            (("--port", target.rpartition(":")[2]), f"cannot listen on {target}"),
        ]
        for arguments, text in cases:
            assert main(["serve", "--config", str(world.config), *arguments]) == 2
            captured = capsys.readouterr()
            assert captured.out == ""
            assert text in captured.err
            assert captured.err.count("\n") == 1, captured.err
