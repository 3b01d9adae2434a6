"""What `xgr client` does with its arguments: one request, or a stream of JSON lines with bounded concurrency."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable
from typing import Any, TypeAlias

import grpc

from xgr_runtime.errors import ConfigError, DeadlineExceeded, EngineClosed, XgrError
from xgr_runtime.service.client import AsyncRecommendClient, RecommendClient
from xgr_runtime.service.json_lines import request_from_json, result_to_json
from xgr_runtime.service.rpc_errors import CODES, ServiceError
from xgr_runtime.types import RecRequest, RecResult, Rules, Search, SearchResult

EXIT_FAILED, EXIT_UNREACHABLE, EXIT_DEADLINE = 1, 3, 4
Answer: TypeAlias = tuple[dict[str, Any], int]
WINDOW = 4  # lines read ahead per concurrent call, so that one slow call does not idle the others


def handle_client(args: argparse.Namespace) -> int:
    """Run `xgr client`; returns its exit code."""
    if args.input is None:
        return _send_one(args)
    if args.input == "-":
        return asyncio.run(_send_lines(args, sys.stdin))
    try:
        with open(args.input, encoding="utf-8") as lines:
            return asyncio.run(_send_lines(args, lines))
    except OSError as error:
        raise ConfigError(f"cannot read {args.input}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{args.input} must be UTF-8 text: {error}") from error


def search_from_args(args: argparse.Namespace) -> Search:
    """The search that the arguments describe."""
    return Search(
        catalog=args.catalog,
        catalog_version=args.catalog_version,
        beam_width=args.beam_width,
        beam_widths=args.beam_widths,
        num_results=args.num_results,
        normalization=args.normalization,
        rules=Rules(
            require=tuple(args.require),
            exclude_tags=args.exclude_tags,
            exclude_item_ids=() if args.exclude_ids is None else args.exclude_ids,
            exclude_keys=args.exclude_keys,
            exclude_history=args.exclude_history,
        ),
        max_items_per_sid=args.max_items_per_sid,
        return_level_scores=args.level_scores,
    )


def _send_one(args: argparse.Namespace) -> int:
    request = RecRequest(
        request_id=args.request_id,
        history_item_ids=args.history_ids,
        history_keys=args.history_keys,
        history_sids=args.sids,
        prompt_token_ids=args.prompt_token_ids,
        searches=(search_from_args(args),),
        on_overflow=args.on_overflow,
        on_unknown=args.on_unknown,
    )
    start_s = time.monotonic()
    with RecommendClient(args.target, timeout_s=args.timeout_s) as client:
        try:
            result = client.recommend(request)
        except XgrError as error:
            print(f"xgr client: {_status_of(error)}: {error_text(error)}", file=sys.stderr)
            return exit_code(error)
    client_ms = 1e3 * (time.monotonic() - start_s)
    if args.json:
        print(json.dumps({**result_to_json(result), "client_ms": round(client_ms, 3)}))
    else:
        print("\n".join(table(result, client_ms)))
    return 0 if all(search.status == "ok" for search in result.results) else EXIT_FAILED


async def _send_lines(args: argparse.Namespace, lines: Iterable[str]) -> int:
    """Results leave in the order of the lines, as soon as they are there; the exit code is that of the worst answer."""
    search, limit = search_from_args(args), asyncio.Semaphore(args.concurrency)
    answers: asyncio.Queue[asyncio.Task[Answer] | None] = asyncio.Queue(WINDOW * args.concurrency)
    async with AsyncRecommendClient(args.target, timeout_s=args.timeout_s) as client:

        async def read_lines() -> None:
            numbered = enumerate(lines, start=1)
            try:
                # In a thread: a slow pipe must not hold up the answers of the lines before.
                while (line := await asyncio.to_thread(next, numbered, None)) is not None:
                    if line[1].strip():
                        answer = _answer_line(client, line[1], line[0], search, limit)
                        await answers.put(asyncio.ensure_future(answer))
            finally:
                await answers.put(None)

        reader = asyncio.ensure_future(read_lines())
        worst = 0
        while (task := await answers.get()) is not None:
            answer, code = await task
            print(json.dumps(answer), flush=True)
            worst = max(worst, code)
        await reader
    return worst


async def _answer_line(
    client: AsyncRecommendClient,
    text: str,
    number: int,
    search: Search,
    limit: asyncio.Semaphore,
) -> Answer:
    request_id = ""
    async with limit:
        start_s = time.monotonic()
        try:
            request = request_from_json(json.loads(text), search)
            request_id = request.request_id
            result = await client.recommend(request)
        except json.JSONDecodeError as error:
            problem = {"code": "INVALID_ARGUMENT", "message": f"line {number} is not JSON: {error}"}
            return {"line": number, "error": problem}, EXIT_FAILED
        except XgrError as error:
            problem = {"code": _status_of(error), "message": error_text(error)}
            return {"line": number, "request_id": request_id, "error": problem}, exit_code(error)
        client_ms = round(1e3 * (time.monotonic() - start_s), 3)
    failed = any(found.status != "ok" for found in result.results)
    return {**result_to_json(result), "client_ms": client_ms}, EXIT_FAILED if failed else 0


def exit_code(error: XgrError) -> int:
    """The exit code for a failed call."""
    if isinstance(error, DeadlineExceeded):
        return EXIT_DEADLINE
    is_unavailable = isinstance(error, ServiceError) and error.code is grpc.StatusCode.UNAVAILABLE
    return EXIT_UNREACHABLE if is_unavailable or isinstance(error, EngineClosed) else EXIT_FAILED


def error_text(error: XgrError) -> str:
    """The message without the status name, which is printed beside it."""
    text = str(error)
    return text.partition(": ")[2] if isinstance(error, ServiceError) else text


def _status_of(error: XgrError) -> str:
    if isinstance(error, ServiceError):
        return str(error.code.name)
    return next((str(code.name) for kind, code in CODES if isinstance(error, kind)), "UNKNOWN")


def table(result: RecResult, client_ms: float) -> list[str]:
    """A result as lines for people."""
    lines = [
        f"request {result.request_id}: {result.num_history_used} history items used, "
        f"{result.num_history_unknown} unknown, {result.num_prompt_tokens} prompt tokens, "
        f"{client_ms:.1f} ms (engine {result.timings.total_ms:.1f} ms)"
    ]
    for search in result.results:
        lines += [*_search_lines(search)]
    return lines


def _search_lines(search: SearchResult) -> Iterable[str]:
    widths = "-".join(map(str, search.beam_widths))
    yield (
        f"catalogue {search.catalog} {search.catalog_version}: {search.num_items} items of "
        f"{search.num_valid} live beams, widths {widths}, scores over {search.normalization}"
    )
    if search.reason:
        yield f"{search.status}: {search.reason}"
    if not search.num_items:
        return
    rows = [("rank", "item", "key", "sid", "score")]
    for i in range(search.num_items):
        key = search.keys[i] if search.keys is not None else ""
        sid = "-".join(map(str, search.sids[i].tolist()))
        score = f"{search.scores[i]:.4f}"
        rows.append((str(i + 1), str(search.item_ids[i]), key, sid, score))
    shown = [c for c in range(5) if c != 2 or search.keys is not None]
    sizes = [max(len(row[c]) for row in rows) for c in range(5)]
    for row in rows:
        yield "  ".join(row[c].rjust(sizes[c]) for c in shown)
