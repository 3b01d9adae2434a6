"""The serving process and every way it ends under load: SIGTERM once and twice, SIGKILL and a restart, a broken engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.helpers.load import Alone, Content, make_contents
from tests.service.process import PATIENT, ROOT, at_once, serving
from tests.service.servers import is_taken_in, running
from tests.service.stand_in import StandInEngine
from tests.service.waiting import PATIENCE_S, until
from tests.service.world import World, make_world
from xgr_runtime import Engine, RuntimeConfig
from xgr_runtime.config import ServiceConfig
from xgr_runtime.errors import EngineClosed, XgrError
from xgr_runtime.service.catalog_admin_client import CatalogAdminClient
from xgr_runtime.service.client import DROPPED, AsyncRecommendClient
from xgr_runtime.service.client_output import status_name
from xgr_runtime.service.rpc_errors import ServiceError
from xgr_runtime.service.server import RecommendServer
from xgr_runtime.types import RecRequest, RecResult, Search

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = pytest.mark.e2e
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PROBE_S = 0.005


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def alone(world: World) -> Iterator[Alone]:
    config = RuntimeConfig.from_yaml(world.config, ["scheduler.max_wait_ms=0"])
    with Engine.from_config(config) as engine:
        yield Alone(world, engine)


@pytest.fixture(scope="module")
def contents(world: World) -> list[Content]:
    made = make_contents(world, np.random.default_rng(7), 60)
    return [content for content in made if not content.is_bad]


def command(world: World, *overrides: str, port: int = 0) -> list[str]:
    return ["-m", "xgr_runtime.cli", "serve", *options_of(world, *overrides, port=port)]


def held_command(world: World, *overrides: str) -> list[str]:
    """Its engine answers nobody from SIGUSR1 to SIGUSR2."""
    return [*PATIENT, "tests.e2e.serve_held", *options_of(world, *overrides)]


def options_of(world: World, *overrides: str, port: int = 0) -> list[str]:
    sets = [part for override in overrides for part in ("--set", override)]
    return ["--config", str(world.config), "--port", str(port), *sets, "--log-level", "error"]


@dataclass
class Call:
    """One call of the load: when it was sent and ended, and with what."""

    content: Content
    sent_s: float
    end_s: float = 0.0
    outcome: RecResult | XgrError | None = None

    @property
    def status(self) -> str:
        """DROPPED is a call that ended without any answer: CANCELLED to gRPC, and UNAVAILABLE to the client's user."""
        if isinstance(self.outcome, XgrError):
            cause: Any = self.outcome.__cause__
            is_grpc = isinstance(cause, grpc.RpcError)
            if is_grpc and cause.code() is grpc.StatusCode.CANCELLED:
                return "DROPPED"
            return status_name(self.outcome)
        return "OK" if self.outcome is not None else "OPEN"


@dataclass
class Load:
    """Callers that never pause, each with its next content, on connections of their own in part."""

    contents: Sequence[Content]
    calls: list[Call] = field(default_factory=list)
    is_over: bool = False

    async def call_until_over(self, client: AsyncRecommendClient) -> None:
        while not self.is_over:
            await self.call(client)

    async def call(self, client: AsyncRecommendClient) -> Call:
        number = len(self.calls)
        call = Call(self.contents[number % len(self.contents)], time.monotonic())
        self.calls.append(call)
        request = dataclasses.replace(call.content.request, request_id=f"r{number}")
        try:
            call.outcome = await client.recommend(request)
        except XgrError as error:
            call.outcome = error
            await asyncio.sleep(0.01)
        call.end_s = time.monotonic()
        return call

    def check_answers(self, alone: Alone) -> int:
        """Every answer is right; how many there are."""
        answered = [call for call in self.calls if isinstance(call.outcome, RecResult)]
        for call in answered:
            assert isinstance(call.outcome, RecResult)
            alone.check(call.content, call.outcome)
        return len(answered)

    async def probe_until(
        self, client: AsyncRecommendClient, condition: Callable[[], object]
    ) -> list[asyncio.Task[Call]]:
        """Send one call after the other, ended or not, until it is true; the calls."""
        probes: list[asyncio.Task[Call]] = []

        async def probe() -> None:
            while True:
                probes.append(asyncio.ensure_future(self.call(client)))
                await asyncio.sleep(PROBE_S)

        probing = asyncio.ensure_future(probe())
        try:
            await until(condition)
        finally:
            probing.cancel()
        return probes

    @property
    def num_ok(self) -> int:
        return sum(call.status == "OK" for call in self.calls)

    @property
    def refused(self) -> list[Call]:
        return [call for call in self.calls if call.status == "UNAVAILABLE"]

    def statuses(self) -> dict[str, int]:
        names = [call.status for call in self.calls]
        return {name: names.count(name) for name in sorted(set(names))}


