"""`xgr metrics`: the table of metrics, which the exported ones are made from."""

import argparse
from typing import Any

from xgr_runtime.service.metric_table import markdown_rows


def add_parser(subparsers: Any) -> None:
    """Add `xgr metrics`."""
    parser = subparsers.add_parser(
        "metrics",
        help="print the table of metrics: names, units, labels, meanings",
        description="Print what GET /metrics of a running service exports, as a Markdown table. The service has it on "
        "service.metrics_host and service.metrics_port, off by default.",
    )
    parser.set_defaults(handler=_print_table)


def _print_table(_: argparse.Namespace) -> int:
    for row in markdown_rows():
        print(row)
    return 0
