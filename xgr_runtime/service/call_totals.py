"""Calls as the service saw them end. Counted in the server's loop, copied by whoever renders metrics."""

import threading
from collections import Counter

import grpc

from xgr_runtime.service.rpc_errors import REPLY_TOO_LARGE, REQUEST_TOO_LARGE, RpcFailure
from xgr_runtime.xschedule.histogram import REQUEST_BOUNDS_S, Histogram

OK = grpc.StatusCode.OK.name
CANCELLED = "cancelled"
DEADLINE = "deadline"
OVERLOAD = "overload"
INTERNAL = "internal"
_CAUSE_OF_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
    grpc.StatusCode.NOT_FOUND: "not_found",
    grpc.StatusCode.RESOURCE_EXHAUSTED: OVERLOAD,
    grpc.StatusCode.DEADLINE_EXCEEDED: DEADLINE,
    grpc.StatusCode.UNAVAILABLE: "unavailable",
}
_CAUSE_OF_REASON = {REQUEST_TOO_LARGE: "request_too_large", REPLY_TOO_LARGE: "reply_too_large"}
CAUSES = (*_CAUSE_OF_CODE.values(), *_CAUSE_OF_REASON.values(), CANCELLED, INTERNAL)


class CallTotals:
    """Thread-safe. by_code: calls by the name of their gRPC status; by_cause: those without OK; seconds: those with OK."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_in_flight = 0
        self.by_code: Counter[str] = Counter()
        self.by_cause: Counter[str] = Counter()
        self.seconds = Histogram(REQUEST_BOUNDS_S)

    def start(self) -> None:
        """A call arrived; exactly one of the `end_...` follows."""
        with self._lock:
            self.num_in_flight += 1

    def end_ok(self, seconds: float) -> None:
        """A call was answered that long after its arrival."""
        with self._lock:
            self._end(OK, "")
            self.seconds.add(seconds)

    def end_failed(self, failure: RpcFailure) -> None:
        """A call was answered with another status."""
        cause = _CAUSE_OF_REASON.get(failure.reason) or _CAUSE_OF_CODE.get(failure.code, INTERNAL)
        with self._lock:
            self._end(failure.code.name, cause)

    def end_cancelled(self, *, is_late: bool) -> str:
        """The client went away, or the call's deadline passed (is_late); returns the name of the status it counts as."""
        code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED
        name = str(code.name)
        with self._lock:
            self._end(name, DEADLINE if is_late else CANCELLED)
        return name

    def _end(self, code: str, cause: str) -> None:
        self.num_in_flight -= 1
        self.by_code[code] += 1
        if cause:
            self.by_cause[cause] += 1

    def copy(self) -> "CallTotals":
        """As they are now."""
        copied = CallTotals()
        with self._lock:
            copied.num_in_flight = self.num_in_flight
            copied.by_code, copied.by_cause = self.by_code.copy(), self.by_cause.copy()
            copied.seconds = self.seconds.copy()
        return copied
