"""The endpoint alone: what a scraper gets, and what whoever else connects gets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.process import ROOT
from tests.service.scrape import free_port, get, send, split
from tests.service.waiting import PATIENCE_S, PROCESS_S, until
from xgr_runtime.errors import ConfigError
from xgr_runtime.service import metrics_http
from xgr_runtime.service.metrics_http import MetricsEndpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BODY = b"xgr_a 1\n" * 1000


def render(accept: str) -> tuple[str, bytes]:
    return f"text/x; got={accept}", BODY


@asynccontextmanager
async def serving(render_text: metrics_http.Render = render) -> AsyncIterator[int]:
    port = free_port()
    endpoint = MetricsEndpoint(render_text, "127.0.0.1", port)
    await endpoint.start()
    try:
        yield port
    finally:
        await endpoint.close()


async def is_serving(port: int) -> bool:
    status, _, body = await get(port)
    return status == 200 and body == BODY


async def until_serving(port: int) -> None:
    """Until a connection gets a place."""
    end = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(OSError):
            if await is_serving(port):
                return
        assert time.monotonic() < end, "no place came back"
        await asyncio.sleep(0.002)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is ended for being slow."""
    for name in ("HEAD_S", "CONNECTION_S", "LINGER_S"):
        monkeypatch.setattr(metrics_http, name, 10 * PATIENCE_S)


def test_a_scrape() -> None:
    async def main() -> None:
        async with serving() as port:
            status, fields, body = await get(port, "/metrics?x=1", {"Accept": "a/b", "X": "y"})
            assert (status, body) == (200, BODY)
            assert fields["content-type"] == "text/x; got=a/b"
            assert fields["content-length"] == str(len(BODY))
            assert fields["connection"] == "close"
            head = await send(port, b"HEAD /metrics HTTP/1.0\r\n\r\n")
            assert split(head)[0] == 200
            assert b"content-length: 8000" in head.lower()
            assert head.endswith(b"\r\n\r\n")

    asyncio.run(main())


