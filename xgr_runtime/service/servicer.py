"""One Recommend call: check, hand to the engine, translate the answer, map every error to a status.

grpc.aio runs the handler as a task of the server's loop and cancels it when the client cancels, when the connection is lost, and
when the call's deadline passes. The engine's awaitable is awaited directly in that task, so each of these frees the request's
place in the queue, its pages and its rows without any code here.

The call is registered as one that streams its requests, which on the wire is the same. So the message is read here: a call that
ends without one is refused (gRPC's unary handler would leave it without an answer for ever), one that does not send it in time
is refused too, and the parsed message, which can be fifty times as large as its bytes, is gone before anything is waited for.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from xgr_runtime.config import LimitsConfig
from xgr_runtime.errors import EngineClosed, InvalidRequest, XgrError
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service.call_record import CallRecord
from xgr_runtime.service.call_totals import CallTotals
from xgr_runtime.service.grpc_server import add_handlers
from xgr_runtime.service.rpc_errors import (
    DETAILS_KEY,
    REASON_KEY,
    REPLY_TOO_LARGE,
    REQUEST_ID_KEY,
    REQUEST_TOO_LARGE,
    RpcFailure,
    failure_from_error,
)
from xgr_runtime.service.translate import request_from_proto
from xgr_runtime.service.translate_result import result_to_proto
from xgr_runtime.service.wire_arrays import Violations
from xgr_runtime.types import RecRequest, RecResult
from xgr_runtime.xschedule.engine_stats import EngineStats

SERVICE_NAME = "xgr.v1.RecommendService"
INTERNAL_MESSAGE = "internal error; the server's log has the details under this request id"
REFUSED = RpcFailure(
    grpc.StatusCode.UNAVAILABLE, "the server is shutting down and accepts no further requests"
)
NO_MESSAGE = RpcFailure(
    grpc.StatusCode.INVALID_ARGUMENT, "the call ended without an xgr.v1.RecommendRequest message"
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
    answered any more. `stats` is called on other threads.
    """

    async def submit(self, request: RecRequest) -> RecResult: ...

    async def wait_stopped(self) -> None: ...

    def stats(self) -> EngineStats: ...


