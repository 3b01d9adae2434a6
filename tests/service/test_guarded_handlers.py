"""Health, reflection and whatever else shares the port keep the same manners as the service itself."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.service.servers import running
from tests.service.stand_in import StandInEngine
from tests.service.waiting import PATIENCE_S, until
from xgr_runtime.config import RuntimeConfig, ServiceConfig
from xgr_runtime.service.grpc_server import open_grpc_server
from xgr_runtime.service.guarded_handlers import GuardedServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATIENT = RuntimeConfig(service=ServiceConfig(receive_s=PATIENCE_S))
HURRIED = RuntimeConfig(service=ServiceConfig(receive_s=0.3))
METHODS = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


async def end_of(channel: Any, method: str, data: bytes | None) -> tuple[grpc.StatusCode, str]:
    """Status and message of a call that sends these bytes, or nothing, and is half-closed."""
    call = channel.stream_stream(method)(iter(() if data is None else (data,)), timeout=PATIENCE_S)
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await call.code(), await call.details()


@asynccontextmanager
async def serving(handlers: dict[str, Any]) -> AsyncIterator[Any]:
    """A channel to a server with these methods of a.Service."""
    server = open_grpc_server([])
    GuardedServer(server, PATIENCE_S).add_registered_method_handlers("a.Service", handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with (
            running(StandInEngine(), PATIENT) as (_, target),
            grpc.aio.insecure_channel(target) as channel,
        ):
            for data in (b"\xff\xff\xff", b"\x0a\x02\xff\xfe"):
                code, text = await end_of(channel, method, data)
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert text == "the bytes of a message are not of the method's type"
            if "Reflection" not in method:
                code, text = await end_of(channel, method, None)
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert text == "the call ended without a message"
        async with (
            running(StandInEngine(), HURRIED) as (_, target),
            grpc.aio.insecure_channel(target) as channel,
        ):
            if "Reflection" not in method:
                call = channel.stream_stream(method)(timeout=PATIENCE_S)
                assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert "service.receive_s = 0.3 seconds" in await call.details()

    asyncio.run(main())
    assert not [record for record in caplog.records if record.exc_info]


def test_what_a_handler_raises_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def raises(message: bytes, _context: Any) -> bytes:
        if message == b"lacking":
            raise NotImplementedError("secret")
        if message == b"defect":
            raise ValueError("secret of the machine")
        return message

    def has_no_memory(data: bytes) -> bytes:
        raise MemoryError("secret of the machine")

    async def yields(messages: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            yield await raises(message, None)

    async def main() -> None:
        server = open_grpc_server([])
        handlers = {
            "One": grpc.unary_unary_rpc_method_handler(raises),
            "Many": grpc.stream_stream_rpc_method_handler(yields),
            "Large": grpc.unary_unary_rpc_method_handler(raises, has_no_memory),
        }
        GuardedServer(server, PATIENCE_S).add_registered_method_handlers("a.Service", handlers)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method in ("/a.Service/One", "/a.Service/Many", "/a.Service/Large"):
                code, text = await end_of(channel, method, b"defect")
                assert code is grpc.StatusCode.INTERNAL
                assert "secret" not in text
            for method in ("/a.Service/One", "/a.Service/Many"):
                assert await end_of(channel, method, b"fine") == (grpc.StatusCode.OK, "")
            code, text = await end_of(channel, "/a.Service/One", b"lacking")
            assert (code, text) == (grpc.StatusCode.UNIMPLEMENTED, "the method is not implemented")
        await server.stop(0)

    asyncio.run(main())
    texts = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert texts == ["secret of the machine"] * 3
    assert all(record.levelno == logging.ERROR for record in caplog.records)


def test_calls_are_ended_from_this_side(caplog: pytest.LogCaptureFixture) -> None:
    """Those that wait for their message, those that run, and those that come afterwards."""

    async def waits(_message: bytes, _context: Any) -> bytes:
        await asyncio.sleep(3600)
        return b""

    async def main() -> None:
        server = open_grpc_server([])
        guarded = GuardedServer(server, PATIENCE_S)
        handlers = {"One": grpc.unary_unary_rpc_method_handler(waits)}
        guarded.add_registered_method_handlers("a.Service", handlers)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            silent = channel.stream_stream("/a.Service/One")(timeout=PATIENCE_S)
            waiting = asyncio.ensure_future(end_of(channel, "/a.Service/One", b""))
            await until(lambda: len(guarded._calls) == 2)
            guarded.end_calls()
            assert await silent.code() is grpc.StatusCode.UNAVAILABLE
            ended = (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
            assert await waiting == ended
            assert await end_of(channel, "/a.Service/One", b"") == ended
        await server.stop(0)

    asyncio.run(main())
    assert caplog.records == []


def test_a_caller_that_leaves_during_a_refusal_is_no_defect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A second answer would fail as well, and each would be a traceback in the log."""

    async def main() -> None:
        begun, refused = asyncio.Event(), asyncio.Event()

        async def refuses(_message: bytes, context: Any) -> None:
            begun.set()
            with suppress(asyncio.CancelledError):  # which is how gRPC says that the caller left
                await asyncio.sleep(3600)
            try:
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such name")
            finally:
                refused.set()

        async def yields(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for message in messages:
                await refuses(message, context)
                yield message

        handlers = {
            "One": grpc.unary_unary_rpc_method_handler(refuses),
            "Many": grpc.stream_stream_rpc_method_handler(yields),
        }
        async with serving(handlers) as channel:
            for method in ("/a.Service/One", "/a.Service/Many"):
                begun.clear()
                refused.clear()
                call = channel.stream_stream(method)(iter((b"",)), timeout=PATIENCE_S)
                await begun.wait()
                call.cancel()
                await refused.wait()

    asyncio.run(main())
    assert caplog.records == []


def test_a_call_is_answered_once(caplog: pytest.LogCaptureFixture) -> None:
    """What is raised after an answer is a defect all the same, and told once."""

    async def main() -> None:
        async def refuses(_message: bytes, context: Any) -> None:
            with suppress(grpc.aio.AbortError):
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such name")
            raise ValueError("secret of the machine")

        async with serving({"One": grpc.unary_unary_rpc_method_handler(refuses)}) as channel:
            told = await end_of(channel, "/a.Service/One", b"")
            assert told == (grpc.StatusCode.NOT_FOUND, "no such name")
            await until(lambda: caplog.records)  # the answer goes out first

    asyncio.run(main())
    assert [str(record.exc_info and record.exc_info[1]) for record in caplog.records] == [
        "secret of the machine"
    ]
