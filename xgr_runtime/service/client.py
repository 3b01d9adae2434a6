"""Clients of the service, sync and async, that speak the runtime's own types.

Both raise what the engine would have raised in process (InvalidRequest with every violation, Overloaded, DeadlineExceeded,
NotFound, EngineClosed); anything that is not the service's own answer is a ServiceError with the gRPC status, or with UNAVAILABLE
for a call that the server dropped.
"""

import math
import time
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from xgr_runtime.config import LimitsConfig
from xgr_runtime.errors import DeadlineExceeded, InvalidRequest, XgrError, shown
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2_grpc
from xgr_runtime.service.call_options import MAX_TIMEOUT_S, check_target, check_timeout
from xgr_runtime.service.rpc_errors import REQUEST_ID_KEY, ServiceError, error_from_rpc
from xgr_runtime.service.translate import request_to_proto
from xgr_runtime.service.translate_result import result_from_proto
from xgr_runtime.types import RecRequest, RecResult

DEFAULT_TIMEOUT_S = 10.0
DEFAULT_MESSAGE_BYTES = LimitsConfig().max_message_bytes
# gRPC waits up to two minutes between attempts; a server that is up again should not stay without callers for that long.
MAX_RECONNECT_MS = 1000
# Of a call that a server dropped; what tells it from a server that refuses or is not there.
DROPPED = "ended the call without an answer"


class RecommendClient:
    """A synchronous client; safe to share between threads.

    target: "host:port". timeout_s: longest wait for an answer, None = for ever; a request's own deadline_s counts if it is earlier. Raises ConfigError for a target or a timeout that is none. The connection is made by the first call and made again when lost.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        max_message_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> None:
        self.target = check_target(target)
        self._timeout_s = check_timeout(timeout_s)
        self._is_closed = False
        self._channel = grpc.insecure_channel(target, options=_options(max_message_bytes))
        self._recommend = _stub(self._channel).Recommend
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def recommend(self, request: RecRequest) -> RecResult:
        """Send one request and wait for its answer.

        Raises InvalidRequest, NotFound, Overloaded, DeadlineExceeded, EngineClosed (the server is shutting down), or ServiceError.
        """
        message, timeout_s = request_to_proto(request), _timeout(request, self._timeout_s)
        try:
            reply = self._recommend(message, timeout=timeout_s)
        except grpc.RpcError as error:
            raise _error(error, self.target, timeout_s, is_closed=self._is_closed) from error
        return _result(reply)

    def wait_until_serving(self, timeout_s: float) -> bool:
        """Wait for the server to come up and be healthy; False when it did not in time."""
        limit_s = check_timeout(timeout_s)
        try:
            reply = self._health.Check(
                health_pb2.HealthCheckRequest(), timeout=limit_s, wait_for_ready=True
            )
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Close the connection; calls in flight are cancelled: they raise a ServiceError CANCELLED."""
        self._is_closed = True
        self._channel.close()

    def __enter__(self) -> "RecommendClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncRecommendClient:
    """The same client for asyncio; make and use it in one event loop. Cancelling a call cancels it on the server."""

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        max_message_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> None:
        self.target = check_target(target)
        self._timeout_s = check_timeout(timeout_s)
        self._channel = grpc.aio.insecure_channel(target, options=_options(max_message_bytes))
        self._recommend = _stub(self._channel).Recommend

    async def recommend(self, request: RecRequest) -> RecResult:
        """Send one request and await its answer; raises as RecommendClient.recommend does."""
        message, timeout_s = request_to_proto(request), _timeout(request, self._timeout_s)
        try:
            reply = await self._recommend(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _error(error, self.target, timeout_s) from error
        return _result(reply)

    async def close(self) -> None:
        """Close the connection; calls in flight are cancelled: they raise asyncio.CancelledError."""
        await self._channel.close()

    async def __aenter__(self) -> "AsyncRecommendClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _options(max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
    )


def _stub(channel: Any) -> Any:
    make: Any = recommend_pb2_grpc.RecommendServiceStub
    return make(channel)


def _timeout(request: RecRequest, timeout_s: float | None) -> float | None:
    if request.deadline_s is None:
        return timeout_s
    if math.isnan(request.deadline_s):
        text = f"must be seconds of time.monotonic(), got {shown(request.deadline_s)}"
        raise InvalidRequest([("deadline_s", text)])
    remaining_s = request.deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise DeadlineExceeded(
            f"the deadline passed {-remaining_s:.6g} s before the request was sent"
        )
    return min(remaining_s, MAX_TIMEOUT_S if timeout_s is None else timeout_s)


def _error(
    error: Any, target: str, timeout_s: float | None, *, is_closed: bool = False
) -> XgrError:
    """What to raise for a grpc.RpcError of either kind.

    A server that stops ends what it has not taken in yet CANCELLED, which is no answer and no wish of the caller's. It is where
    the caller closed a synchronous client, `is_closed`; calls of a closed asynchronous one do not come here.
    """
    code, message = error.code(), error.details() or ""
    trailing = tuple(error.trailing_metadata() or ())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and REQUEST_ID_KEY not in dict(trailing):
        message = f"no answer from {target} within {timeout_s} s"
    translated = error_from_rpc(code, message, trailing)
    if isinstance(translated, ServiceError) and code is grpc.StatusCode.UNAVAILABLE:
        return ServiceError(code, f"cannot reach {target}: {message}")
    if code is grpc.StatusCode.CANCELLED and not is_closed:
        return ServiceError(grpc.StatusCode.UNAVAILABLE, f"{target} {DROPPED}: {message}")
    return translated


def _result(reply: pb.RecommendResponse) -> RecResult:
    try:
        return result_from_proto(reply)
    except ValueError as error:
        raise ServiceError(grpc.StatusCode.INTERNAL, f"the reply is malformed: {error}") from error