async def watch_health(client: AsyncRecommendClient, seen: list[tuple[int, float]]) -> None:
    """Note each status of a health watch on a client's connection and when it came, until the watch ends."""
    stub: Any = health_pb2_grpc.HealthStub(client._channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for reply in watch:
            seen.append((reply.status, time.monotonic()))
    assert await watch.code() is grpc.StatusCode.UNAVAILABLE


async def stop_under_load(
    load: Load, health: list[tuple[int, float]], process: subprocess.Popen[str], target: str
) -> tuple[float, list[Call]]:
    """SIGTERM comes to a long queue that is held until callers have heard of it; when it was sent, and the calls of that queue."""
    clients = [AsyncRecommendClient(target, timeout_s=120) for _ in range(6)]
    watch = asyncio.ensure_future(watch_health(clients[1], health))
    callers = [asyncio.ensure_future(load.call_until_over(clients[i % 6])) for i in range(24)]
    await until(lambda: health and load.num_ok > 20)
    process.send_signal(signal.SIGUSR1)
    queued = [asyncio.ensure_future(load.call(clients[0])) for _ in range(200)]
    await asyncio.sleep(0)
    await is_taken_in(clients[0])
    process.send_signal(signal.SIGTERM)
    signal_s = time.monotonic()
    # On the connection of the watch, where what is sent first comes first.
    probes = await load.probe_until(clients[1], lambda: len(health) > 1)
    assert (await load.call(clients[1])).status == "UNAVAILABLE"
    process.send_signal(signal.SIGUSR2)
    accepted = await asyncio.gather(*queued)
    await asyncio.gather(*probes)
    while process.poll() is None:
        await asyncio.sleep(0.01)
    load.is_over = True
    await asyncio.gather(*callers, watch)
    for client in clients:
        await client.close()
    return signal_s, accepted


def check_order(load: Load, told_s: float) -> None:
    """Health turns, which was read at told_s, then calls are refused, and those in flight are answered."""
    late = [c for c in load.calls if c.sent_s > told_s]
    assert {call.status for call in late} == {"UNAVAILABLE"}
    # One is sent every few milliseconds; those on their way may be refused beside it.
    early = [c for c in load.refused if c.end_s < told_s]
    assert len(early) <= 10, "callers heard of it before the health watch"
    answered_s = max(c.end_s for c in load.calls if c.status == "OK")
    assert told_s < answered_s, "health turns before the drain, not after it"


def test_sigterm_under_load_loses_nothing(
    world: World, alone: Alone, contents: list[Content]
) -> None:
    load, health = Load(contents), list[tuple[int, float]]()
    options = ("scheduler.max_queue=4000", "service.drain_s=120")
    with serving(held_command(world, *options)) as (process, target):
        signal_s, accepted = asyncio.run(stop_under_load(load, health, process, target))
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    assert set(load.statuses()) == {"OK", "UNAVAILABLE"}, load.statuses()
    assert load.check_answers(alone) > 200
    assert all(call.end_s > signal_s for call in accepted), "all were in flight"
    assert {call.status for call in accepted} == {"OK"}
    assert [status for status, _ in health] == [SERVING, NOT_SERVING]
    check_order(load, told_s=health[1][1])


def test_a_second_signal_stops_at_once(world: World, contents: list[Content]) -> None:
    load, cut_off = Load(contents), list[Call]()

    async def drive(process: subprocess.Popen[str], target: str) -> float:
        async with AsyncRecommendClient(target, timeout_s=600) as client:
            assert (await load.call(client)).status == "OK"
            process.send_signal(signal.SIGUSR1)
            queued = [asyncio.ensure_future(load.call(client)) for _ in range(380)]
            await asyncio.sleep(0)
            await is_taken_in(client)
            process.send_signal(signal.SIGTERM)
            # Two signals at once are one: the first has to be heard.
            probes = await load.probe_until(client, lambda: load.refused)
            process.send_signal(signal.SIGTERM)
            second_s = time.monotonic()
            cut_off.extend(await asyncio.gather(*queued))
            await asyncio.gather(*probes)
            process.send_signal(signal.SIGUSR2)  # the batch that was about to begin
            return second_s

    options = ("scheduler.max_queue=4000", "service.drain_s=300")
    with serving(held_command(world, *options)) as (process, target):
        second_s = asyncio.run(drive(process, target))
        _, errors = process.communicate(timeout=PATIENCE_S)
        seconds = time.monotonic() - second_s
    assert process.returncode == 1
    assert errors == "xgr serve: requests were cut off\n"
    assert set(load.statuses()) == {"OK", "UNAVAILABLE"}, load.statuses()
    assert {call.status for call in cut_off} == {"UNAVAILABLE"}
    assert seconds < PATIENCE_S, f"the process ended {seconds:.1f} s after the second signal"


def stream_lines(
    target: str, lines: Sequence[str], late: Sequence[str], stop: Callable[[], None]
) -> tuple[int, list[str], str]:
    """`xgr client --input -`, stopped in the midst of its lines and fed the late ones then; exit code, output and errors."""
    options = ["--target", target, "--input", "-", "--json", "--concurrency", "8"]
    options += ["--beam-width", "8", "--timeout-s", str(PATIENCE_S)]
    client = subprocess.Popen(
        [sys.executable, "-m", "xgr_runtime.cli", "client", *options],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    assert client.stderr is not None
    with client:
        client.stdin.write("\n".join(lines) + "\n")
        client.stdin.flush()
        first = client.stdout.readline()
        stop()
        client.stdin.write("\n".join(late) + "\n")
        client.stdin.close()
        # Not `communicate`: it would miss what came in one piece with the first line.
        rest, errors = client.stdout.read(), client.stderr.read()
        return client.wait(PATIENCE_S), [first, *rest.splitlines()], errors


def test_clients_that_stream_lines_hear_of_the_stop(
    world: World, alone: Alone, contents: list[Content]
) -> None:
    """Answers, then refusals, each line once and in order, and exit code 3."""
    histories = [c.history for c in contents] * 60
    lines = [
        json.dumps({"request_id": f"l{i}", "history_item_ids": [h.item_id for h in history]})
        for i, history in enumerate(histories[:450])
    ]
    patient = [*PATIENT, "xgr_runtime.cli", "serve", *options_of(world)]
    with serving(patient) as (process, target):
        stop = partial(process.send_signal, signal.SIGTERM)
        code, replies, errors = stream_lines(target, lines[:400], lines[400:], stop)
        _, server_errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, server_errors, errors, code) == (0, "", "", 3)
    answers = [json.loads(line) for line in replies]
    assert [a["request_id"] for a in answers] == [f"l{i}" for i in range(450)]
    told = [a["error"]["message"] for a in answers if "error" in a]
    assert not [text for text in told if DROPPED in text]
    codes = [a["error"]["code"] if "error" in a else "OK" for a in answers]
    assert set(codes) == {"OK", "UNAVAILABLE"}
    assert set(codes[400:]) == {"UNAVAILABLE"}
    request = dataclasses.replace(contents[0].request, searches=(Search(beam_width=8),))
    (expected,) = alone.engine.recommend([request])
    items = [item["item_id"] for item in answers[0]["results"][0]["items"]]
    assert items == expected.results[0].item_ids.tolist()


def test_sigkill_and_a_restart_on_the_same_port(
    world: World, alone: Alone, contents: list[Content]
) -> None:
    """Calls in flight fail as UNAVAILABLE, the same client gets answers from the next process without being made anew."""
    load = Load(contents)

    def num_since(start_s: float) -> int:
        return sum(call.status == "OK" and call.sent_s > start_s for call in load.calls)

    async def drive(first: subprocess.Popen[str], target: str) -> tuple[float, int]:
        port = int(target.rpartition(":")[2])
        async with AsyncRecommendClient(target, timeout_s=60) as client:
            callers = [asyncio.ensure_future(load.call_until_over(client)) for _ in range(16)]
            await until(lambda: load.num_ok > 20)
            first.kill()
            killed_s = time.monotonic()
            restart = serving(command(world, port=port))
            second, again = await asyncio.to_thread(restart.__enter__)
            assert again == target
            up_s = time.monotonic()
            await until(lambda: num_since(killed_s) > 0)
            back_s = time.monotonic() - up_s
            await until(lambda: num_since(killed_s) > 20)
            load.is_over = True
            await asyncio.gather(*callers)
            second.send_signal(signal.SIGTERM)
            _, errors = await asyncio.to_thread(second.communicate, timeout=PATIENCE_S)
            restart.__exit__(None, None, None)
            assert (second.returncode, errors) == (0, "")
        return back_s, num_since(killed_s)

    with serving(command(world)) as (process, target):
        back_s, num_after = asyncio.run(drive(process, target))
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert set(load.statuses()) == {"OK", "UNAVAILABLE"}, load.statuses()
    assert load.check_answers(alone) > num_after > 20
    sys.stdout.write(f"the client was back {back_s:.2f} s after the restart\n")
    assert back_s < 30


def test_an_engine_that_breaks_under_load(
    world: World, alone: Alone, contents: list[Content]
) -> None:
    """In the middle of a batch, with others queued: every call ends, health tells of it, and the process gives up."""
    load, health = Load(contents), list[tuple[int, float]]()

    async def drive(process: subprocess.Popen[str], target: str) -> float:
        async with AsyncRecommendClient(target, timeout_s=60) as client:
            watch = asyncio.ensure_future(watch_health(client, health))
            callers = [asyncio.ensure_future(load.call_until_over(client)) for _ in range(32)]
            await until(lambda: health and load.num_ok > 20)
            process.send_signal(signal.SIGUSR1)
            start_s = time.monotonic()
            await watch
            load.is_over = True
            await asyncio.gather(*callers)
            return start_s

    faulty = [*PATIENT, "tests.service.serve_faulty", "batch"]
    with serving([*faulty, *options_of(world, "service.drain_s=300")]) as (process, target):
        start_s = asyncio.run(drive(process, target))
        _, errors = process.communicate(timeout=PATIENCE_S)
        seconds = time.monotonic() - start_s
    assert process.returncode == 1, errors
    assert errors.splitlines()[-1] == "xgr serve: the engine stopped by itself"
    assert "SystemError: beyond repair" in errors
    assert [status for status, _ in health] == [SERVING, NOT_SERVING]
    assert set(load.statuses()) <= {"OK", "UNAVAILABLE"}, load.statuses()
    assert load.check_answers(alone) > 20
    closed = [c for c in load.calls if isinstance(c.outcome, (EngineClosed, ServiceError))]
    assert len(closed) >= 16, "those of the batch, those in the queue and those that came later"
    assert seconds < PATIENCE_S, "no drain is waited for"


def test_sigterm_during_the_start(world: World) -> None:
    """Nothing was accepted: exit code 0 and no traceback. As in a container, where an unhandled SIGTERM is ignored."""
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" TERM; exec "$@"', "sh", sys.executable, *command(world)[:-2]],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "loaded version" not in (line := process.stderr.readline()):
        assert line, "the server ended before it loaded anything"
    process.send_signal(signal.SIGTERM)
    sent_s = time.monotonic()
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - sent_s < PATIENCE_S
    assert "Traceback" not in errors
    assert process.returncode == 0
    assert output == "" or output.startswith("xgr serve: listening on ")


def start_loads(client: CatalogAdminClient, faults: list[XgrError]) -> list[threading.Thread]:
    """Two threads that load a catalogue and keep what they are told; the server has taken in both calls."""
    is_sent = threading.Semaphore(0)
    method = client._stub.LoadCatalog

    def send(request: Any, timeout: float) -> Any:
        call = method.future(request, timeout=timeout)
        is_sent.release()
        return call.result()

    def load() -> None:
        try:
            client.load("items", "items.xgrc")
        except XgrError as error:
            faults.append(error)

    client._stub.LoadCatalog = send
    client.catalogs()  # connected
    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
        assert is_sent.acquire(timeout=PATIENCE_S)
    client.catalogs()  # answered in its turn
    return threads


def test_sigterm_during_a_load_of_a_catalogue(world: World) -> None:
    """The caller of the load is told at once, and the process ends: nobody waits for the load any more."""
    faulty = ["-m", "tests.service.serve_faulty", "slow-load"]
    admin = (
        "service.allow_catalog_admin=true",
        f"service.catalog_folder={world.config.parent}",
        "service.drain_s=300",
    )
    faults: list[XgrError] = []
    with (
        serving([*faulty, *options_of(world, *admin)]) as (process, target),
        CatalogAdminClient(target, timeout_s=PATIENCE_S) as client,
    ):
        threads = start_loads(client, faults)
        assert process.stderr is not None
        assert process.stderr.readline().startswith("loading ")
        process.send_signal(signal.SIGTERM)
        start_s = time.monotonic()
        for thread in threads:
            thread.join()
        assert ["shutting down" in str(fault) for fault in faults] == [True] * 2
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert time.monotonic() - start_s < PATIENCE_S


def test_signals_that_never_end_do_not_make_a_failure(world: World) -> None:
    at_once(partial(send_signals_until_the_end, world), [0.0003, 0.01])


def send_signals_until_the_end(world: World, pause_s: float) -> None:
    with serving(command(world)) as (process, _):
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(pause_s)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.slow
def test_a_client_is_back_within_seconds_of_a_long_outage() -> None:
    """Left to itself gRPC would try again after ever longer pauses, some twelve seconds after an outage of thirty."""

    async def main() -> float:
        stop_now = asyncio.Event()
        stop_now.set()
        request = RecRequest(history_item_ids=np.array([1]))
        async with running(StandInEngine()) as (_, target):
            client = AsyncRecommendClient(target, timeout_s=PATIENCE_S)
            assert await client.recommend(request)
        load = Load([Content([], request)])
        caller = asyncio.ensure_future(load.call_until_over(client))
        await asyncio.sleep(30)
        port = int(target.rpartition(":")[2])
        second = RecommendServer(StandInEngine(), RuntimeConfig(service=ServiceConfig(port=port)))
        await second.start()
        up_s = time.monotonic()
        await until(lambda: load.num_ok)
        seconds = min(call.end_s for call in load.calls if call.status == "OK") - up_s
        load.is_over = True
        await caller
        await client.close()
        await second.stop(stop_now)
        return seconds

    assert asyncio.run(main()) < 8
