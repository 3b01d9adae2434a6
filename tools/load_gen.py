"""Load on a running service: latency percentiles, goodput and statuses as JSON.

    python tools/load_gen.py --target 127.0.0.1:50051 --rate 50 --duration-s 30 --num-items 1682
    python tools/load_gen.py --target 127.0.0.1:50051 --concurrency 8 --histories requests.jsonl --json

--rate is an open loop (Poisson arrivals, latency from the moment a request was due), --concurrency a closed one. Histories
are recorded (a JSON line each: a list of item ids, or a request as `xgr client --input` takes it) or random ids; users come
back with histories that have grown by one to three items. Shares of requests can have rules, be given up by their caller,
or break the contract. The first --warmup requests are sent and left out of the figures. Exit code: 0, or 1 when a request
got an answer that contradicts what was sent (a broken one answered, a sound one refused as invalid), or none got one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools._bench.command import NO_LIMIT, exit_code_of, number, whole
from tools._bench.load import CANCELLED, OK, Arrivals, Tally, run_closed, run_open
from tools._bench.traffic import UNKNOWN_ITEM, Traffic, TrafficOptions, read_histories
from xgr_runtime.errors import XgrError
from xgr_runtime.service.address import DEFAULT_TARGET
from xgr_runtime.service.client import AsyncRecommendClient
from xgr_runtime.types import NORMALIZATIONS, Search

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_SECONDS = 1e9
MAX_CALLERS = 2**16
MAX_LENGTH = 2**24
_positive = number(0, MAX_SECONDS, is_open=True)
_count = whole(1, NO_LIMIT)
_share = number(0, 1)
_callers = whole(1, MAX_CALLERS)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        histories = [] if args.histories is None else read_histories(args.histories)
        traffic = Traffic(traffic_options(args), args.seed, histories)
        tally = asyncio.run(drive(args, traffic))
    except (ValueError, OSError, XgrError) as error:
        parser.error(str(error))
    report = {**settings(args), **tally.report(args.slo_ms), "environment": environment()}
    if args.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name}: {json.dumps(value)}")
    if tally.num_history_unknown > tally.num_history_used:
        print(
            f"load_gen: the catalogue knows {tally.num_history_used} of "
            f"{tally.num_history_used + tally.num_history_unknown} history items; name items it has with "
            "--num-items or --histories, or the load is one of nearly empty histories",
            file=sys.stderr,
        )
    is_in_vain = not is_answered(args, tally)
    if is_in_vain:
        print(f"load_gen: not one request was answered: {outcome(tally)}", file=sys.stderr)
    return 1 if is_in_vain or tally.num_improper else 0


def is_answered(args: argparse.Namespace, tally: Tally) -> bool:
    """Whether the service did what was asked of it at least once; of broken requests that is a refusal."""
    wanted = [OK]
    if args.bad_share == 1:
        wanted += ["INVALID_ARGUMENT", "NOT_FOUND"]
    if args.cancel_share == 1:
        wanted += [CANCELLED]
    return any(tally.statuses[status] for status in wanted)


def outcome(tally: Tally) -> str:
    """The statuses in words."""
    if tally.statuses:
        return ", ".join(f"{count} {status}" for status, count in sorted(tally.statuses.items()))
    return f"all {tally.num_done} were of the warm-up" if tally.num_done else "none was sent"


async def drive(args: argparse.Namespace, traffic: Traffic) -> Tally:
    """Run the load that the arguments describe."""
    tally = Tally(skip=args.warmup)
    until_s = time.monotonic() + args.duration_s
    most = args.requests or NO_LIMIT
    async with AsyncRecommendClient(args.target, timeout_s=args.timeout_s) as client:
        if args.rate is None:
            await run_closed(client, traffic, tally, args.concurrency, until_s, most)
        else:
            arrivals = Arrivals(args.rate, args.max_in_flight, args.seed)
            await run_open(client, traffic, tally, arrivals, until_s, most)
    return tally


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--rate", type=_positive, metavar="R", help="open loop: requests per second")
    mode.add_argument("--concurrency", type=_callers, metavar="N", help="closed loop: callers")
    parser.add_argument("--duration-s", type=_positive, default=10.0, metavar="S")
    parser.add_argument("--requests", type=_count, metavar="N", help="stop after so many")
    parser.add_argument(
        "--warmup", type=whole(0, NO_LIMIT), default=0, metavar="N", help="requests not counted"
    )
    parser.add_argument("--timeout-s", type=_positive, default=10.0, help="deadline of a request")
    parser.add_argument("--max-in-flight", type=_callers, default=4096, help="with --rate")
    parser.add_argument("--slo-ms", type=_positive, default=200.0, help="goodput counts up to this")
    parser.add_argument("--seed", type=whole(0, NO_LIMIT), default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_traffic_arguments(parser.add_argument_group("requests"))
    return parser


def add_traffic_arguments(group: Any) -> None:
    """What a request looks like."""
    defaults = TrafficOptions()
    group.add_argument("--histories", type=Path, metavar="FILE", help="JSON lines of histories")
    group.add_argument("--num-items", type=whole(1, UNKNOWN_ITEM - 1), default=defaults.num_items, metavar="N",
                       help="random histories and exclusions are ids 1 to N")  # fmt: skip
    group.add_argument("--max-length", type=whole(1, MAX_LENGTH), default=defaults.max_length, metavar="N",
                       help="items of the longest random history")  # fmt: skip
    group.add_argument("--users", type=_count, default=defaults.num_users, metavar="N")
    group.add_argument("--catalog", default="")
    group.add_argument("--beam-width", type=_count, metavar="W")
    group.add_argument("--num-results", type=_count, metavar="N")
    group.add_argument("--normalization", choices=NORMALIZATIONS)
    group.add_argument("--tags", default="", metavar="TAG,TAG", help="tags that rules name")
    for name in ("rules", "bad", "cancel"):
        group.add_argument(f"--{name}-share", type=_share, default=0.0, metavar="0..1")
    group.add_argument("--cancel-after-ms", type=_positive, default=50.0, help="on average")


def traffic_options(args: argparse.Namespace) -> TrafficOptions:
    """The requests that the arguments describe."""
    search = Search(
        catalog=args.catalog,
        beam_width=args.beam_width,
        num_results=args.num_results,
        normalization=args.normalization,
    )
    return TrafficOptions(
        num_users=args.users,
        num_items=args.num_items,
        max_length=args.max_length,
        search=search,
        tags=tuple(tag for tag in args.tags.split(",") if tag),
        rules_share=args.rules_share,
        bad_share=args.bad_share,
        cancel_share=args.cancel_share,
        cancel_after_s=args.cancel_after_ms / 1e3,
    )


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked, as far as it is no default of the service."""
    loop = {"concurrency": args.concurrency} if args.rate is None else {"rate_per_s": args.rate}
    return {
        "target": args.target,
        "loop": "closed" if args.rate is None else "open",
        **loop,
        "seed": args.seed,
        "num_warmup": args.warmup,
    }


def environment() -> dict[str, Any]:
    """Where the load came from; what the service runs on is for its own report."""
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
