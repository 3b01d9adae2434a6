"""GET /metrics over HTTP, in the server's loop: as much HTTP as a scraper needs, and bounds on everything else.

One request a connection. Head, time and number of connections are bounded, so the endpoint costs the service little whoever
talks to it; a library's threaded server would give every idle connection a thread. Beyond MAX_CONNECTIONS as many again are
refused in words, further ones are closed without one. The text is made on a thread of its own, because asking the engine takes
its lock; one that no process waits for at its end.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable

from xgr_runtime.errors import ConfigError, printable
from xgr_runtime.service.worker_thread import WorkerThread

PATH = "/metrics"
MAX_CONNECTIONS = 16
MAX_HEAD_BYTES = 8192
MAX_TARGET_BYTES = 1024
HEAD_S = 5.0  # to send a request's head
CONNECTION_S = 20.0  # for everything
LINGER_S, LINGER_BYTES = 1.0, 65536
_REQUEST_LINE = re.compile(rb"([A-Z]{1,20}) ([!-~]+) HTTP/1\.[01]")
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    414: "URI Too Long",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
logger = logging.getLogger(__name__)

Render = Callable[[str], tuple[str, bytes]]
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class MetricsEndpoint:
    """render: from the Accept header to content type and body; called on a worker thread."""

    def __init__(self, render: Render, host: str, port: int) -> None:
        self._render, self._host, self._port = render, host, port
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._renders = WorkerThread("xgr-metrics")

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address cannot be bound."""
        try:
            self._server = await asyncio.start_server(
                self._connected, self._host, self._port, limit=MAX_HEAD_BYTES, reuse_port=False
            )
        except (OSError, ValueError) as error:  # ValueError: text that cannot be the name of a host
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cannot serve metrics on {printable(self._host, 80)}:{self._port}: {printable(str(reason), 200)}; "
                "choose another service.metrics_port (0 turns metrics off) or service.metrics_host"
            ) from error
        logger.info("metrics at http://%s:%d%s", printable(self._host, 80), self._port, PATH)

    async def close(self) -> None:
        """Stop listening and end the connections that are open."""
        if self._server is None:
            return
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()
        self._server = None
        self._renders.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_open = len(self._tasks)
        if num_open >= 2 * MAX_CONNECTIONS:
            writer.transport.abort()
            return
        answer = self._answer if num_open < MAX_CONNECTIONS else self._refuse
        task = asyncio.ensure_future(self._serve(answer, reader, writer))
        self._tasks.add(task)

        def on_end(_: object) -> None:
            self._tasks.discard(task)
            writer.transport.abort()  # nothing where it is closed; a task that never ran closes nothing

        task.add_done_callback(on_end)

    async def _serve(
        self, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One connection. Whatever a peer does to it ends it and nothing else."""
        try:
            await asyncio.wait_for(answer(reader, writer), CONNECTION_S)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _send(writer, 503)
        await _linger(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status, method, accept = await _read_request(reader)
        if status == 0:
            return
        content_type, body = "text/plain; charset=utf-8", b""
        if status == 200:
            try:
                content_type, body = await asyncio.wrap_future(
                    self._renders.submit(lambda: self._render(accept))
                )
            # Metrics are never worth the service: the scraper learns that they failed, the log why.
            except Exception:
                logger.exception("metrics could not be rendered")
                status = 500
        await _send(writer, status, content_type, body, is_head=method == b"HEAD")
        await _linger(reader, writer)


async def _read_request(reader: asyncio.StreamReader) -> tuple[int, bytes, str]:
    """Status of the answer (0: the peer left without a word), method, and the Accept header."""
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_S)
    except asyncio.IncompleteReadError as error:
        return (400 if error.partial else 0), b"", ""
    except asyncio.LimitOverrunError:
        return await _status_of_long_head(reader), b"", ""
    except asyncio.TimeoutError:
        return 408, b"", ""
    line, *fields = head.split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        return 400, b"", ""
    method, target = found.groups()
    if len(target) > MAX_TARGET_BYTES:
        return 414, method, ""
    if target.split(b"?")[0] != PATH.encode():
        return 404, method, ""
    if method not in (b"GET", b"HEAD"):
        return 405, method, ""
    named = (field.partition(b":") for field in fields)
    accepts = [value.strip() for name, _, value in named if name.lower() == b"accept"]
    return 200, method, b",".join(accepts).decode("latin-1")


async def _status_of_long_head(reader: asyncio.StreamReader) -> int:
    """Whether the target or the fields are what is too long."""
    start = await reader.read(MAX_HEAD_BYTES)
    return 431 if b"\r\n" in start else 414


async def _send(
    writer: asyncio.StreamWriter,
    status: int,
    content_type: str = "text/plain; charset=utf-8",
    body: bytes = b"",
    *,
    is_head: bool = False,
) -> None:
    if status != 200:
        body = f"{status} {_REASONS[status]}\n".encode()
    fields = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if status == 405:
        fields.append("Allow: GET, HEAD")
    head = "\r\n".join(fields) + "\r\n\r\n"
    writer.write(head.encode("ascii") + (b"" if is_head else body))
    await writer.drain()


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take what the peer still sends, for a moment: closing on unread data resets the connection under the answer."""
    if writer.can_write_eof():
        writer.write_eof()
    left = LINGER_BYTES
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_discard(reader, left), LINGER_S)


async def _discard(reader: asyncio.StreamReader, num_bytes: int) -> None:
    while num_bytes > 0:
        data = await reader.read(MAX_HEAD_BYTES)
        if not data:
            return
        num_bytes -= len(data)
