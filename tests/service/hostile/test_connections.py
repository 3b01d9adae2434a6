"""Callers that break the rules below the message: other protocols, broken frames, slowness, silence, sudden death.

After each of them the server answers, nothing is left open, and the log says nothing of the inside.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.service.hostile import raw_http2 as raw
from tests.service.hostile.raw_http2 import OPENING, data, frame, headers, message
from tests.service.process import ROOT
from tests.service.servers import running
from tests.service.stand_in import StandInEngine
from tests.service.waiting import PATIENCE_S, until
from xgr_runtime.config import LimitsConfig, RuntimeConfig, ServiceConfig
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service.server import RecommendServer, server_options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


METHOD = "/xgr.v1.RecommendService/Recommend"
HANDSHAKE_S, RECEIVE_S, IDLE_S = 0.5, 0.5, 0.6


def hurrying(**times: float) -> RuntimeConfig:
    """A service that has patience without end but for these times."""
    patient = {"handshake_s": 3600.0, "receive_s": 3600.0, "idle_s": 3600.0}
    return RuntimeConfig(service=ServiceConfig(**(patient | times)))  # type: ignore[arg-type]


PATIENT = hurrying()
HURRIED = hurrying(handshake_s=HANDSHAKE_S, receive_s=RECEIVE_S, idle_s=IDLE_S)
OK, CANCELLED, INVALID, EXHAUSTED, UNIMPLEMENTED, INTERNAL = 0, 1, 3, 8, 12, 13
DEADLINE, REFUSED_BY_HTTP = 4, None
UNAVAILABLE, DEADLINE_EXCEEDED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED


def request(catalog: str = "films", **fields: Any) -> bytes:
    history = pb.Int64Values(values=[10, 20])
    searches = [pb.Search(catalog=catalog)]
    return pb.RecommendRequest(
        history_item_ids=history, searches=searches, **fields
    ).SerializeToString()


GOOD = message(request())


class Stand:
    """A server in this loop around the stand-in engine."""

    def __init__(
        self, server: RecommendServer, engine: StandInEngine, target: str, service: ServiceConfig
    ) -> None:
        self.server, self.engine, self.target = server, engine, target
        self._is_hurried = min(service.handshake_s, service.receive_s, service.idle_s) < PATIENCE_S
        host, _, port = target.rpartition(":")
        self.address = (host, int(port))
        self.threads = ThreadPoolExecutor(80)

    async def exchange(self, sent: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, raw.exchange, self.address, sent)

    async def check_alive(self) -> None:
        """A new client gets the right answer."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        end = time.monotonic() + PATIENCE_S
        async with grpc.aio.insecure_channel(self.target, options=options) as channel:
            call = channel.unary_unary(METHOD)
            while True:
                try:
                    reply = await call(
                        request(), timeout=PATIENCE_S, wait_for_ready=self._is_hurried
                    )
                    break
                except grpc.aio.AioRpcError as error:
                    # A busy machine may bring a connection or a message too late to a server that does not wait.
                    is_late = error.code() in (UNAVAILABLE, DEADLINE_EXCEEDED)
                    if not (self._is_hurried and is_late and time.monotonic() < end):
                        raise
        (result,) = pb.RecommendResponse.FromString(reply).results
        assert result.item_ids == b"".join(i.to_bytes(8, "little") for i in (30, 31, 32))


@asynccontextmanager
async def standing(config: RuntimeConfig = PATIENT) -> AsyncIterator[Stand]:
    engine = StandInEngine()
    async with running(engine, config) as (server, target):
        stand = Stand(server, engine, target, config.service)
        with stand.threads:
            yield stand
        await stand.check_alive()
        await until(lambda: server.servicer.num_in_flight == 0)


def assert_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """No caller's fault is worth more than a line at level info."""
    loud = [r for r in caplog.records if r.levelno > logging.INFO or r.exc_info]
    assert not loud, [record.getMessage() for record in loud]


