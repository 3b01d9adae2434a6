"""`xgr serve` and the arguments of `xgr client`."""

import argparse
import asyncio
from typing import Any

import numpy as np

import xgr_runtime
from xgr_runtime.config import load_config
from xgr_runtime.errors import shown
from xgr_runtime.service import client_cli
from xgr_runtime.service.address import DEFAULT_TARGET, announce
from xgr_runtime.service.client import DEFAULT_TIMEOUT_S
from xgr_runtime.service.logs import configure_logging, flush_logs
from xgr_runtime.service.output import say
from xgr_runtime.service.server import ServeEnd, serve
from xgr_runtime.service.stop_signals import EXIT_CUT_OFF, exiting_before_serving
from xgr_runtime.service.worker_thread import end_process, leave_work
from xgr_runtime.shipped import config_file, config_names
from xgr_runtime.types import NORMALIZATIONS

SAY_S = 1.0


def add_serve_parser(subparsers: Any) -> None:
    """Add `xgr serve`."""
    parser = subparsers.add_parser(
        "serve",
        help="serve recommendations over gRPC",
        description="Load everything, listen, say so in one line, serve until SIGTERM, ctrl-C or SIGHUP (a terminal that closes; "
        "ignored under nohup). Exit code: 0 every accepted request was answered (also when SIGTERM or SIGHUP comes before there "
        "was any), 1 some were cut off or the engine failed, 2 nothing was served (the reason is on standard error).",
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help=f"YAML configuration, or the name of one that comes with the package: {', '.join(config_names())}",
    )
    parser.add_argument("--device", help="auto, npu, cuda or cpu; as --set device=D")
    parser.add_argument("--host", help="address to listen on; as --set service.host=H")
    parser.add_argument("--port", help="port, 0 takes a free one; as --set service.port=P")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="A.B=VALUE",
        help="override an option of the configuration; may be repeated",
    )
    parser.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        help="of what goes to standard error; as --set service.log_level=L (default: info, one line per request)",
    )
    parser.set_defaults(handler=handle_serve)


def handle_serve(args: argparse.Namespace) -> int:
    """Run `xgr serve`. Raises XgrError before listening when something cannot be loaded or bound."""
    named = {
        "device": args.device,
        "service.host": args.host,
        "service.port": args.port,
        "service.log_level": args.log_level,
    }
    given = [f"{name}={value}" for name, value in named.items() if value is not None]
    try:
        with exiting_before_serving():
            config = load_config(config_file(args.config), [*args.overrides, *given]).config
            configure_logging(config.service)
            engine = xgr_runtime.Engine.from_config(config)
            try:
                engine.start()
                end = asyncio.run(serve(engine, config, announce))
                if end is not ServeEnd.DRAINED:
                    flush_logs()
                    say(f"xgr serve: {end.value}\n", SAY_S)
            finally:
                engine.close()
                flush_logs()
    except (
        SystemExit
    ):  # SIGTERM or SIGHUP before anything was served; libraries of the device may be at work
        end_process(0)
    exit_code = 0 if end is ServeEnd.DRAINED else EXIT_CUT_OFF
    leave_work(exit_code)
    return exit_code


def add_client_parser(subparsers: Any) -> None:
    """Add `xgr client`."""
    parser = subparsers.add_parser(
        "client",
        help="ask a running service for recommendations",
        description="Send one history, or one request per line of a file. Exit code: 0 answered, 1 refused or failed, "
        "2 wrong usage, 3 the service cannot be reached or is shutting down, 4 deadline exceeded.",
    )
    parser.add_argument(
        "--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="default: %(default)s"
    )
    parser.add_argument(
        "--timeout-s",
        type=_positive,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="longest wait for an answer; default: %(default)g",
    )
    parser.add_argument("--json", action="store_true", help="print results as JSON, one a line")
    parser.add_argument(
        "--concurrency",
        type=_count,
        default=1,
        metavar="N",
        help="with --input: requests at once; default: %(default)s",
    )
    parser.add_argument("--request-id", default="", help="default: one that the server makes up")
    parser.add_argument(
        "--on-overflow",
        choices=["truncate", "error"],
        help="of a history that is too long; default: the server's search.on_overflow",
    )
    parser.add_argument(
        "--on-unknown",
        choices=["skip", "error"],
        help="of items that the catalogue does not know; default: the server's search.on_unknown",
    )
    _add_inputs(parser.add_argument_group("history (oldest first; exactly one)"))
    _add_search(parser.add_argument_group("search (default: the server's configuration)"))
    parser.set_defaults(handler=client_cli.handle_client)


def _add_inputs(group: Any) -> None:
    one = group.add_mutually_exclusive_group(required=True)
    one.add_argument("--history-ids", type=_int64s, metavar="1,2,3", help="item ids; '' is empty")
    one.add_argument("--history-keys", type=_strings, metavar="A,B", help="item keys")
    one.add_argument("--sids", type=_sids, metavar="1-2-3,4-5-6", help="semantic ids in codes")
    one.add_argument("--prompt-token-ids", type=_int64s, metavar="1,2,3", help="rendered prompt")
    one.add_argument(
        "--input",
        metavar="FILE",
        help="JSON requests, one a line ('-' reads standard input), such as "
        '{"history_item_ids": [1, 2], "searches": [{"num_results": 5}]}; results are JSON, one a line, in the same order. '
        "Lines without searches use the search given here",
    )


def _add_search(group: Any) -> None:
    group.add_argument("--catalog", default="")
    group.add_argument("--catalog-version", default="")
    widths = group.add_mutually_exclusive_group()
    widths.add_argument("--beam-width", type=_count, metavar="W")
    widths.add_argument("--beam-widths", type=_counts, metavar="W1,W2,W3", help="one per level")
    group.add_argument("--num-results", type=_count, metavar="N")
    group.add_argument("--normalization", choices=NORMALIZATIONS)
    group.add_argument("--max-items-per-sid", type=_count, metavar="N")
    group.add_argument("--level-scores", action="store_true", help="also per-level scores (--json)")
    group.add_argument(
        "--require",
        type=_any_of,
        action="append",
        default=[],
        metavar="TAG|TAG",
        help="an item must have one of these tags; may be repeated, all must hold",
    )
    group.add_argument("--exclude-tags", type=_strings, default=(), metavar="TAG,TAG")
    group.add_argument("--exclude-ids", type=_int64s, metavar="1,2,3")
    group.add_argument("--exclude-keys", type=_strings, default=(), metavar="A,B")
    group.add_argument("--exclude-history", action="store_true")


def _strings(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _any_of(text: str) -> tuple[str, ...]:
    tags = tuple(part for part in text.split("|") if part)
    if not tags:
        raise argparse.ArgumentTypeError("must name at least one tag")
    return tags


def _int64s(text: str) -> Any:
    try:
        return np.array([int(part) for part in _strings(text)], dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(
            f"must be 64-bit numbers with commas, got {shown(text)}"
        ) from error


def _sids(text: str) -> Any:
    try:
        rows = [[int(code) for code in sid.split("-")] for sid in _strings(text)]
        return np.array(rows, dtype=np.uint32).reshape(len(rows), len(rows[0]) if rows else 0)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(
            f"must be semantic ids of one length such as 1-2-3,4-5-6, got {shown(text)}"
        ) from error


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 10 or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be a whole number from 1 to 9999999999, got {shown(text)}"
        )
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be seconds above 0, got {shown(text)}")
    return value
