"""One call over a real connection: answers, request ids, deadlines, cancellation, every status and its details."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pool
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.service.hostile import raw_http2 as raw
from tests.service.servers import running, with_free_port
from tests.service.stand_in import StandInEngine, answer
from tests.service.strategies import plain
from tests.service.waiting import PATIENCE_S, until
from xgr_runtime.config import LimitsConfig, RuntimeConfig
from xgr_runtime.config_check import RANGES
from xgr_runtime.service import call_record, servicer
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2_grpc
from xgr_runtime.service.call_record import CLOCK_TOLERANCE_S, CallRecord
from xgr_runtime.service.call_totals import CallTotals
from xgr_runtime.service.rpc_errors import CLOSED_MESSAGE, ServiceError, error_from_rpc
from xgr_runtime.service.translate import request_from_proto
from xgr_runtime.service.translate_result import result_from_proto, result_to_proto
from xgr_runtime.service.wire_arrays import Violations
from xgr_runtime.xschedule.request_check import check_request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from xgr_runtime.types import RecRequest

HISTORY = pb.Int64Values(values=[10, 20])
METHOD = "/xgr.v1.RecommendService/Recommend"


def request(catalog: str = "films", **fields: Any) -> pb.RecommendRequest:
    return pb.RecommendRequest(
        history_item_ids=HISTORY, searches=[pb.Search(catalog=catalog)], **fields
    )


def with_stub(
    test: Callable[[Any, StandInEngine], Awaitable[None]], config: RuntimeConfig | None = None
) -> None:
    async def main() -> None:
        engine = StandInEngine()
        async with running(engine, config) as (_, target), grpc.aio.insecure_channel(target) as c:
            await test(c, engine)

    asyncio.run(main())


async def call(channel: Any, message: pb.RecommendRequest, **options: Any) -> Any:
    stub = recommend_pb2_grpc.RecommendServiceStub(channel)  # type: ignore[no-untyped-call]
    return await stub.Recommend(message, **options)


async def failure(channel: Any, message: pb.RecommendRequest, **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, message, **options)
    return caught.value


def metadata_of(metadata: Any) -> dict[str, Any]:
    """Metadata as a dict; older grpc gives pairs where a mapping has keys."""
    return dict(tuple(metadata))


def violations(error: Any) -> list[tuple[str, str]]:
    """The violations as gRPC's own client library reads them; it also compares code and message of call and status."""
    status = rpc_status.from_call(error)
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    (detail,) = status.details
    assert detail.type_url == "type.googleapis.com/google.rpc.BadRequest"
    bad = error_details_pb2.BadRequest()
    assert detail.Unpack(bad)
    return [(v.field, v.description) for v in bad.field_violations]


def test_an_answer_is_the_engines_answer() -> None:
    async def test(channel: Any, engine: StandInEngine) -> None:
        reply = await call(channel, request("keys", request_id="abc"))
        assert plain(result_from_proto(reply)) == plain(answer(engine.requests[0]))
        assert reply.results[0].item_ids == np.array([30, 31, 32], "<i8").tobytes()

    with_stub(test)


def test_request_ids_come_from_message_metadata_or_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "xgr_runtime.service")

    async def test(channel: Any, engine: StandInEngine) -> None:
        stub = recommend_pb2_grpc.RecommendServiceStub(channel)  # type: ignore[no-untyped-call]
        seen = []
        for field, metadata in (("a", "b"), ("", "b"), ("", None), ("", None)):
            options = {} if metadata is None else {"metadata": (("x-request-id", metadata),)}
            rpc = stub.Recommend(request(request_id=field), **options)
            reply = await rpc
            assert metadata_of(await rpc.trailing_metadata())["x-request-id"] == reply.request_id
            seen.append(reply.request_id)
        assert seen[:2] == ["a", "b"]
        assert len(set(seen)) == 4
        assert len(seen[2]) == 32
        assert [r.request_id for r in engine.requests] == seen
        for request_id in seen:
            assert f"request {request_id} OK in " in caplog.text
        error: Any = await failure(channel, request("raise:Overloaded", request_id="z"))
        assert metadata_of(error.trailing_metadata())["x-request-id"] == "z"
        assert "request z RESOURCE_EXHAUSTED in " in caplog.text

    with_stub(test)