FRAMES: dict[str, tuple[bytes, tuple[int | None, ...]]] = {
    "a good call": (headers() + data(GOOD), (OK,)),
    "a call that is not half-closed": (headers() + data(GOOD, ends=False), (OK,)),
    "two messages": (headers() + data(GOOD + GOOD), (OK,)),
    "no message at all": (headers(flags=raw.END_HEADERS | raw.END_STREAM), (INVALID,)),
    "an empty stream": (headers() + data(b""), (INVALID,)),
    "half a length": (headers() + data(GOOD[:3]), (INVALID,)),
    "half a message": (headers() + data(message(request(), length=500)), (INVALID,)),
    "an empty message": (headers() + data(message(b"")), (INVALID,)),
    "a message of 4 GiB": (headers() + data(message(b"x", length=2**32 - 1), ends=False), (EXHAUSTED,)),
    "an unknown flag": (headers() + data(message(request(), flag=6)), (OK, INVALID, INTERNAL)),
    "a compressed message": (
        headers(extra=[(b"grpc-encoding", b"gzip")]) + data(message(request(), flag=1)), (UNIMPLEMENTED,)),
    "no time": (headers(extra=[(b"grpc-timeout", b"0n")]) + data(GOOD), (DEADLINE,)),
    "eleven thousand years": (headers(extra=[(b"grpc-timeout", b"99999999H")]) + data(GOOD), (OK,)),
    "another content type": (headers(extra=[(b"content-type", b"text/html")]) + data(GOOD), (OK,)),
    "another method of the service": (headers(raw.METHOD + b"s") + data(GOOD), (UNIMPLEMENTED,)),
    "another service": (headers(b"/a.b/c") + data(GOOD), (UNIMPLEMENTED,)),
    "an empty path": (headers(b"") + data(GOOD), (UNIMPLEMENTED,)),
    "a path of slashes": (headers(b"/" * 5000) + data(GOOD), (UNIMPLEMENTED,)),
    "a path that is no text": (headers(b"\xff\x00\n") + data(GOOD), (UNIMPLEMENTED,)),
    "a path of control characters": (headers(b"/\x1b[31m/\n") + data(GOOD), (UNIMPLEMENTED,)),
    "a request id that is no text": (headers(extra=[(b"x-request-id", b"\xff\xfe")]) + data(GOOD), (INVALID,)),
    "a request id of two lines": (headers(extra=[(b"x-request-id", b"a\nb OK")]) + data(GOOD), (INVALID,)),
    "a request id with NUL": (headers(extra=[(b"x-request-id", b"a\0b")]) + data(GOOD), (INVALID,)),
    "a long request id": (headers(extra=[(b"x-request-id", b"a" * 3000)]) + data(GOOD), (INVALID,)),
    "a header that is no text": (headers(extra=[(b"x-other", b"\xff\xfe\x80")]) + data(GOOD), (OK,)),
    "a header that fits": (headers(extra=[(b"x-other", b"x" * 15_000)]) + data(GOOD), (OK,)),
    "GET": (headers(extra=[(b":method", b"GET")]) + data(GOOD), (REFUSED_BY_HTTP,)),
    "no path": (headers(without=[b":path"]) + data(GOOD), (REFUSED_BY_HTTP,)),
    # What HTTP/2 or gRPC itself makes of these is gRPC's to say.
    "a broken deadline": (headers(extra=[(b"grpc-timeout", b"soon")]) + data(GOOD), (INTERNAL,)),
    "binary that is none": (headers(extra=[(b"x-bin", b"!!!")]) + data(GOOD), (INTERNAL,)),
    "an upper case header": (headers(extra=[(b"X-A", b"x")]) + data(GOOD), (INTERNAL, REFUSED_BY_HTTP)),
    "headers that are none": (frame(raw.HEADERS, 5, 1, b"\xff" * 50), (INTERNAL, REFUSED_BY_HTTP)),
    "data without a call": (data(GOOD), (REFUSED_BY_HTTP,)),
    "a call reset at once": (headers() + frame(raw.RST_STREAM, 0, 1, b"\0\0\0\x08"), (REFUSED_BY_HTTP,)),
    "a window of nothing": (frame(raw.WINDOW_UPDATE, 0, 0, b"\0\0\0\0"), (REFUSED_BY_HTTP,)),
    "a frame of 16 MiB": (b"\xff\xff\xff\0\0\0\0\0\1" + b"x" * 1000, (REFUSED_BY_HTTP,)),
    "a flood of pings": (frame(raw.PING, 0, 0, b"12345678") * 3000, (REFUSED_BY_HTTP,)),
    "a goodbye": (frame(raw.GOAWAY, 0, 0, bytes(8)), (REFUSED_BY_HTTP,)),
    "settings of seven bytes": (frame(raw.SETTINGS, 0, 0, bytes(7)), (REFUSED_BY_HTTP,)),
    "a continuation of nothing": (frame(raw.CONTINUATION, 4, 1, b"xx"), (REFUSED_BY_HTTP,)),
    "an unknown kind of frame": (frame(99, 0, 1, b"x" * 100) + headers() + data(GOOD), (OK,)),
}  # fmt: skip


