"""`xgr client --input`: a stream of JSON lines with bounded concurrency, answered in their order.

A line that cannot be read, parsed or sent is answered in its place and never ends the stream. What ends it early is an output
that fails; then every call is withdrawn.
"""

import asyncio
import time
from collections.abc import AsyncIterable, Callable, Coroutine
from typing import Any, TypeAlias

from xgr_runtime.errors import InvalidRequest, XgrError
from xgr_runtime.files import parse_json
from xgr_runtime.service.client import AsyncRecommendClient
from xgr_runtime.service.client_output import (
    EXIT_FAILED,
    error_text,
    exit_code,
    json_line,
    status_name,
)
from xgr_runtime.service.json_lines import request_from_json, result_to_json
from xgr_runtime.types import Search

Answer: TypeAlias = tuple[dict[str, Any], int]
WINDOW = 4  # lines read ahead per concurrent call, so that one slow call does not idle the others


async def send_lines(
    client: AsyncRecommendClient,
    lines: AsyncIterable[bytes],
    search: Search,
    concurrency: int,
    write_line: Callable[[str], None],
) -> int:
    """Send the request of every line and write the answers; returns the exit code, that of the worst answer.

    Answers are written in the order of the lines, as soon as they are there. Raises what `lines` and `write_line` raise.
    """
    limit = asyncio.Semaphore(concurrency)
    answers: asyncio.Queue[asyncio.Task[Answer] | None] = asyncio.Queue(WINDOW * concurrency)
    tasks: set[asyncio.Task[Any]] = set()
    is_over = False

    def start(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def read() -> None:
        number = 0
        try:
            async for line in lines:
                number += 1
                if line.strip():
                    await answers.put(start(_answer_line(client, line, number, search, limit)))
        finally:
            if not is_over:  # else nobody takes from the queue any more
                await answers.put(None)

    reader = start(read())
    worst = 0
    try:
        while (task := await answers.get()) is not None:
            answer, code = await task
            write_line(json_line(answer))
            worst = max(worst, code)
        await reader
    finally:
        is_over = True
        left = list(tasks)
        for unfinished in left:
            unfinished.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    return worst


async def _answer_line(
    client: AsyncRecommendClient,
    line: bytes,
    number: int,
    search: Search,
    limit: asyncio.Semaphore,
) -> Answer:
    request_id = ""
    async with limit:
        start_s = time.monotonic()
        try:
            try:
                data = parse_json(line)
            except ValueError as error:
                raise InvalidRequest([(f"line {number}", str(error))]) from error
            request = request_from_json(data, search)
            request_id = request.request_id
            result = await client.recommend(request)
        except XgrError as error:
            problem = {"code": status_name(error), "message": error_text(error)}
            return {"line": number, "request_id": request_id, "error": problem}, exit_code(error)
        client_ms = round(1e3 * (time.monotonic() - start_s), 3)
    failed = any(found.status != "ok" for found in result.results)
    return {**result_to_json(result), "client_ms": client_ms}, EXIT_FAILED if failed else 0
