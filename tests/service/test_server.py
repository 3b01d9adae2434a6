"""Listening, health, and every way to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.service.process import PATIENT, at_once, hearing_hangups, serving
from tests.service.servers import DRAIN_S, running, with_free_port
from tests.service.stand_in import Hold, StandInEngine, answer
from tests.service.waiting import PATIENCE_S, until, wait_until
from xgr_runtime.config import RuntimeConfig, ServiceConfig
from xgr_runtime.errors import ConfigError, DeadlineExceeded, EngineClosed
from xgr_runtime.service import server
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2_grpc
from xgr_runtime.service.client import AsyncRecommendClient, RecommendClient
from xgr_runtime.service.rpc_errors import ServiceError
from xgr_runtime.service.server import (
    FLUSH_S,
    HOLD_S,
    RecommendServer,
    ServeEnd,
    serve,
)
from xgr_runtime.service.translate import request_to_proto
from xgr_runtime.types import RecRequest, RecResult, Search

if TYPE_CHECKING:
    import subprocess

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
HISTORY = np.array([1, 2], dtype=np.int64)
NUM_CLIENTS = 8


def asking(catalog: str, request_id: str = "") -> RecRequest:
    """A request that the stand-in treats as it does its catalogue."""
    return RecRequest(request_id, history_item_ids=HISTORY, searches=(Search(catalog=catalog),))


async def check(channel: Any, service: str = "") -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


def test_health_is_known_for_the_server_and_the_service() -> None:
    async def main() -> None:
        async with running(StandInEngine()) as (_, target), grpc.aio.insecure_channel(target) as c:
            assert await check(c) == SERVING
            assert await check(c, "xgr.v1.RecommendService") == SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(c, "other.Service")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(main())


def test_draining_turns_health_refuses_new_calls_and_answers_old_ones() -> None:
    async def main() -> None:
        engine = StandInEngine()
        async with (
            running(engine) as (server, target),
            AsyncRecommendClient(target, timeout_s=PATIENCE_S) as client,
            grpc.aio.insecure_channel(target) as channel,
        ):
            watch_stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = watch_stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            slow = asyncio.ensure_future(client.recommend(asking("held")))
            await until(lambda: engine.requests)
            stopping = asyncio.ensure_future(server.stop(asyncio.Event()))
            assert (await watch.read()).status == NOT_SERVING
            assert await check(channel) == NOT_SERVING
            with pytest.raises(EngineClosed, match="shutting down"):
                await client.recommend(asking("films"))
            engine.let_go()
            assert (await slow).results[0].num_items == 3
            # The open health watch must not use up drain_s, which is far longer.
            assert await asyncio.wait_for(stopping, PATIENCE_S) == 0
            assert len(engine.requests) == 1
            with pytest.raises(ServiceError):
                await client.recommend(asking("films"))

    asyncio.run(main())


def test_a_drain_that_takes_too_long_cuts_off_and_says_how_many() -> None:
    async def main() -> None:
        engine = StandInEngine()
        async with (
            running(engine, drain_s=0.2) as (server, target),
            AsyncRecommendClient(target, timeout_s=PATIENCE_S) as client,
        ):
            calls = [asyncio.ensure_future(client.recommend(asking("wait"))) for _ in range(3)]
            await until(lambda: len(engine.requests) == 3)
            assert await server.stop(asyncio.Event()) == 3
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(outcome, EngineClosed) for outcome in outcomes)
            assert "before the answer was ready" in str(outcomes[0])
            assert len(engine.cancelled) == 3

    asyncio.run(main())


def test_a_port_in_use_is_refused_with_the_systems_reason(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def main() -> None:
        async with running(StandInEngine()) as (_, target):
            port = int(target.rpartition(":")[2])
            expected = rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use; .*port"
            config = RuntimeConfig(service=ServiceConfig(port=port))
            second = RecommendServer(StandInEngine(), config)
            with pytest.raises(ConfigError, match=expected):
                await second.start()

    asyncio.run(main())
    assert capfd.readouterr().err == ""


def test_serving_ends_when_the_engine_stops_by_itself() -> None:
    async def main() -> ServeEnd:
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        ending = asyncio.ensure_future(serve(StandInEngine(), with_free_port(), address.set_result))
        async with AsyncRecommendClient(await address, timeout_s=PATIENCE_S) as client:
            request = RecRequest(
                history_item_ids=HISTORY, searches=(Search(catalog="raise:EngineClosed"),)
            )
            with pytest.raises(EngineClosed, match="the engine has stopped"):
                await client.recommend(request)
        return await asyncio.wait_for(ending, PATIENCE_S)

    assert asyncio.run(main()) is ServeEnd.ENGINE_CLOSED


def test_an_engine_that_stops_without_any_request_ends_the_service() -> None:
    async def main() -> ServeEnd:
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        engine = StandInEngine()
        ending = asyncio.ensure_future(serve(engine, with_free_port(), address.set_result))
        async with grpc.aio.insecure_channel(await address) as channel:
            watch_stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = watch_stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            engine.stopped.set()
            assert (await watch.read()).status == NOT_SERVING
            # The open health watch must not use up drain_s, which is far longer.
            return await asyncio.wait_for(ending, PATIENCE_S)

    assert asyncio.run(main()) is ServeEnd.ENGINE_CLOSED


def test_an_engine_that_stops_during_a_drain_is_told() -> None:
    async def main() -> None:
        engine = StandInEngine()
        async with (
            running(engine) as (server, target),
            AsyncRecommendClient(target, timeout_s=PATIENCE_S) as client,
        ):
            call = asyncio.ensure_future(client.recommend(asking("held")))
            await until(lambda: engine.requests)
            stopping = asyncio.ensure_future(server.stop(asyncio.Event()))
            engine.stopped.set()
            await until(server.servicer.engine_closed.is_set)
            engine.let_go()
            assert (await call).results
            assert await stopping == 0
            assert server.servicer.engine_closed.is_set()

    asyncio.run(main())


def wait_until_draining(target: str) -> None:
    """Until the service tells balancers that it ends: calls that come from now on are refused."""
    with grpc.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        def is_draining() -> bool:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            return bool(reply.status == NOT_SERVING)

        wait_until(is_draining)


@pytest.mark.e2e
def test_a_signal_drains_the_process() -> None:
    at_once(drain_by, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])


def drain_by(number: signal.Signals) -> None:
    command = ["-m", "tests.service.serve_stand_in", str(DRAIN_S)]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(hearing_hangups(command)) as (process, target),
        RecommendClient(target, timeout_s=PATIENCE_S) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        hold = Hold(Path(folder))
        assert client.wait_until_serving(PATIENCE_S)
        calls = [pool.submit(client.recommend, asking(hold.catalog, f"r{i}")) for i in range(8)]
        try:
            wait_until(lambda: hold.num_come() == 8)
            process.send_signal(number)
            wait_until_draining(target)
        finally:
            hold.let_go()
        assert [call.result(PATIENCE_S).request_id for call in calls] == [f"r{i}" for i in range(8)]
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, output.strip(), errors) == (0, "DRAINED", "")


@pytest.mark.e2e
def test_the_second_signal_stops_at_once(tmp_path: Path) -> None:
    with (
        serving(["-m", "tests.service.serve_stand_in", str(DRAIN_S)]) as (process, target),
        RecommendClient(target, timeout_s=2 * PATIENCE_S) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        hold = Hold(tmp_path)
        call = pool.submit(client.recommend, asking(hold.catalog))
        try:
            wait_until(lambda: hold.num_come() == 1)
            process.send_signal(signal.SIGTERM)
            wait_until_draining(target)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            hold.let_go()
        assert (process.returncode, output.strip()) == (0, "CUT_OFF")
        with pytest.raises(EngineClosed):
            call.result(PATIENCE_S)


@pytest.mark.e2e
def test_clients_that_never_pause_see_answers_or_unavailable() -> None:
    """Half of the clients have a connection of their own; a health watch is open all the time."""
    at_once(never_pause, ["DRAINED", "CUT_OFF"])


def never_pause(end: str) -> None:
    drain_s = str(DRAIN_S) if end == "DRAINED" else "0.3"
    command = [*PATIENT, "tests.service.serve_stand_in", drain_s]
    with tempfile.TemporaryDirectory() as folder, serving(command) as (process, target):
        codes = asyncio.run(call_until_stopped(process, target, Hold(Path(folder)), end))
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output.strip(), errors) == (0, end, "")
    assert set(codes) <= {"OK", "UNAVAILABLE"}, {code: codes.count(code) for code in set(codes)}
    assert "UNAVAILABLE" in codes
    assert ("OK" in codes) == (end == "DRAINED")


async def call_until_stopped(
    process: subprocess.Popen[str], target: str, hold: Hold, end: str
) -> list[str]:
    """The statuses of calls that are answered, or none of them, until the process has ended by SIGTERM."""
    codes: list[str] = []
    request = request_to_proto(asking("wait:0.01" if end == "DRAINED" else hold.catalog))

    async def call_until_it_ends(channel: Any) -> None:
        stub = recommend_pb2_grpc.RecommendServiceStub(channel)  # type: ignore[no-untyped-call]
        while process.poll() is None:
            try:
                await stub.Recommend(request, timeout=PATIENCE_S)
                codes.append("OK")
            except grpc.aio.AioRpcError as error:
                codes.append(error.code().name)

    async with contextlib.AsyncExitStack() as stack:
        own = [("grpc.use_local_subchannel_pool", 1)]
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(target, options=own if i % 2 else None)
            )
            for i in range(NUM_CLIENTS)
        ]
        watch_stub: Any = health_pb2_grpc.HealthStub(channels[0])
        watch = watch_stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        loops = [asyncio.ensure_future(call_until_it_ends(channel)) for channel in channels]
        if end == "DRAINED":
            await until(lambda: len(codes) >= 20 * NUM_CLIENTS)
        else:
            await until(lambda: hold.num_come() == NUM_CLIENTS)
        process.send_signal(signal.SIGTERM)
        await asyncio.gather(*loops)
    return codes


def test_a_stop_leaves_callers_the_time_that_the_service_is_shipped_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tests of whole stops give more: callers on a machine that is held up need it."""
    monkeypatch.setattr(server, "FLUSH_S", FLUSH_S)
    steps: list[tuple[object, ...]] = []

    def note(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Each call of it is a step."""
        call = getattr(owner, name)

        def noted(*arguments: object) -> Any:
            steps.append((name, *arguments))
            return call(*arguments)

        patch.setattr(owner, name, noted)

    async def main() -> None:
        async with running(StandInEngine()) as (stopping, _):
            with monkeypatch.context() as patch:
                note(patch, stopping.servicer, "hold_refusals")
                note(patch, stopping.servicer, "end_calls")
                note(patch, stopping._server, "stop")
                note(patch, asyncio, "sleep")
                assert await stopping._close() == 0

    asyncio.run(main())
    # Answers and refusals that went out before need the time of a round trip to bring the next calls here, before gRPC closes
    # connections to further ones and again before all are answered.
    assert steps == [
        ("hold_refusals",),
        ("sleep", HOLD_S),
        ("stop", HOLD_S + FLUSH_S),
        ("sleep", HOLD_S),
        ("end_calls",),
    ]
    assert HOLD_S >= 0.05, "a round trip within a continent"
    # gRPC's grace is used up by the second pause first; what is left of it is for answers to leave.
    assert FLUSH_S > HOLD_S


@pytest.mark.parametrize("is_answered", [True, False])
def test_callers_that_leave_in_the_moment_of_their_answer_are_no_errors(
    caplog: pytest.LogCaptureFixture, is_answered: bool
) -> None:
    """gRPC has a traceback for each of them; the service's own answer and its refusal end the same way."""

    class JustInTime(StandInEngine):
        async def submit(self, request: RecRequest) -> RecResult:
            assert request.deadline_s is not None
            await asyncio.sleep(request.deadline_s - time.monotonic() - 0.0005)
            if is_answered:
                return answer(request)
            raise DeadlineExceeded("too late")

    async def main() -> set[type]:
        request = RecRequest(history_item_ids=HISTORY)
        kinds: set[type] = set()
        async with (
            running(JustInTime()) as (_, target),
            AsyncRecommendClient(target, timeout_s=0.1) as client,
        ):
            for _ in range(5):
                calls = (client.recommend(request) for _ in range(150))
                kinds.update(map(type, await asyncio.gather(*calls, return_exceptions=True)))
        return kinds

    assert asyncio.run(main()) <= {RecResult, DeadlineExceeded}
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
