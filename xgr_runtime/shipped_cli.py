"""`xgr proto` and `xgr demo`: what comes with the package, as commands."""

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from xgr_runtime import shipped


def add_parsers(subparsers: Any) -> None:
    """Add `xgr proto` and `xgr demo`."""
    proto = subparsers.add_parser(
        "proto",
        help="print the folder of the .proto files",
        description="Print the import root of the .proto files, for protoc, buf and grpcurl: "
        'grpcurl -import-path "$(xgr proto)" -proto xgr/v1/recommend.proto ...',
    )
    proto.set_defaults(handler=_proto)

    demo = subparsers.add_parser(
        "demo",
        help="serve the demo model and recommend films for 943 users",
        description="Build the demo's catalogue, serve its model on loopback, ask for every MovieLens user, print metrics and "
        "latencies. Needs the recbole wheel, which holds the data: pip install --no-deps recbole==1.2.1. Exit code: 0 "
        "everything as promised, 1 a metric was not, 2 the demo could not run.",
    )
    demo.add_argument("--work", default=".demo", metavar="FOLDER", help="catalogue, requests, log")
    demo.add_argument("--report", default="demo-report.json", metavar="FILE", help="the figures")
    demo.add_argument(
        "--config", default="demo", metavar="FILE", help="of the service, as for `xgr serve`"
    )
    demo.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", dest="overrides", help="likewise"
    )
    demo.add_argument(
        "--no-prefix-cache", action="store_true", help="serve without it; the metrics stay the same"
    )
    demo.set_defaults(handler=_demo)


def _proto(args: argparse.Namespace) -> int:
    print(shipped.folder("proto"))
    return 0


def _demo(args: argparse.Namespace) -> int:
    # Its source lies with its training, under tools/; by this name it exists where the package is installed (setup.py).
    run = import_module("xgr_runtime.demo.run")
    overrides = [*args.overrides, *(["cache.prefix_cache=false"] if args.no_prefix_cache else [])]
    places = run.Places(Path(args.work), Path(args.report), args.config, tuple(overrides))
    return int(run.main(places))