@pytest.mark.parametrize("request_id", ["x" * 129, "two words", "tab\t", "schlüssel"])
def test_a_request_id_that_cannot_be_echoed_is_refused(request_id: str) -> None:
    async def test(channel: Any, engine: StandInEngine) -> None:
        error: Any = await failure(channel, request(request_id=request_id))
        assert violations(error) == [
            (
                "request_id",
                "must be at most limits.max_request_id_length = 128 printable ASCII characters without spaces, "
                f"got {len(request_id)} characters",
            )
        ]
        assert metadata_of(error.trailing_metadata())["x-request-id"].isalnum()
        too_long = (("x-request-id", "y" * 129),)
        error = await failure(channel, request(), metadata=too_long)
        assert [field for field, _ in violations(error)] == ["metadata x-request-id"]
        assert engine.requests == []

    with_stub(test)


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (
            "InvalidRequest",
            grpc.StatusCode.INVALID_ARGUMENT,
            "history_item_ids[1]: unknown item; searches[0].beam_widths: expected 3",
        ),
        ("Overloaded", grpc.StatusCode.RESOURCE_EXHAUSTED, "8 requests are waiting"),
        ("DeadlineExceeded", grpc.StatusCode.DEADLINE_EXCEEDED, "too late by 2 ms"),
        ("EngineClosed", grpc.StatusCode.UNAVAILABLE, CLOSED_MESSAGE),
        ("NotFound", grpc.StatusCode.NOT_FOUND, "catalogue 'x' is not loaded; known: films"),
    ],
)
def test_errors_of_the_engine_have_their_status(
    raised: str, code: grpc.StatusCode, message: str
) -> None:
    async def test(channel: Any, engine: StandInEngine) -> None:
        error: Any = await failure(channel, request(f"raise:{raised}"))
        assert (error.code(), error.details()) == (code, message)
        if raised == "InvalidRequest":
            assert violations(error) == [
                ("history_item_ids[1]", "unknown item"),
                ("searches[0].beam_widths", "expected 3"),
            ]
        else:
            assert "grpc-status-details-bin" not in metadata_of(error.trailing_metadata())
        await call(channel, request())

    with_stub(test)


