"""`xgr config show`: the effective configuration, one value a line, with where each came from."""

import argparse
from typing import Any

from xgr_runtime.config import load_config


def add_parser(subparsers: Any) -> None:
    """Add `xgr config show`."""
    parser = subparsers.add_parser("config", help="show the effective configuration")
    commands = parser.add_subparsers(dest="config_command", required=True)
    show = commands.add_parser("show", help="print every value with its origin")
    show.add_argument("--config", metavar="FILE", help="YAML file; without it the defaults")
    show.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", dest="overrides")
    show.set_defaults(handler=_show)


def _show(args: argparse.Namespace) -> int:
    for line in load_config(args.config, args.overrides).lines():
        print(line)
    return 0
