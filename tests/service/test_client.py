"""Both clients against a real server: answers, the engine's own errors, and errors of the connection."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
from hypothesis import given, settings

from tests.service.scrape import free_port
from tests.service.servers import running, running_in_thread
from tests.service.stand_in import StandInEngine, answer
from tests.service.strategies import plain, requests
from tests.service.waiting import PATIENCE_S, until, wait_until
from xgr_runtime import errors
from xgr_runtime.config import LimitsConfig, RuntimeConfig
from xgr_runtime.errors import ConfigError
from xgr_runtime.service.client import AsyncRecommendClient, RecommendClient
from xgr_runtime.service.rpc_errors import ServiceError, error_from_rpc
from xgr_runtime.types import RecRequest, Search

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with running_in_thread(StandInEngine()) as address:
        yield address


def request(catalog: str = "films") -> RecRequest:
    history = np.array([3, 4], dtype=np.int64)
    return RecRequest("r", history_item_ids=history, searches=(Search(catalog=catalog),))


@settings(max_examples=30)
@given(requests(max_searches=1))
def test_any_request_and_its_answer_cross_the_wire(target: str, asked: RecRequest) -> None:
    search = asked.searches[0]
    if search.catalog.partition(":")[0] in ("wait", "raise", "failed"):
        return
    with RecommendClient(target, timeout_s=PATIENCE_S) as client:
        got = client.recommend(asked)
    expected = answer(asked)
    if not asked.request_id:
        assert len(got.request_id) == 32
    assert plain(got.results) == plain(expected.results)
    assert got.num_history_used == expected.num_history_used


def test_one_client_serves_many_threads(target: str) -> None:
    with RecommendClient(target, timeout_s=PATIENCE_S) as client, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: client.recommend(request()), range(100)))
    assert {plain(r.results[0])["item_ids"] for r in results} == {
        plain(answer(request()).results[0])["item_ids"]
    }


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        ("Overloaded", errors.Overloaded, "8 requests are waiting"),
        ("EngineClosed", errors.EngineClosed, "the engine has stopped"),
        ("NotFound", errors.NotFound, "catalogue 'x' is not loaded"),
        ("DeadlineExceeded", errors.DeadlineExceeded, "too late by 2 ms"),
        ("ZeroDivisionError", ServiceError, "INTERNAL: internal error"),
    ],
)
def test_the_engines_errors_come_back_as_themselves(
    raised: str, kind: type[errors.XgrError], message: str
) -> None:
    async def main() -> None:
        async with (
            running(StandInEngine()) as (_, target),
            AsyncRecommendClient(target, timeout_s=PATIENCE_S) as client,
        ):
            with pytest.raises(kind, match=message):
                await client.recommend(request(f"raise:{raised}"))

    asyncio.run(main())


def test_violations_come_back_one_by_one(target: str) -> None:
    with (
        RecommendClient(target, timeout_s=PATIENCE_S) as client,
        pytest.raises(errors.InvalidRequest) as caught,
    ):
        client.recommend(request("raise:InvalidRequest"))
    assert caught.value.violations == (
        ("history_item_ids[1]", "unknown item"),
        ("searches[0].beam_widths", "expected 3"),
    )


def test_no_server_is_named() -> None:
    port = free_port()
    with RecommendClient(f"127.0.0.1:{port}", timeout_s=PATIENCE_S) as client:
        with pytest.raises(ServiceError, match=rf"cannot reach 127\.0\.0\.1:{port}: ") as caught:
            client.recommend(request())
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert not client.wait_until_serving(0.2)


def test_the_earlier_of_timeout_and_deadline_counts(target: str) -> None:
    with RecommendClient(target, timeout_s=0.2) as client:
        start_s = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded, match=r"no answer from .* within 0\.2 s"):
            client.recommend(request("wait"))
        assert 0.1 < time.monotonic() - start_s < PATIENCE_S
    with RecommendClient(target, timeout_s=None) as client:
        for deadline_s in (time.monotonic() + 0.2, time.monotonic() - 1):
            late = RecRequest(
                history_item_ids=np.zeros(1, np.int64),
                searches=(Search(catalog="wait"),),
                deadline_s=deadline_s,
            )
            with pytest.raises(errors.DeadlineExceeded):
                client.recommend(late)


def test_a_message_beyond_the_clients_own_limit_is_a_service_error(target: str) -> None:
    many = RecRequest(history_item_ids=np.zeros(1000, np.int64))
    with (
        RecommendClient(target, max_message_bytes=1000) as client,
        pytest.raises(ServiceError, match="RESOURCE_EXHAUSTED"),
    ):
        client.recommend(many)


def test_a_request_that_is_too_large_for_the_limits_names_them() -> None:
    config = RuntimeConfig(limits=LimitsConfig(max_input_items=10))
    many = RecRequest(history_item_ids=np.zeros(11, np.int64))
    with (
        running_in_thread(StandInEngine(), config) as address,
        RecommendClient(address, timeout_s=PATIENCE_S) as client,
        pytest.raises(errors.InvalidRequest, match=r"limits\.max_input_items"),
    ):
        client.recommend(many)


@contextmanager
def cancelling_server() -> Iterator[str]:
    """Ends every call CANCELLED, as gRPC does with what a stopping server has not taken in."""

    def end(_: bytes, context: grpc.ServicerContext) -> bytes:
        return bytes(context.abort(grpc.StatusCode.CANCELLED, "gone"))  # it raises

    handler = grpc.unary_unary_rpc_method_handler(end)
    server = grpc.server(ThreadPoolExecutor(1))
    name = "xgr.v1.RecommendService"
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(name, {"Recommend": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_a_call_that_the_server_dropped_is_unavailable() -> None:
    """Its caller may ask another server."""

    async def ask(target: str) -> None:
        async with AsyncRecommendClient(target, timeout_s=PATIENCE_S) as client:
            await client.recommend(request())

    with cancelling_server() as target:
        said = f"^UNAVAILABLE: {target} ended the call without an answer: gone$"
        with (
            RecommendClient(target, timeout_s=PATIENCE_S) as client,
            pytest.raises(ServiceError, match=said) as dropped,
        ):
            client.recommend(request())
        with pytest.raises(ServiceError, match=said):
            asyncio.run(ask(target))
    assert dropped.value.code is grpc.StatusCode.UNAVAILABLE


def test_a_client_that_was_closed_says_so() -> None:
    """Nobody else need be asked: the caller's own side ended the call."""
    engine = StandInEngine()
    with running_in_thread(engine) as target, ThreadPoolExecutor(1) as pool:
        client = RecommendClient(target, timeout_s=PATIENCE_S)
        asked = pool.submit(client.recommend, request("wait"))
        wait_until(lambda: engine.requests)
        client.close()
        with pytest.raises(ServiceError) as closed:
            asked.result(PATIENCE_S)
    assert closed.value.code is grpc.StatusCode.CANCELLED


