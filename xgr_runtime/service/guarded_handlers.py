"""Services that others wrote (health, reflection) or that are generated, behind the manners of this server.

gRPC parses a message before its handler sees it. Bytes that are no message then end the call with UNKNOWN and the exception's text,
and the log gets a traceback; a call that is half-closed without a message gets no answer for ever; whatever a handler raises reaches
the caller as text. Handlers registered through here read the bytes themselves: a caller's fault is a status with one sentence, and
a defect is INTERNAL for the caller and a traceback for the log.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from xgr_runtime.service.grpc_server import add_handlers

INTERNAL_MESSAGE = "internal error; the server's log has the details"
NOT_THERE = "the method is not implemented"
logger = logging.getLogger(__name__)

Handler = Callable[[Any, Any], Any]
Deserializer = Callable[[bytes], Any]


class GuardedServer:
    """What the generated `add_..._to_server` functions take for a server. receive_s: seconds to send a message."""

    def __init__(self, server: Any, receive_s: float) -> None:
        self._server, self._receive_s = server, receive_s

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Nothing: the same methods come a second time, with their names."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Registers guarded handlers of a service's methods."""
        add_handlers(
            self._server, service, {name: self._guarded(h) for name, h in handlers.items()}
        )

    def _guarded(self, handler: Any) -> Any:
        parse, serialize = handler.request_deserializer or bytes, handler.response_serializer
        if handler.stream_stream is not None:
            behaviour = _guard_streams(handler.stream_stream, parse)
            return grpc.stream_stream_rpc_method_handler(behaviour, response_serializer=serialize)
        if handler.unary_stream is not None:
            behaviour = self._guard_unary(handler.unary_stream, parse)
            return grpc.stream_stream_rpc_method_handler(behaviour, response_serializer=serialize)
        assert handler.unary_unary is not None, "no service here streams requests to one reply"
        behaviour = self._guard_unary(handler.unary_unary, parse)
        return grpc.stream_unary_rpc_method_handler(behaviour, response_serializer=serialize)

    def _guard_unary(self, call: Handler, parse: Deserializer) -> Handler:
        assert not inspect.isasyncgenfunction(call), "streams of replies are written, not yielded"

        async def guarded(_messages: Any, context: Any) -> Any:
            message = await self._receive(context, parse)
            try:
                reply = call(message, context)
                return await reply if inspect.isawaitable(reply) else reply
            except grpc.aio.AbortError:
                raise
            except NotImplementedError:  # a method of the protocol that its library lacks
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, NOT_THERE)
            except Exception:  # the border of the process, as in the servicer
                logger.exception("a call failed")
                await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE)

        return guarded

    async def _receive(self, context: Any, parse: Deserializer) -> Any:
        """The message of a call that has one; the call is aborted otherwise."""
        try:
            data = await asyncio.wait_for(context.read(), self._receive_s)
        except asyncio.TimeoutError:
            text = f"the call sent no whole message within service.receive_s = {self._receive_s:g} seconds"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        if data is grpc.aio.EOF:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a message"
            )
        return await _parse(data, context, parse)


async def _parse(data: bytes, context: Any, parse: Deserializer) -> Any:
    try:
        return parse(data)
    except DecodeError:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, "the bytes of a message are not of the method's type"
        )


def _guard_streams(call: Handler, parse: Deserializer) -> Handler:
    """For handlers that take an iterator and yield."""

    async def guarded(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async def parsed() -> AsyncIterator[Any]:
            async for data in messages:
                yield await _parse(data, context, parse)

        try:
            async for reply in call(parsed(), context):
                yield reply
        except grpc.aio.AbortError:
            raise
        except Exception:  # as above
            logger.exception("a call failed")
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE)

    return guarded