class RecommendServicer:
    """Answers Recommend calls through an engine and counts those in flight.

    receive_s: seconds that a call may take to send its message. log_requests: one line at level info when a call ends.
    """

    def __init__(
        self,
        engine: RequestSink,
        limits: LimitsConfig,
        receive_s: float = 30.0,
        *,
        log_requests: bool = True,
    ) -> None:
        self._engine = engine
        self.calls = CallTotals()
        self._log_requests = log_requests
        self._limits = limits
        self._receive_s = receive_s
        self._receiving: set[asyncio.Task[Any]] = set()
        self._num_waiting_bytes = 0
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
        for task in (*self._accepted, *self._receiving):
            task.cancel()
        return len(self._accepted)

    async def recommend(
        self, _messages: AsyncIterator[bytes], context: ServicerContext
    ) -> pb.RecommendResponse:
        """Handle one call."""
        call = CallRecord(self.calls, is_logged=self._log_requests)
        try:
            data = await self._receive(context)
        except asyncio.CancelledError:
            call.end_cancelled(context.time_remaining())
            raise
        num_bytes = 0 if isinstance(data, RpcFailure) else len(data)
        call.request_id, asked = self._read(data, context, call.arrival_s)
        del data
        trailing: tuple[tuple[str, str | bytes], ...] = ((REQUEST_ID_KEY, call.request_id),)
        context.set_trailing_metadata(trailing)
        try:
            if self._is_draining:
                await self._may_refuse.wait()
                outcome: pb.RecommendResponse | RpcFailure = REFUSED
            elif isinstance(asked, RpcFailure):
                outcome = asked
            else:
                outcome = await self._accept(asked, num_bytes)
        except asyncio.CancelledError:
            call.end_cancelled(context.time_remaining())
            raise
        if isinstance(outcome, RpcFailure):
            call.end_failed(outcome)
            if outcome.details:
                trailing = (*trailing, (DETAILS_KEY, outcome.details))
            if outcome.reason:
                trailing = (*trailing, (REASON_KEY, outcome.reason))
            await context.abort(outcome.code, outcome.message, trailing)
            raise AssertionError("abort returned")
        call.end_ok()
        return outcome

    async def _receive(self, context: ServicerContext) -> bytes | RpcFailure:
        """The bytes of the call's message, or why there are none."""
        task = asyncio.current_task()
        assert task is not None
        is_late = False

        def give_up() -> None:
            nonlocal is_late
            is_late = True
            task.cancel()

        timer = asyncio.get_running_loop().call_later(self._receive_s, give_up)
        self._receiving.add(task)
        try:
            data = await context.read()
        except asyncio.CancelledError:
            if self._is_cut_off:
                return REFUSED
            if not is_late:
                raise
            return RpcFailure(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"the call sent no whole message within service.receive_s = {self._receive_s:g} seconds",
            )
        finally:
            timer.cancel()
            self._receiving.discard(task)
        return NO_MESSAGE if data is grpc.aio.EOF else data

    def _read(
        self, data: bytes | RpcFailure, context: ServicerContext, arrival_s: float
    ) -> tuple[str, RecRequest | RpcFailure]:
        """The call's request id, and the request in its message or the answer to what is none.

        No message is referred to afterwards, and no other call runs meanwhile: one parsed message is in memory at a time.
        """
        found = Violations()
        refused = data if isinstance(data, RpcFailure) else self._check_size(len(data))
        if isinstance(data, RpcFailure) or refused is not None:
            assert refused is not None
            return choose_request_id("", context, self._limits, found), refused
        message = parse_message(data)
        named = "" if message is None else message.request_id
        request_id = choose_request_id(named, context, self._limits, found)
        remaining_s = context.time_remaining()
        try:
            if message is None:
                raise InvalidRequest([("request", "is not an xgr.v1.RecommendRequest message")])
            deadline_s = None if remaining_s is None else arrival_s + remaining_s
            return request_id, request_from_proto(
                message, self._limits, request_id, deadline_s, found
            )
        except InvalidRequest as error:
            failure = failure_from_error(error)
            assert failure is not None
            return request_id, failure
        except Exception:  # as in `_answer`
            logger.exception("request %s failed", request_id, extra={"request_id": request_id})
            return request_id, RpcFailure(grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE)

    async def _accept(
        self, request: RecRequest, num_bytes: int
    ) -> pb.RecommendResponse | RpcFailure:
        """The answer of a call that counts as in flight."""
        task = asyncio.current_task()
        assert task is not None
        self._accepted.add(task)
        self._num_waiting_bytes += num_bytes
        self._idle.clear()
        try:
            return await self._answer(request)
        except asyncio.CancelledError:
            if not self._is_cut_off:
                raise
            return CUT_OFF
        finally:
            self._num_waiting_bytes -= num_bytes
            self._accepted.discard(task)
            if not self._accepted:
                self._idle.set()

    async def _answer(self, request: RecRequest) -> pb.RecommendResponse | RpcFailure:
        request_id = request.request_id
        try:
            reply = result_to_proto(await self._engine.submit(request))
            return self._too_large(reply) or reply
        except XgrError as error:
            if isinstance(error, EngineClosed) and not self._is_draining:
                self.engine_closed.set()
            failure = failure_from_error(error)
            if failure is not None:
                return failure
            logger.exception("request %s failed", request_id, extra={"request_id": request_id})
        # The border of the process: whatever else went wrong is a defect of the runtime. The client learns only that, the log
        # gets the traceback, and the server goes on with its other requests.
        except Exception:
            logger.exception("request %s failed", request_id, extra={"request_id": request_id})
        return RpcFailure(grpc.StatusCode.INTERNAL, INTERNAL_MESSAGE)

    def _check_size(self, num_bytes: int) -> RpcFailure | None:
        """The answer to a message that is too large, or too large beside those that wait already."""
        most, most_waiting = self._limits.max_message_bytes, self._limits.max_waiting_bytes
        if num_bytes > most:
            return RpcFailure(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the request has {num_bytes} bytes, more than limits.max_message_bytes = {most}",
                reason=REQUEST_TOO_LARGE,
            )
        if self._num_waiting_bytes + num_bytes > most_waiting:
            return RpcFailure(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the requests that wait hold {self._num_waiting_bytes} bytes, with these {num_bytes} more than "
                f"limits.max_waiting_bytes = {most_waiting}; send it again later",
            )
        return None

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
    named: str,
    context: ServicerContext,
    limits: LimitsConfig,
    found: Violations,
) -> str:
    """`named` in the message, else metadata "x-request-id", else a new one.

    An id that cannot be logged and echoed in metadata is noted in `found` and replaced by a new one.
    """
    candidates = [("request_id", named)]
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
            f"must be at most limits.max_request_id_length = {limits.max_request_id_length} printable ASCII characters "
            f"without spaces, got {len(value)} characters",
        )
        break
    return uuid.uuid4().hex


def add_to_server(servicer: RecommendServicer, server: Server) -> None:
    """Register the servicer; unlike the generated function, which would read and parse the message before the servicer."""
    handler = grpc.stream_unary_rpc_method_handler(
        servicer.recommend, response_serializer=pb.RecommendResponse.SerializeToString
    )
    add_handlers(server, SERVICE_NAME, {"Recommend": handler})


def parse_message(data: bytes) -> pb.RecommendRequest | None:
    """The message in the bytes of a call, None where there is none; gRPC alone would answer UNKNOWN."""
    try:
        return pb.RecommendRequest.FromString(data)
    except DecodeError:
        return None