def test_closing_the_async_client_cancels_its_calls() -> None:
    async def main() -> None:
        engine = StandInEngine()
        async with running(engine) as (_, target):
            client = AsyncRecommendClient(target, timeout_s=PATIENCE_S)
            call = asyncio.ensure_future(client.recommend(request("wait")))
            await until(lambda: engine.requests)
            await client.close()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(main())


def test_cancelling_the_async_client_reaches_the_engine() -> None:
    async def main() -> None:
        engine = StandInEngine()
        async with (
            running(engine) as (_, target),
            AsyncRecommendClient(target, timeout_s=PATIENCE_S) as client,
        ):
            task = asyncio.ensure_future(client.recommend(request("wait")))
            await until(lambda: engine.requests)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: engine.cancelled)
            assert len(engine.cancelled) == 1

    asyncio.run(main())


def test_damaged_details_leave_the_message() -> None:
    code = grpc.StatusCode.INVALID_ARGUMENT
    for details in (b"\xff\xff", b"", None):
        trailing: list[tuple[str, str | bytes]] = [("x-request-id", "r")]
        if details is not None:
            trailing.append(("grpc-status-details-bin", details))
        error = error_from_rpc(code, "text", trailing)
        assert isinstance(error, errors.InvalidRequest)
        assert error.violations == (("request", "text"),)


@pytest.mark.parametrize("target", ["", "\udcff:1", "a\nb:1"])
def test_text_that_is_no_target_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match='a target is "host:port", got'):
        RecommendClient(target)
