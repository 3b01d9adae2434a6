"""Services that others wrote (health, reflection) or that are generated, behind the manners of this server.

gRPC parses a message before its handler sees it. Bytes that are no message then end the call with UNKNOWN and the exception's text,
and the log gets a traceback; a call that is half-closed without a message gets no answer for ever; whatever a handler raises reaches
the caller as text; a watch that a client leaves open ends with a traceback when the server stops. Handlers registered through here
read the bytes themselves: a caller's fault is a status with one sentence, a defect is INTERNAL for the caller and a traceback for
the log, a caller who leaves in the moment of its answer is neither, and `end_calls` answers whatever is open.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc

from xgr_runtime.service.grpc_server import add_handlers
from xgr_runtime.service.open_calls import OpenCalls
from xgr_runtime.service.receive import receive
from xgr_runtime.service.rpc_errors import (
    SHUTTING_DOWN,
    RpcFailure,
    ServicerContext,
    internal_failure,
)

NOT_THERE = RpcFailure(grpc.StatusCode.UNIMPLEMENTED, "the method is not implemented")
NO_SUCH_MESSAGE = RpcFailure(
    grpc.StatusCode.INVALID_ARGUMENT, "the bytes of a message are not of the method's type"
)
logger = logging.getLogger(__name__)

Handler = Callable[[Any, ServicerContext], Any]
Deserializer = Callable[[bytes], Any]


class GuardedServer:
    """What the generated `add_..._to_server` functions take for a server. receive_s: seconds to send a message."""

    def __init__(self, server: Any, receive_s: float) -> None:
        self._server, self._receive_s = server, receive_s
        self._calls = OpenCalls()

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Nothing: the same methods come a second time, with their names."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Registers guarded handlers of a service's methods."""
        add_handlers(
            self._server, service, {name: self._guarded(h) for name, h in handlers.items()}
        )

    def end_calls(self) -> None:
        """Answer every open call UNAVAILABLE, and those that still come."""
        self._calls.end()

    def _guarded(self, handler: Any) -> Any:
        parse, serialize = handler.request_deserializer or bytes, handler.response_serializer
        if handler.stream_stream is not None:
            behaviour = self._guard_streams(handler.stream_stream, parse)
            return grpc.stream_stream_rpc_method_handler(behaviour, response_serializer=serialize)
        if handler.unary_stream is not None:
            behaviour = self._guard_unary(handler.unary_stream, parse)
            return grpc.stream_stream_rpc_method_handler(behaviour, response_serializer=serialize)
        assert handler.unary_unary is not None, "no service here streams requests to one reply"
        behaviour = self._guard_unary(handler.unary_unary, parse)
        return grpc.stream_unary_rpc_method_handler(behaviour, response_serializer=serialize)

    def _guard_unary(self, call: Handler, parse: Deserializer) -> Handler:
        assert not inspect.isasyncgenfunction(call), "streams of replies are written, not yielded"

        async def guarded(_messages: Any, context: ServicerContext) -> Any:
            async with self._border(context):
                data = await receive(context, self._receive_s)
                if isinstance(data, RpcFailure):
                    await _abort(context, data)
                reply = call(await _parse(data, context, parse), context)
                return await reply if inspect.isawaitable(reply) else reply

        return guarded

    def _guard_streams(self, call: Handler, parse: Deserializer) -> Handler:
        """For handlers that take an iterator and yield."""

        async def guarded(
            messages: AsyncIterator[bytes], context: ServicerContext
        ) -> AsyncIterator[Any]:
            async def parsed() -> AsyncIterator[Any]:
                async for data in messages:
                    yield await _parse(data, context, parse)

            async with self._border(context):
                async for reply in call(parsed(), context):
                    yield reply

        return guarded

    @asynccontextmanager
    async def _border(self, context: ServicerContext) -> AsyncIterator[None]:
        """Of the process: whatever a handler raises inside ends its call with a status and nothing else."""
        await self._refuse_late(context)
        with self._calls.including_this():
            try:
                yield
            except (grpc.aio.AbortError, cygrpc.ExecuteBatchError):  # told, or the caller has gone
                raise
            except asyncio.CancelledError:
                if not self._calls.is_ended:
                    raise
                await _abort(context, SHUTTING_DOWN)
            except NotImplementedError:  # a method of the protocol that its library lacks
                await _abort(context, NOT_THERE)
            # The border of the process, as for Recommend: the log gets what a client must not see.
            except Exception:
                logger.exception("a call failed")
                await _abort(context, internal_failure())

    async def _refuse_late(self, context: ServicerContext) -> None:
        if self._calls.is_ended:
            await _abort(context, SHUTTING_DOWN)


async def _abort(context: ServicerContext, failure: RpcFailure) -> NoReturn:
    try:
        await context.abort(failure.code, failure.message)
    except grpc.aio.UsageError:  # a call has one answer, and this one has begun to get it
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")


async def _parse(data: bytes, context: ServicerContext, parse: Deserializer) -> Any:
    try:
        return parse(data)
    except DecodeError:
        await _abort(context, NO_SUCH_MESSAGE)
