"""One Recommend call: check, hand to the engine, translate the answer, map every error to a status.

grpc.aio runs the handler as a task of the server's loop and cancels it when the client cancels, when the connection is lost, and
when the call's deadline passes. The engine's awaitable is awaited directly in that task, so each of these frees the request's
place in the queue, its pages and its rows without any code here.
"""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from xgr_runtime.config import LimitsConfig
from xgr_runtime.errors import EngineClosed, InvalidRequest, XgrError
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service.rpc_errors import (
    DETAILS_KEY,
    REASON_KEY,
    REPLY_TOO_LARGE,
    REQUEST_ID_KEY,
    RpcFailure,
    failure_from_error,
)
from xgr_runtime.service.translate import request_from_proto
from xgr_runtime.service.translate_result import result_to_proto
from xgr_runtime.service.wire_arrays import Violations
from xgr_runtime.types import RecRequest, RecResult

SERVICE_NAME = "xgr.v1.RecommendService"
INTERNAL_MESSAGE = "internal error; the server's log has the details under this request id"
REFUSED = RpcFailure(
    grpc.StatusCode.UNAVAILABLE, "the server is shutting down and accepts no further requests"
)
CUT_OFF = RpcFailure(
    grpc.StatusCode.UNAVAILABLE, "the server was stopped before the answer was ready"
)
logger = logging.getLogger(__name__)

# grpc has no type information: a ServicerContext or a Server of grpc.aio.
ServicerContext: TypeAlias = Any
Server: TypeAlias = Any


class RequestSink(Protocol):
    """The part of the Engine that the service uses.

    Cancelling the task that awaits `submit` withdraws the request. `wait_stopped` returns when no request will be
    answered any more.
    """

    async def submit(self, request: RecRequest) -> RecResult: ...

    async def wait_stopped(self) -> None: ...


@dataclass(frozen=True)
class MalformedMessage:
    """Stands for bytes that are no RecommendRequest; gRPC alone would answer UNKNOWN."""

    request_id: str = ""