# What says neither that it goes on nor that it has ended: the server waits as long as it is told to.
UNENDED = {
    "binary that is none": hurrying(receive_s=RECEIVE_S),
    "data without a call": hurrying(idle_s=IDLE_S),
    "a call reset at once": hurrying(idle_s=IDLE_S),
    "a goodbye": hurrying(idle_s=IDLE_S),
}


def test_broken_frames_get_a_proper_status_or_a_closed_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def check(names: list[str], config: RuntimeConfig) -> None:
        async with standing(config) as stand:
            exchanges = (stand.exchange(OPENING + FRAMES[name][0]) for name in names)
            for name, received in zip(names, await asyncio.gather(*exchanges), strict=True):
                assert raw.status_of(received) in FRAMES[name][1], (name, received)
                for word in (b"Traceback", b".py", b"Error(", b"xgr_runtime"):
                    assert word not in received, name

    async def main() -> None:
        groups = [([name], config) for name, config in UNENDED.items()]
        groups += [([name for name in FRAMES if name not in UNENDED], PATIENT)]
        await asyncio.gather(*(check(*group) for group in groups))

    asyncio.run(main())
    assert_quiet(caplog)
    lines = [record.getMessage() for record in caplog.records]
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_random_frames_do_not_stop_the_server(
    rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    """40 connections a round with mutated good calls."""
    caplog.set_level(logging.INFO)
    draw = random.Random(3)
    good = OPENING + headers() + data(GOOD)

    def mutated() -> bytes:
        sent = bytearray(good)
        for _ in range(draw.choice((1, 2, 5))):
            at = draw.randrange(draw.choice((len(OPENING), len(sent))), len(sent) + 1)
            choice = draw.randrange(4)
            if choice == 0 and at < len(sent):
                sent[at] ^= 1 << draw.randrange(8)
            elif choice == 1:
                sent[at:at] = draw.randbytes(draw.choice((1, 9, 40)))
            elif choice == 2:
                del sent[at : at + draw.choice((1, 3, 30))]
            else:
                sent[at:at] = sent[: draw.randrange(len(sent))]
        return bytes(sent)

    async def main() -> None:
        async with standing(HURRIED) as stand:
            for _ in range(rounds):
                await asyncio.gather(*(stand.exchange(mutated()) for _ in range(40)))
                await stand.check_alive()

    asyncio.run(main())
    assert_quiet(caplog)


def count_sockets() -> int:
    """Open sockets of this process."""
    gc.collect()
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:  # closed meanwhile
            continue
    return found


STRANGERS = {
    "silence": b"",
    "noise": bytes(range(256)) * 4,
    "http/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a preface": raw.PREFACE[:10],
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(190),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "only a preface": raw.PREFACE,
}


def test_connections_that_never_speak_http2_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with standing(hurrying(handshake_s=HANDSHAKE_S)) as stand:
            await stand.check_alive()
            before = count_sockets()
            sent = [content for content in STRANGERS.values() for _ in range(10)]
            await asyncio.gather(*(stand.exchange(content) for content in sent))
            await until(lambda: count_sockets() <= before)

    asyncio.run(main())
    assert_quiet(caplog)


def test_a_preface_byte_by_byte_is_not_waited_for() -> None:
    """The preface would take ten times as long as the server waits for it."""

    async def end_of(reader: asyncio.StreamReader) -> None:
        received = b""
        with suppress(ConnectionError):
            while b"timeout" not in received and (part := await reader.read(4096)):
                received += part

    async def drip(stand: Stand) -> int:
        """The number of bytes after which the connection was closed."""
        reader, writer = await asyncio.open_connection(*stand.address)
        ending = asyncio.ensure_future(end_of(reader))
        try:
            for count, byte in enumerate(raw.PREFACE):
                writer.write(bytes([byte]))
                await asyncio.wait([ending], timeout=10 * HANDSHAKE_S / len(raw.PREFACE))
                if ending.done():
                    return count + 1
            raise AssertionError("it was waited for")
        finally:
            ending.cancel()
            writer.close()

    async def main() -> None:
        async with standing(hurrying(handshake_s=HANDSHAKE_S)) as stand:
            drips = [asyncio.ensure_future(drip(stand)) for _ in range(40)]
            await stand.check_alive()
            assert max(await asyncio.gather(*drips)) < len(raw.PREFACE)

    asyncio.run(main())


def test_a_call_that_never_sends_its_message_is_refused_by_name() -> None:
    async def main() -> None:
        async with (
            standing(hurrying(receive_s=RECEIVE_S)) as stand,
            grpc.aio.insecure_channel(stand.target) as channel,
        ):
            start_s = time.monotonic()
            calls = [channel.stream_unary(METHOD)() for _ in range(50)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert RECEIVE_S - 0.1 < time.monotonic() - start_s < PATIENCE_S
            for error in outcomes:
                assert isinstance(error, grpc.aio.AioRpcError)
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert error.details() == (
                    f"the call sent no whole message within service.receive_s = {RECEIVE_S} seconds"
                )
                assert "x-request-id" in dict(tuple(error.trailing_metadata()))
            assert stand.engine.requests == []
            slow = OPENING + headers() + data(GOOD[:-1], ends=False)
            assert raw.status_of(await stand.exchange(slow)) == DEADLINE

    asyncio.run(main())


def test_calls_that_wait_for_their_message_end_with_the_server() -> None:
    config = RuntimeConfig(service=ServiceConfig(receive_s=600))

    async def main() -> list[Any]:
        async with running(StandInEngine(), config) as (server, target):
            channel = grpc.aio.insecure_channel(target)
            calls = [channel.stream_unary(METHOD)() for _ in range(5)]
            await until(lambda: len(server.servicer._receiving) == 5)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        await channel.close()
        return outcomes

    outcomes = asyncio.run(main())
    assert [outcome.code() for outcome in outcomes] == [grpc.StatusCode.UNAVAILABLE] * 5


def test_idle_connections_are_closed_and_clients_do_not_notice() -> None:
    async def main() -> None:
        async with (
            standing(hurrying(idle_s=IDLE_S)) as stand,
            grpc.aio.insecure_channel(stand.target) as channel,
        ):
            await channel.unary_unary(METHOD)(request(), timeout=PATIENCE_S)
            received = await stand.exchange(OPENING)
            assert b"connection idle" in received
            await asyncio.sleep(IDLE_S)
            await channel.unary_unary(METHOD)(request(), timeout=PATIENCE_S)

    asyncio.run(main())


def test_more_connections_than_allowed_are_closed() -> None:
    config = RuntimeConfig(limits=LimitsConfig(max_connections=3))

    async def main() -> None:
        async with standing(config) as stand:
            held = [socket.create_connection(stand.address, timeout=PATIENCE_S) for _ in range(3)]
            for connection in held:
                connection.sendall(OPENING)
                assert await asyncio.to_thread(connection.recv, 9)
            with socket.create_connection(stand.address, timeout=PATIENCE_S) as refused:
                refused.sendall(OPENING)
                with suppress(ConnectionError):
                    assert await asyncio.to_thread(refused.recv, 9) == b""
            for connection in held:
                connection.close()

    asyncio.run(main())


def test_calls_beyond_the_streams_of_a_connection_wait_for_a_place() -> None:
    config = RuntimeConfig(limits=LimitsConfig(max_concurrent_streams=2))

    async def main() -> None:
        async with standing(config) as stand, grpc.aio.insecure_channel(stand.target) as channel:
            await channel.unary_unary(METHOD)(request(), timeout=PATIENCE_S)
            call = channel.unary_unary(METHOD)
            calls = [asyncio.ensure_future(_reply(call(request("held")))) for _ in range(3)]
            await until(lambda: len(stand.engine.requests) == 3)  # one before, and two of these
            await asyncio.sleep(0.1)
            assert len(stand.engine.requests) == 3
            stand.engine.let_go()
            await asyncio.gather(*calls)
            assert len(stand.engine.requests) == 4

    asyncio.run(main())


def test_a_crowd_of_calls_on_one_connection_is_answered() -> None:
    """gRPC's client keeps to the limit it is told; none of the calls that wait for a place is refused meanwhile."""
    config = RuntimeConfig(limits=LimitsConfig(max_concurrent_streams=16))

    async def main() -> None:
        async with standing(config) as stand, grpc.aio.insecure_channel(stand.target) as channel:
            call = channel.unary_unary(METHOD)
            for catalog in ("films", "wait:0.01"):
                calls = [call(request(catalog), timeout=PATIENCE_S) for _ in range(500)]
                codes = await asyncio.gather(*(one.code() for one in calls))
                assert set(codes) == {grpc.StatusCode.OK}, Counter(codes)

    asyncio.run(main())


async def _reply(call: Any) -> bytes:
    reply: bytes = await call
    return reply


def test_a_killed_client_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with standing(RuntimeConfig()) as stand:
            command = [sys.executable, "-m", "tests.service.hostile.vanishing", stand.target, "20"]
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as client:
                assert client.stdout is not None
                assert await asyncio.to_thread(client.stdout.readline) == b"waiting\n"
                await until(lambda: stand.server.servicer.num_in_flight == 40)
                client.send_signal(signal.SIGKILL)
                await until(lambda: stand.server.servicer.num_in_flight == 0)
            assert len(stand.engine.cancelled) == 40

    asyncio.run(main())
    assert_quiet(caplog)


def test_calls_cancelled_at_any_moment_leave_nothing_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    draw = random.Random(4)

    async def main() -> None:
        async with standing() as stand, grpc.aio.insecure_channel(stand.target) as channel:

            async def one() -> None:
                if draw.random() < 0.3:
                    call: Any = channel.stream_unary(METHOD)()
                else:
                    call = channel.unary_unary(METHOD)(request(draw.choice(("wait", "films"))))
                await asyncio.sleep(draw.choice((0.0, 0.0, draw.random() * 0.1)))
                call.cancel()
                (outcome,) = await asyncio.gather(_reply(call), return_exceptions=True)
                assert isinstance(outcome, (bytes, asyncio.CancelledError)), outcome

            for _ in range(4):
                await asyncio.gather(*(one() for _ in range(75)))
            await until(lambda: stand.server.servicer.num_in_flight == 0)
            await until(lambda: not stand.server.servicer._receiving)
            assert stand.server.servicer._num_waiting_bytes == 0

    asyncio.run(main())
    assert_quiet(caplog)


def test_metadata_is_no_way_in() -> None:
    async def main() -> None:
        async with standing() as stand, grpc.aio.insecure_channel(stand.target) as channel:
            cases: list[tuple[list[tuple[str, str | bytes]], grpc.StatusCode]] = [
                ([("x-request-id", "a"), ("x-request-id", "b")], grpc.StatusCode.OK),
                ([("x-request-id", "")], grpc.StatusCode.OK),
                ([("x-request-id-bin", bytes(range(256)))], grpc.StatusCode.OK),
                ([("x-request-id", "a b")], grpc.StatusCode.INVALID_ARGUMENT),
                ([("x-request-id", "a" * 129)], grpc.StatusCode.INVALID_ARGUMENT),
                ([("grpc-status-details-bin", b"\xff" * 100)], grpc.StatusCode.OK),
                ([(f"x-{i}", "v") for i in range(100)], grpc.StatusCode.OK),
                ([("x-large", "v" * 40_000)], grpc.StatusCode.RESOURCE_EXHAUSTED),
                ([("authorization", "Bearer x"), ("te", "x")], grpc.StatusCode.OK),
            ]
            for metadata, code in cases:
                call = channel.unary_unary(METHOD)(request(), metadata=metadata, timeout=PATIENCE_S)
                assert await call.code() is code, (metadata[:1], await call.details())

    asyncio.run(main())


def test_metadata_is_never_refused_at_random() -> None:
    config = RuntimeConfig(limits=LimitsConfig(max_metadata_bytes=4096))

    async def main() -> None:
        async with standing(config) as stand, grpc.aio.insecure_channel(stand.target) as channel:
            for size, code in (
                (3500, grpc.StatusCode.OK),
                (4200, grpc.StatusCode.RESOURCE_EXHAUSTED),
            ):
                for _ in range(8):
                    metadata = [("x-other", "v" * size)]
                    call = channel.unary_unary(METHOD)(
                        request(), metadata=metadata, timeout=PATIENCE_S
                    )
                    assert await call.code() is code

    asyncio.run(main())


def test_what_grpc_keeps_callers_to_comes_from_the_configuration() -> None:
    limits = LimitsConfig(max_message_bytes=2048, max_concurrent_streams=7, max_connections=9)
    service = ServiceConfig(handshake_s=1.5, idle_s=3, keepalive_s=4)
    config = dataclasses.replace(RuntimeConfig(), limits=limits, service=service)
    options = dict(server_options(config))
    assert options["grpc.max_concurrent_streams"] == 7
    assert options["grpc.max_allowed_incoming_connections"] == 9
    assert options["grpc.max_send_message_length"] == 2048
    assert options["grpc.server_handshake_timeout_ms"] == 1500
    assert options["grpc.max_connection_idle_ms"] == 3000
    assert options["grpc.keepalive_time_ms"] == 4000
