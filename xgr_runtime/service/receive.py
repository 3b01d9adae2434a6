"""The message and the id of a call whose handler reads its requests itself.

gRPC's own reading of a single message has no end: a call that is half-closed without one gets no answer for ever, and one that
never sends it stays open. Here both are refused, and the bytes reach the handler, so that it says what is wrong with them.
"""

import asyncio
import uuid

import grpc
from google.protobuf.message import DecodeError

from xgr_runtime.config import LimitsConfig
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service.rpc_errors import REQUEST_ID_KEY, RpcFailure, ServicerContext
from xgr_runtime.service.wire_arrays import Violations

NO_MESSAGE = RpcFailure(grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a message")


async def receive(context: ServicerContext, receive_s: float) -> bytes | RpcFailure:
    """The bytes of the call's first message, or the answer to a call that sends none in that many seconds."""
    task = asyncio.current_task()
    assert task is not None
    is_late = False

    def give_up() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(receive_s, give_up)
    try:
        data = await context.read()
    except asyncio.CancelledError:
        if not is_late:
            raise
        return RpcFailure(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"the call sent no whole message within service.receive_s = {receive_s:g} seconds",
        )
    finally:
        timer.cancel()
    return NO_MESSAGE if data is grpc.aio.EOF else data


def parse_message(data: bytes) -> pb.RecommendRequest | None:
    """The message in the bytes of a call, None where there is none; gRPC alone would answer UNKNOWN."""
    try:
        return pb.RecommendRequest.FromString(data)
    except DecodeError:
        return None


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
    return new_request_id()


def new_request_id() -> str:
    """One that no other call has."""
    return uuid.uuid4().hex