REFUSED = {
    "another path": (b"GET / HTTP/1.1\r\n\r\n", 404),
    "a longer path": (b"GET /metrics/x HTTP/1.1\r\n\r\n", 404),
    "an encoded path": (b"GET /%6detrics HTTP/1.1\r\n\r\n", 404),
    "a path of dots": (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", 404),
    "a long path": (b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\n\r\n", 414),
    "a very long path": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 414),
    "a path without an end": (b"GET /" + b"a" * 100_000, 414),
    "post": (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
    "post of much": (b"POST /metrics HTTP/1.1\r\n\r\n" + b"x" * 50_000, 405),
    "put": (b"PUT /metrics HTTP/1.1\r\n\r\n", 405),
    "delete": (b"DELETE /metrics HTTP/1.1\r\n\r\n", 405),
    "lower case": (b"get /metrics HTTP/1.1\r\n\r\n", 400),
    "no version": (b"GET /metrics\r\n\r\n", 400),
    "http 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "a space in the path": (b"GET /met rics HTTP/1.1\r\n\r\n", 400),
    "bytes": (bytes(range(256)) + b"\r\n\r\n", 400),
    "a tls hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "nothing in it": (b"\r\n\r\n", 400),
    "many fields": (b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n", 431),
    "a long field": (b"GET /metrics HTTP/1.1\r\nA: " + b"b" * 20_000 + b"\r\n\r\n", 431),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_scrape(case: str, caplog: pytest.LogCaptureFixture) -> None:
    data, expected = REFUSED[case]

    async def main() -> None:
        async with serving() as port:
            status, fields, body = split(await send(port, data))
            assert status == expected
            assert body.startswith(str(expected).encode())
            assert fields["connection"] == "close"
            assert ("allow" in fields) == (expected == 405)
            assert await is_serving(port)

    asyncio.run(main())
    assert caplog.records == []


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=20))
@settings(max_examples=5)
def test_garbage_ends_its_own_connection_only(payloads: list[bytes]) -> None:
    async def main() -> None:
        async with serving() as port:
            for payload in payloads:
                answer = await send(port, payload + b"\r\n\r\n")
                assert split(answer)[0] in (400, 404, 405, 414, 431)
            assert await is_serving(port)

    asyncio.run(main())


@pytest.mark.usefixtures("patient")
def test_who_says_nothing_gets_nothing_and_who_stops_midway_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with serving() as port:
            for partial, expected in ((b"", b""), (b"GET /met", b"HTTP/1.1 400")):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(partial)
                writer.write_eof()
                answer = await reader.read()
                assert answer[: len(b"HTTP/1.1 400")] == expected
                writer.close()
            monkeypatch.setattr(metrics_http, "HEAD_S", 0.2)
            start_s = time.monotonic()
            assert (await send(port, b"GET /metrics HT")).startswith(b"HTTP/1.1 408")
            assert (await send(port, b"")).startswith(b"HTTP/1.1 408")
            assert 2 * 0.2 <= time.monotonic() - start_s < PATIENCE_S

    asyncio.run(main())


@pytest.mark.usefixtures("patient")
def test_connections_beyond_the_limit_are_refused_and_places_come_back() -> None:
    async def main() -> None:
        async with serving() as port:
            held = [
                await asyncio.open_connection("127.0.0.1", port)
                for _ in range(metrics_http.MAX_CONNECTIONS)
            ]
            assert (await get(port))[0] == 503  # connections are taken in one after the other
            for _, writer in held:
                writer.close()
            await until_serving(port)

    asyncio.run(main())


async def first_bytes(reader: asyncio.StreamReader) -> bytes:
    """What a connection is told; nothing where it is closed without a word."""
    try:
        return await reader.read(12)
    except ConnectionError:
        return b""


@pytest.mark.usefixtures("patient")
def test_a_crowd_of_connections_costs_no_more_than_twice_the_limit() -> None:
    """The first are served, as many again are refused in words, and the rest closed without one."""
    limit, num_all = metrics_http.MAX_CONNECTIONS, 300

    async def main() -> None:
        async with serving() as port:
            crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(num_all)]
            told = [asyncio.ensure_future(first_bytes(reader)) for reader, _ in crowd]
            await until(lambda: sum(one.done() for one in told) == num_all - limit)
            words = [one.result() for one in told if one.done()]
            assert (words.count(b"HTTP/1.1 503"), words.count(b"")) == (limit, num_all - 2 * limit)
            # Those that were refused are kept until their peers have gone.
            served = [t for t in asyncio.all_tasks() if "_serve" in repr(t.get_coro())]
            assert len(served) == 2 * limit
            for _, writer in crowd:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            await asyncio.gather(*told)
            await until_serving(port)

    asyncio.run(main())


def test_a_process_does_not_wait_for_text_that_never_comes() -> None:
    code = """
import asyncio, threading
from xgr_runtime.service.metrics_http import MetricsEndpoint

def render(accept):
    entered.set()
    threading.Event().wait()

async def main():
    endpoint = MetricsEndpoint(render, "127.0.0.1", PORT)
    await endpoint.start()
    _, writer = await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(b"GET /metrics HTTP/1.1\\r\\n\\r\\n")
    while not entered.is_set():
        await asyncio.sleep(0.01)
    await endpoint.close()
    writer.close()

entered = threading.Event()
asyncio.run(main())
"""
    run = [sys.executable, "-c", code.replace("PORT", str(free_port()))]
    assert subprocess.run(run, cwd=ROOT, timeout=PROCESS_S, check=False).returncode == 0


def test_a_reset_connection_is_nobodys_business(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serving() as port:
            for data in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n\r\n"):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(data)
                writer.transport.abort()
            assert await is_serving(port)

    asyncio.run(main())
    assert caplog.records == []


def test_a_failing_render_is_a_500_and_a_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail(accept: str) -> tuple[str, bytes]:
        raise ZeroDivisionError("secret of the machine")

    async def main() -> None:
        async with serving(fail) as port:
            status, _, body = await get(port)
            assert (status, body) == (500, b"500 Internal Server Error\n")

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_the_loop_goes_on_while_text_is_made() -> None:
    is_made, go_on = threading.Event(), threading.Event()

    def wait(accept: str) -> tuple[str, bytes]:
        is_made.set()
        assert go_on.wait(PATIENCE_S)
        return "text/plain", b"done"

    async def main() -> None:
        async with serving(wait) as port:
            scrape = asyncio.ensure_future(get(port))
            await until(is_made.is_set)
            go_on.set()
            assert (await scrape)[2] == b"done"

    asyncio.run(main())


@pytest.mark.usefixtures("patient")
def test_closing_ends_open_connections_and_frees_the_port() -> None:
    async def main() -> None:
        port = free_port()
        endpoint = MetricsEndpoint(render, "127.0.0.1", port)
        await endpoint.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: len(endpoint._tasks) == 1)
        # The connection might say something for far longer.
        await asyncio.wait_for(endpoint.close(), PATIENCE_S)
        await endpoint.close()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await get(port)
        again = MetricsEndpoint(render, "127.0.0.1", port)
        await again.start()
        assert await is_serving(port)
        await again.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "reason"),
    [("127.0.0.1", "address already in use"), ("no host", ""), ("x" * 300, ""), ("a\nb", "")],
)
def test_an_address_that_cannot_be_bound(host: str, reason: str) -> None:
    async def main() -> None:
        async with serving() as port:
            with pytest.raises(ConfigError, match=r"service\.metrics_port") as caught:
                await MetricsEndpoint(render, host, port).start()
            assert reason in str(caught.value).lower()
            assert str(caught.value).isprintable()
            assert len(str(caught.value)) < 500

    asyncio.run(main())
