"""One Recommend call: check, hand to the engine, translate the answer, map every error to a status.

grpc.aio runs the handler as a task of the server's loop and cancels it when the client cancels, when the connection is lost, and
when the call's deadline passes. The engine's awaitable is awaited directly in that task, so each of these frees the request's
place in the queue, its pages and its rows without any code here.

The call is registered as one that streams its requests, which on the wire is the same. So the message is read here (`receive`),
and once parsed, when it can be fifty times as large as its bytes, it is gone before anything is waited for.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from xgr_runtime.config import LimitsConfig
from xgr_runtime.errors import EngineClosed, InvalidRequest, XgrError
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service.call_record import CallRecord
from xgr_runtime.service.call_totals import CallTotals
from xgr_runtime.service.grpc_server import add_handlers
from xgr_runtime.service.open_calls import OpenCalls
from xgr_runtime.service.receive import (
    choose_request_id,
    parse_message,
    receive,
)
from xgr_runtime.service.rpc_errors import (
    DETAILS_KEY,
    REASON_KEY,
    REPLY_TOO_LARGE,
    REQUEST_ID_KEY,
    REQUEST_TOO_LARGE,
    SHUTTING_DOWN,
    RpcFailure,
    ServicerContext,
    failure_from_error,
    internal_failure,
)
from xgr_runtime.service.served_engine import ServedEngine
from xgr_runtime.service.translate import request_from_proto
from xgr_runtime.service.translate_result import result_to_proto
from xgr_runtime.service.wire_arrays import Violations
from xgr_runtime.types import RecRequest

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["RecommendService"].full_name
CUT_OFF = RpcFailure(
    grpc.StatusCode.UNAVAILABLE, "the server was stopped before the answer was ready"
)
logger = logging.getLogger(__name__)


class RecommendServicer:
    """Answers Recommend calls through an engine and counts those in flight.

    receive_s: seconds that a call may take to send its message. log_requests: one line at level info when a call ends.
    """

    def __init__(
        self,
        engine: ServedEngine,
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
        self._receiving = OpenCalls()
        self._accepted = OpenCalls()
        self._num_waiting_bytes = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
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
        self._may_refuse.set()
        self._receiving.end()
        return self._accepted.end()

    async def recommend(
        self, _messages: AsyncIterator[bytes], context: ServicerContext
    ) -> pb.RecommendResponse:
        """Handle one call."""
        with CallRecord(self.calls, is_logged=self._log_requests) as call:
            try:
                outcome = await self._outcome(call, context)
            except asyncio.CancelledError:
                call.end_cancelled(context.time_remaining())
                raise
            if isinstance(outcome, RpcFailure):
                call.end_failed(outcome)
                trailing: tuple[tuple[str, str | bytes], ...] = ((REQUEST_ID_KEY, call.request_id),)
                if outcome.details:
                    trailing = (*trailing, (DETAILS_KEY, outcome.details))
                if outcome.reason:
                    trailing = (*trailing, (REASON_KEY, outcome.reason))
                await context.abort(outcome.code, outcome.message, trailing)
                raise AssertionError("abort returned")
            call.end_ok()
            return outcome

    async def _outcome(
        self, call: CallRecord, context: ServicerContext
    ) -> pb.RecommendResponse | RpcFailure:
        """The answer of a call, whatever goes wrong; it has its request id afterwards. Raises CancelledError alone."""
        try:
            data = await self._receive(context)
            num_bytes = 0 if isinstance(data, RpcFailure) else len(data)
            asked = self._read(data, call, context)
            del data
            context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
            if self._is_draining:
                await self._may_refuse.wait()
                return SHUTTING_DOWN
            return asked if isinstance(asked, RpcFailure) else await self._accept(asked, num_bytes)
        # The border of the process: what is no answer of the engine's is a defect of the runtime. The client learns only that,
        # the log gets the traceback, and the server goes on with its other requests.
        except Exception as error:  # noqa: BLE001 - `_failure` logs it
            if isinstance(error, EngineClosed) and not self._is_draining:
                self.engine_closed.set()
            return _failure(error, call)

    async def _receive(self, context: ServicerContext) -> bytes | RpcFailure:
        """The bytes of the call's message, or why there are none."""
        try:
            with self._receiving.including_this():
                return await receive(context, self._receive_s)
        except asyncio.CancelledError:
            if not self._receiving.is_ended:
                raise
            return SHUTTING_DOWN

    def _read(
        self, data: bytes | RpcFailure, call: CallRecord, context: ServicerContext
    ) -> RecRequest | RpcFailure:
        """The request in the call's message, whose id the call gets, or the answer to what is none.

        No message is referred to afterwards, and no other call runs meanwhile: one parsed message is in memory at a time.
        """
        found = Violations()
        call.request_id = choose_request_id("", context, self._limits, found)
        if isinstance(data, RpcFailure):
            return data
        if (refused := self._check_size(len(data))) is not None:
            return refused
        try:
            message = parse_message(data)
            if message is None:
                raise InvalidRequest([("request", "is not an xgr.v1.RecommendRequest message")])
            if message.request_id:
                found = Violations()
                call.request_id = choose_request_id(
                    message.request_id, context, self._limits, found
                )
            remaining_s = context.time_remaining()  # from now on, however long the message took
            deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
            return request_from_proto(message, self._limits, call.request_id, deadline_s, found)
        except Exception as error:  # noqa: BLE001 - as in `_outcome`; a server that drains refuses it all the same
            return _failure(error, call)

    async def _accept(
        self, request: RecRequest, num_bytes: int
    ) -> pb.RecommendResponse | RpcFailure:
        """The answer of a call that counts as in flight."""
        self._num_waiting_bytes += num_bytes
        self._idle.clear()
        try:
            with self._accepted.including_this():
                reply = result_to_proto(await self._engine.submit(request))
                return self._too_large(reply) or reply
        except asyncio.CancelledError:
            if not self._accepted.is_ended:
                raise
            return CUT_OFF
        finally:
            self._num_waiting_bytes -= num_bytes
            if not self._accepted:
                self._idle.set()

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


def _failure(error: Exception, call: CallRecord) -> RpcFailure:
    """The answer to what was raised."""
    failure = failure_from_error(error) if isinstance(error, XgrError) else None
    if failure is None:
        fields = {"request_id": call.request_id}
        logger.error("request %s failed", call.request_id, exc_info=error, extra=fields)
        return internal_failure(call.request_id)
    return failure


def add_to_server(servicer: RecommendServicer, server: Any) -> None:
    """Register the servicer; unlike the generated function, which would read and parse the message before the servicer."""
    handler = grpc.stream_unary_rpc_method_handler(
        servicer.recommend, response_serializer=pb.RecommendResponse.SerializeToString
    )
    add_handlers(server, SERVICE_NAME, {"Recommend": handler})
