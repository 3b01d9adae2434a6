"""Errors between the runtime and gRPC, in both directions.

Status and details travel in HTTP trailers, which peers cut off at 8 KiB in all, so both are bounded: a request with a thousand
faults must come back as INVALID_ARGUMENT and not as a reset stream. Of gRPC's rich error model only the messages are used:
the helpers of grpcio-status pair a status with nothing but its details, and these calls end with a request id too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from xgr_runtime.errors import (
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    NotFound,
    Overloaded,
    XgrError,
    printable,
)

DETAILS_KEY = "grpc-status-details-bin"
REQUEST_ID_KEY = "x-request-id"
MAX_MESSAGE_BYTES = 1024
MAX_DETAIL_BYTES = 2048
REASON_KEY = "x-xgr-reason"
REPLY_TOO_LARGE = "REPLY_TOO_LARGE"
REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"
MAX_FIELD_BYTES = 256

# grpc has no type information: a ServicerContext of grpc.aio.
ServicerContext: TypeAlias = Any

CODES: tuple[tuple[type[XgrError], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (EngineClosed, grpc.StatusCode.UNAVAILABLE),
)
# The error itself may quote what the engine died of, which is for the log.
CLOSED_MESSAGE = "the engine has stopped and answers no requests; the server's log says why"


class ServiceError(XgrError, RuntimeError):
    """A call failed for a reason that is none of the runtime's own: no connection, a proxy, a defect of the server.

    `code` is the gRPC status, but UNAVAILABLE for a call that the server dropped: gRPC's own, that of `__cause__`, is CANCELLED.
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        self.code = code
        super().__init__(f"{code.name}: {message}")


@dataclass(frozen=True)
class RpcFailure:
    """What a failed call is answered with. details: a serialised google.rpc.Status, or empty. reason: of the trailing metadata."""

    code: grpc.StatusCode
    message: str
    details: bytes = b""
    reason: str = ""


SHUTTING_DOWN = RpcFailure(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")


def internal_failure(request_id: str = "") -> RpcFailure:
    """The answer to a defect: the caller learns only where to look."""
    where = f" under request id {request_id}" if request_id else ""
    text = f"internal error; the server's log has the details{where}"
    return RpcFailure(grpc.StatusCode.INTERNAL, text)


def failure_from_error(error: XgrError) -> RpcFailure | None:
    """The answer for an error of the engine or of the translation; None for one that clients must not see."""
    for kind, code in CODES:
        if isinstance(error, kind):
            text = CLOSED_MESSAGE if kind is EngineClosed else str(error)
            message = _cut(text, MAX_MESSAGE_BYTES)
            details = b""
            if isinstance(error, InvalidRequest):
                details = _bad_request(code, message, error.violations)
            return RpcFailure(code, message, details)
    return None


def error_from_rpc(
    code: grpc.StatusCode, message: str, trailing: Iterable[tuple[str, str | bytes]]
) -> XgrError:
    """The error that a client raises for a failed call: the engine's own type when the service itself answered.

    The service marks its answers with a request id in the trailing metadata; without it the status came from gRPC (no
    connection, message too large), which is a ServiceError. So is a reply that is too large: unlike a full queue it is no better
    later. A deadline is the same wherever it was noticed.
    """
    metadata = dict(trailing)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(message)
    if REQUEST_ID_KEY not in metadata or REASON_KEY in metadata:
        return ServiceError(code, message)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(_violations(metadata.get(DETAILS_KEY), message))
    for kind, known in CODES:
        if code is known:
            return kind(message)
    return ServiceError(code, message)


def _bad_request(
    code: grpc.StatusCode, message: str, violations: Iterable[tuple[str, str]]
) -> bytes:
    detail = error_details_pb2.BadRequest()
    dropped = 0
    for field, text in violations:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(field, MAX_FIELD_BYTES), description=_cut(text, MAX_FIELD_BYTES)
        )
        if dropped or detail.ByteSize() + violation.ByteSize() > MAX_DETAIL_BYTES:
            dropped += 1
        else:
            detail.field_violations.append(violation)
    if dropped:
        detail.field_violations.add(field="", description=f"and {dropped} more violations")
    packed = AnyMessage()
    packed.Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=message, details=[packed])
    return bytes(status.SerializeToString())


def _violations(details: str | bytes | None, message: str) -> list[tuple[str, str]]:
    if not isinstance(details, bytes):
        return [("request", message)]
    found = []
    try:
        for detail in status_pb2.Status.FromString(details).details:
            bad = error_details_pb2.BadRequest()
            if detail.Unpack(bad):
                found += [(v.field, v.description) for v in bad.field_violations]
    except DecodeError:
        return [("request", message)]
    return found or [("request", message)]


def _cut(text: str, max_bytes: int) -> str:
    """Text that logs and terminals can show, in at most that many bytes of UTF-8."""
    data = printable(text, max_bytes).encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode("utf-8")
    return data[: max_bytes - 3].decode("utf-8", "ignore") + "..."