class RecommendServicer:
    """Answers Recommend calls through an engine and counts those in flight."""

    def __init__(self, engine: RequestSink, limits: LimitsConfig) -> None:
        self._engine = engine
        self._limits = limits
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._accepted: set[asyncio.Task[Any]] = set()
        self._is_cut_off = False
        self._may_refuse = asyncio.Event()
        self._may_refuse.set()
        self.engine_closed = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        """Accepted calls that have not been answered yet."""
        return len(self._accepted)

    def refuse_new(self) -> None:
        """From now on new calls are answered UNAVAILABLE; those in flight go on."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Return once no call is in flight."""
        await self._idle.wait()

    def hold_refusals(self) -> None:
        """From now on calls that are refused wait for `end_calls`."""
        self._may_refuse.clear()

    def end_calls(self) -> int:
        """Answer every call UNAVAILABLE, those held and those in flight; returns the number of the latter."""
        self._is_cut_off = True
        self._may_refuse.set()
        for task in self._accepted:
            task.cancel()
        return len(self._accepted)

    async def recommend(
        self, message: pb.RecommendRequest | MalformedMessage, context: ServicerContext
    ) -> pb.RecommendResponse:
        """Handle one call."""
        arrival_s = time.monotonic()
        found = Violations()
        request_id = choose_request_id(message, context, self._limits, found)
        trailing: tuple[tuple[str, str | bytes], ...] = ((REQUEST_ID_KEY, request_id),)
        context.set_trailing_metadata(trailing)
        remaining_s = context.time_remaining()
        deadline_s = None if remaining_s is None else arrival_s + remaining_s
        try:
            if self._is_draining:
                await self._may_refuse.wait()
                outcome: pb.RecommendResponse | RpcFailure = REFUSED
            else:
                outcome = await self._accept(message, request_id, deadline_s, found)
        except asyncio.CancelledError:
            logger.info("request %s cancelled after %.1f ms", request_id, _ms_since(arrival_s))
            raise
        if isinstance(outcome, RpcFailure):
            ms = _ms_since(arrival_s)
            logger.info(
                "request %s %s in %.1f ms: %s", request_id, outcome.code.name, ms, outcome.message
            )
            if outcome.details:
                trailing = (*trailing, (DETAILS_KEY, outcome.details))
            if outcome.reason:
                trailing = (*trailing, (REASON_KEY, outcome.reason))
            await context.abort(outcome.code, outcome.message, trailing)
            raise AssertionError("abort returned")
        logger.info("request %s OK in %.1f ms", request_id, _ms_since(arrival_s))
        return outcome

    async def _accept(
        self,
        message: pb.RecommendRequest | MalformedMessage,
        request_id: str,
        deadline_s: float | None,
        found: Violations,
    ) -> pb.RecommendResponse | RpcFailure:
        """The answer of a call that counts as in flight."""
        task = asyncio.current_task()
        assert task is not None
        self._accepted.add(task)
        self._idle.clear()
        try:
            return await self._answer(message, request_id, deadline_s, found)
        except asyncio.CancelledError:
            if not self._is_cut_off:
                raise
            return CUT_OFF
        finally:
            self._accepted.discard(task)
            if not self._accepted:
                self._idle.set()

    async def _answer(
        self,
        message: pb.RecommendRequest | MalformedMessage,
        request_id: str,
        deadline_s: float | None,
        found: Violations,
    ) -> pb.RecommendResponse | RpcFailure:
        try:
            if isinstance(message, MalformedMessage):
                raise InvalidRequest([("request", "is not an xgr.v1.RecommendRequest message")])
            request = request_from_proto(message, self._limits, request_id, deadline_s, found)
            reply = result_to_proto(await self._engine.submit(request))
            return self._too_large(reply) or reply
        except XgrError as error:
            if isinstance(error, EngineClosed) and not self._is_draining:
                self.engine_closed.set()
            failure = failure_from_error(error)
            if failure is not None:
                return failure
            logger.exception("request %s failed", request_id)
        # The border of the process: whatever else went wrong is a defect of the runtime. The client learns only that, the log
        # gets the traceback, and the server goes on with its other requests.
        except Exception:
            logger.exception("request %s failed", request_id)
        return RpcFailure(grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE)

    def _too_large(self, reply: pb.RecommendResponse) -> RpcFailure | None:
        """gRPC itself would fail with a traceback after the handler has returned."""
        size, limit = reply.ByteSize(), self._limits.max_message_bytes
        if size <= limit:
            return None
        return RpcFailure(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the reply has {size} bytes, more than limits.max_message_bytes = {limit}; ask for fewer results",
            reason=REPLY_TOO_LARGE,
        )


def choose_request_id(
    message: pb.RecommendRequest | MalformedMessage,
    context: ServicerContext,
    limits: LimitsConfig,
    found: Violations,
) -> str:
    """The message's request id, else metadata "x-request-id", else a new one.

    An id that cannot be logged and echoed in metadata is noted in `found` and replaced by a new one.
    """
    candidates = [("request_id", message.request_id)]
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str):
            candidates.append((f"metadata {REQUEST_ID_KEY}", value))
    for field, value in candidates:
        if not value:
            continue
        if len(value) <= limits.max_request_id_length and all(" " < c <= "~" for c in value):
            return value
        found.add(
            field,
            f"must be at most {limits.max_request_id_length} printable ASCII characters "
            f"without spaces, got {len(value)} characters",
        )
        break
    return uuid.uuid4().hex


def add_to_server(servicer: RecommendServicer, server: Server) -> None:
    """Register the servicer; as the generated function does, but malformed bytes reach the servicer."""
    handler = grpc.unary_unary_rpc_method_handler(
        servicer.recommend,
        request_deserializer=parse_message,
        response_serializer=pb.RecommendResponse.SerializeToString,
    )
    handlers = grpc.method_handlers_generic_handler(SERVICE_NAME, {"Recommend": handler})
    server.add_generic_rpc_handlers((handlers,))


def parse_message(data: bytes) -> pb.RecommendRequest | MalformedMessage:
    """The message in the bytes of a call."""
    try:
        return pb.RecommendRequest.FromString(data)
    except DecodeError:
        return MalformedMessage()


def _ms_since(start_s: float) -> float:
    return 1e3 * (time.monotonic() - start_s)
