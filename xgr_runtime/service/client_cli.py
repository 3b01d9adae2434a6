"""What `xgr client` does with its arguments: one request, or a stream of JSON lines."""

import argparse
import asyncio
import sys
import time
from functools import partial

from xgr_runtime.errors import XgrError
from xgr_runtime.service.client import AsyncRecommendClient, RecommendClient
from xgr_runtime.service.client_input import lines_of, open_input
from xgr_runtime.service.client_output import (
    EXIT_FAILED,
    error_text,
    exit_code,
    json_line,
    status_name,
    table,
)
from xgr_runtime.service.client_stream import send_lines
from xgr_runtime.service.json_lines import result_to_json
from xgr_runtime.types import RecRequest, Rules, Search


def handle_client(args: argparse.Namespace) -> int:
    """Run `xgr client`; returns its exit code."""
    if args.input is None:
        return _send_one(args)
    return asyncio.run(_send_lines(args))


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
            print(f"xgr client: {status_name(error)}: {error_text(error)}", file=sys.stderr)
            return exit_code(error)
    client_ms = 1e3 * (time.monotonic() - start_s)
    if args.json:
        print(json_line({**result_to_json(result), "client_ms": round(client_ms, 3)}))
    else:
        print("\n".join(table(result, client_ms)))
    return 0 if all(search.status == "ok" for search in result.results) else EXIT_FAILED


async def _send_lines(args: argparse.Namespace) -> int:
    lines = lines_of(open_input(args.input))
    async with AsyncRecommendClient(args.target, timeout_s=args.timeout_s) as client:
        return await send_lines(
            client, lines, search_from_args(args), args.concurrency, partial(print, flush=True)
        )