@pytest.mark.parametrize("raised", ["OpUnavailable", "ZeroDivisionError"])
def test_a_defect_is_internal_and_its_traceback_stays_in_the_log(
    raised: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(channel: Any, engine: StandInEngine) -> None:
        error: Any = await failure(channel, request(f"raise:{raised}", request_id="bad-one"))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in error.details()
        assert "secret" not in str(error.trailing_metadata())
        await call(channel, request())

    with_stub(test)
    (record,) = [r for r in caplog.records if r.name == "xgr_runtime.service.servicer"]
    assert record.getMessage() == "request bad-one failed"
    assert record.exc_info is not None
    assert "secret" in str(record.exc_info[1])


def test_a_failed_search_is_a_result_and_no_rpc_failure() -> None:
    async def test(channel: Any, engine: StandInEngine) -> None:
        (result,) = (await call(channel, request("failed"))).results
        assert result.status == pb.SEARCH_STATUS_FAILED
        assert result.reason == "the model gave NaN in round 1"
        assert (result.num_items, result.item_ids, result.num_levels) == (0, b"", 3)

    with_stub(test)


def test_all_violations_of_a_request_come_back_at_once() -> None:
    async def test(channel: Any, engine: StandInEngine) -> None:
        message = pb.RecommendRequest(
            history_sids=pb.SidValues(num_levels=3, values_le=b"12345"),
            searches=[pb.Search(beam_width=0, num_results=100000)],
        )
        message.history_keys.SetInParent()
        error: Any = await failure(channel, message)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert [field for field, _ in violations(error)] == [
            "history_sids.values_le",
            "history",
            "searches[0].beam_width",
            "searches[0].num_results",
        ]
        assert all(field in error.details() for field, _ in violations(error))
        assert engine.requests == []

    with_stub(test)


def test_a_thousand_violations_still_fit_the_trailers() -> None:
    async def test(channel: Any, engine: StandInEngine) -> None:
        groups = [pb.TagGroup(any_of=["", "ü" * 500])] * 1000
        search = pb.Search(rules=pb.Rules(require=groups))
        message = pb.RecommendRequest(history_item_ids=HISTORY, searches=[search])
        error: Any = await failure(channel, message)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        found = violations(error)
        assert found[0] == (
            "searches[0].rules.require[0].any_of[0]",
            "a tag must not be empty",
        )
        assert found[-1] == ("", f"and {1000 - (len(found) - 1)} more violations")
        assert len(error.details().encode()) <= 1024

    with_stub(test, RuntimeConfig(limits=LimitsConfig(max_tags=5000, max_tag_length=500)))


def test_bytes_that_are_no_message_are_an_invalid_argument() -> None:
    async def test(channel: Any, engine: StandInEngine) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(METHOD)(b"\xff\xff\xff")
        assert violations(caught.value) == [
            ("request", "is not an xgr.v1.RecommendRequest message")
        ]

    with_stub(test)


def test_messages_beyond_the_limit_are_refused_both_ways(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = RuntimeConfig(limits=LimitsConfig(max_message_bytes=4096))

    async def test(channel: Any, engine: StandInEngine) -> None:
        message = request()
        message.history_item_ids.values.extend([2**62] * 1000)
        error: Any = await failure(channel, message)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        large = request(request_id="large")
        large.searches[0].num_results = 1000
        error = await failure(channel, large)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        size = answer_size(engine.requests[-1])
        text = (
            f"the reply has {size} bytes, more than limits.max_message_bytes = 4096; ask for fewer"
        )
        assert error.details().startswith(text)
        assert metadata_of(error.trailing_metadata())["x-xgr-reason"] == "REPLY_TOO_LARGE"
        raised = error_from_rpc(error.code(), error.details(), tuple(error.trailing_metadata()))
        assert isinstance(raised, ServiceError)
        await call(channel, request())

    caplog.set_level(logging.INFO)
    with_stub(test, config)
    (record,) = [r for r in caplog.records if "large" in r.getMessage()]
    assert record.exc_info is None
    assert record.getMessage().startswith("request large RESOURCE_EXHAUSTED in ")
    assert not [r for r in caplog.records if r.levelno > logging.INFO or r.exc_info]


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_the_largest_reply_is_the_limit_itself(excess: int) -> None:
    message = request(request_id="r")
    message.searches[0].num_results = 500
    parsed = request_from_proto(message, LimitsConfig(), "r", None, Violations())
    limit = answer_size(parsed) - excess

    async def test(channel: Any, engine: StandInEngine) -> None:
        if excess > 0:
            assert (await failure(channel, message)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        else:
            assert (await call(channel, message)).ByteSize() == limit + excess

    with_stub(test, RuntimeConfig(limits=LimitsConfig(max_message_bytes=limit)))


def answer_size(sent: RecRequest) -> int:
    """Bytes of the reply that the stand-in gives."""
    return result_to_proto(answer(sent)).ByteSize()


def test_an_id_of_the_server_always_fits_the_limit() -> None:
    lowest, highest = map(int, RANGES["limits.max_request_id_length"])

    async def test(channel: Any, engine: StandInEngine) -> None:
        reply = await call(channel, request())
        assert len(reply.request_id) <= lowest
        assert check_request(engine.requests[-1], RuntimeConfig(limits=limits)) == []

    limits = LimitsConfig(max_request_id_length=lowest)
    with_stub(test, RuntimeConfig(limits=limits))

    async def test_longest(channel: Any, engine: StandInEngine) -> None:
        request_id = "x" * highest
        message = request("c" * 300, request_id=request_id, on_overflow=9)
        message.searches.extend([message.searches[0]] * 200)
        error: Any = await failure(channel, message)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert metadata_of(error.trailing_metadata())["x-request-id"] == request_id
        assert (await call(channel, request(request_id=request_id))).request_id == request_id

    with_stub(test_longest, RuntimeConfig(limits=LimitsConfig(max_request_id_length=highest)))


def test_long_names_and_control_characters_do_not_come_back() -> None:
    async def test(channel: Any, engine: StandInEngine) -> None:
        search = pb.Search(catalog="c" * 300_000, catalog_version="\x1b" * 300_000)
        search.rules.exclude_tags.append("\x1b[31m" * 100_000)
        message = pb.RecommendRequest(history_item_ids=HISTORY, searches=[search])
        error: Any = await failure(channel, message)
        assert violations(error) == [
            ("searches[0].catalog", LONG_NAME),
            ("searches[0].catalog_version", LONG_NAME),
            ("searches[0].rules.exclude_tags[0]", LONG_TAG),
        ]
        assert engine.requests == []
        error = await failure(channel, request("raise:ControlCharacters"))
        assert error.details() == "field\\x1b: \\x1b[31m\\nsecond line"
        assert violations(error) == [("field\\x1b", "\\x1b[31m\\nsecond line")]

    with_stub(test)


LONG_NAME = "must have at most 256 characters, got 300000; raise limits.max_name_length to allow"
LONG_TAG = "must have at most 256 characters, got 500000; raise limits.max_tag_length to allow"


async def late_call(channel: Any, was_there: Callable[[], object]) -> None:
    """A call whose deadline passes while the server has it: the time that a busy machine needs to bring it there is found out."""
    timeout_s = 0.2
    while not was_there():
        assert timeout_s < PATIENCE_S, "no call came to the server"
        error: Any = await failure(channel, request("wait"), timeout=timeout_s)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        timeout_s *= 2


def test_the_deadline_reaches_the_engine_and_ends_its_waiting() -> None:
    async def test(channel: Any, engine: StandInEngine) -> None:
        sent_s = time.monotonic()
        waiting = asyncio.ensure_future(call(channel, request("wait"), timeout=1000))
        await until(lambda: engine.requests)
        deadline_s = engine.requests[0].deadline_s
        assert deadline_s is not None
        # gRPC sends what is left in three digits, rounded up.
        assert sent_s + 999 < deadline_s < time.monotonic() + 1011
        waiting.cancel()
        await until(lambda: len(engine.cancelled) == 1)
        await late_call(channel, lambda: len(engine.requests) > 1)
        await until(lambda: len(engine.cancelled) == len(engine.requests))
        await call(channel, request())
        assert engine.requests[-1].deadline_s is None

    with_stub(test)


def test_a_message_that_takes_long_takes_nothing_from_the_deadline() -> None:
    """The engine counts from the moment in which it has the request, as gRPC does."""

    async def test(channel: Any, engine: StandInEngine) -> None:
        start_s = time.monotonic()
        stream = channel.stream_unary(METHOD)(timeout=1000)
        await stream.wait_for_connection()
        await asyncio.sleep(0.6)  # its handler waits for the message
        await stream.write(request("wait").SerializeToString())
        await until(lambda: engine.requests)
        deadline_s = engine.requests[0].deadline_s
        assert deadline_s is not None
        assert start_s + 999.7 < deadline_s
        stream.cancel()

    with_stub(test)


@pytest.mark.parametrize("caller", ["gRPC", "one that does not look at its watch"])
def test_log_metric_and_client_agree_about_a_late_call(
    caller: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline ends the call on both sides, and the side that a busy machine holds up learns of it from the other."""

    async def main() -> None:
        async with running(StandInEngine()) as (server, target):
            totals = server.servicer.calls
            if caller == "gRPC":
                monkeypatch.setattr(call_record, "CLOCK_TOLERANCE_S", PATIENCE_S)
                async with grpc.aio.insecure_channel(target) as channel:
                    await late_call(channel, lambda: totals.by_code)
            else:
                await late_raw_call(target, lambda: totals.by_code)
            await until(lambda: totals.num_in_flight == 0)
            assert set(totals.by_code) == {"DEADLINE_EXCEEDED"}

    caplog.set_level(logging.INFO, "xgr_runtime.service.call_record")
    asyncio.run(main())
    lines = [r for r in caplog.records if r.name == "xgr_runtime.service.call_record"]
    assert lines
    for line in lines:
        assert line.__dict__["status"] == "DEADLINE_EXCEEDED"
        assert "cancelled by its deadline after" in line.getMessage()


async def late_raw_call(target: str, was_there: Callable[[], object]) -> None:
    """The same, of a caller that waits for what the server says."""
    host, _, port = target.rpartition(":")
    sent = raw.data(raw.message(request("wait").SerializeToString()))
    timeout_ms = 200
    while not was_there():
        assert timeout_ms < 1e3 * PATIENCE_S, "no call came to the server"
        head = raw.headers(extra=[(b"grpc-timeout", b"%dm" % timeout_ms)])
        told = await asyncio.to_thread(raw.exchange, (host, int(port)), raw.OPENING + head + sent)
        assert raw.status_of(told) == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        timeout_ms *= 2


@pytest.mark.parametrize(
    ("remaining_s", "code"),
    [
        (None, "CANCELLED"),
        (-1.0, "DEADLINE_EXCEEDED"),
        (CLOCK_TOLERANCE_S, "DEADLINE_EXCEEDED"),
        (1.1 * CLOCK_TOLERANCE_S, "CANCELLED"),
    ],
)
def test_who_leaves_just_before_the_deadline_leaves_for_it(
    remaining_s: float | None, code: str
) -> None:
    totals = CallTotals()
    CallRecord(totals, is_logged=False).end_cancelled(remaining_s)
    assert totals.by_code == {code: 1}


@pytest.mark.parametrize("place", ["parse_message", "request_from_proto", "result_to_proto"])
def test_a_call_that_fails_anywhere_is_answered_and_ends(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message as large as the limit allows may find no memory: the call ends, and the gauge of calls goes back."""

    def fails(*_: object) -> None:
        raise MemoryError("secret")

    async def main() -> None:
        engine = StandInEngine()
        async with running(engine) as (server, target), grpc.aio.insecure_channel(target) as c:
            with monkeypatch.context() as patch:
                patch.setattr(servicer, place, fails)
                error: Any = await failure(c, request(), metadata=(("x-request-id", "r1"),))
            assert error.code() is grpc.StatusCode.INTERNAL
            assert error.details().startswith("internal error; the server's log has the details")
            assert metadata_of(error.trailing_metadata())["x-request-id"] == "r1"
            assert server.servicer.calls.num_in_flight == server.servicer.num_in_flight == 0
            assert server.servicer.calls.by_code == {"INTERNAL": 1}
            await call(c, request())

    asyncio.run(main())


def test_cancelling_a_call_cancels_its_waiting_in_the_engine() -> None:
    async def main() -> None:
        engine = StandInEngine()
        async with running(engine) as (server, target), grpc.aio.insecure_channel(target) as c:
            calls = [asyncio.ensure_future(call(c, request("wait"))) for _ in range(5)]
            await until(lambda: len(engine.requests) == 5)
            assert server.servicer.num_in_flight == 5
            for task in calls[:3]:
                task.cancel()
            await until(lambda: server.servicer.num_in_flight == 2)
            assert len(engine.cancelled) == 3
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(r, BaseException) for r in results)
        assert server.servicer.num_in_flight == 0

    asyncio.run(main())


def test_a_lost_connection_cancels_too() -> None:
    async def main() -> None:
        engine = StandInEngine()
        async with running(engine) as (server, target):
            channel = grpc.aio.insecure_channel(target)
            task = asyncio.ensure_future(call(channel, request("wait")))
            await until(lambda: engine.requests)
            await channel.close()
            await until(lambda: server.servicer.num_in_flight == 0)
            assert len(engine.cancelled) == 1
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_the_service_is_registered_under_its_name() -> None:
    pool: Any = descriptor_pool.Default()
    service = pool.FindServiceByName("xgr.v1.RecommendService")
    assert [m.name for m in service.methods] == ["Recommend"]
    assert with_free_port().service.host == "127.0.0.1"
