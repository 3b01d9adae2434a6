"""`xgr config show`: the effective configuration with where each value came from; `reference`: what there is."""

import argparse
from pathlib import Path
from typing import Any

from xgr_runtime.config import load_config
from xgr_runtime.shipped import config_file, config_names


def add_parser(subparsers: Any) -> None:
    """Add `xgr config show` and `xgr config reference`."""
    parser = subparsers.add_parser(
        "config", help="show the effective configuration, or all options"
    )
    commands = parser.add_subparsers(dest="config_command", required=True)
    show = commands.add_parser("show", help="print every value with its origin")
    show.add_argument(
        "--config",
        metavar="FILE",
        help=f"YAML file, or a name: {', '.join(config_names())}; without it the defaults",
    )
    show.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", dest="overrides")
    show.set_defaults(handler=_show)
    reference = commands.add_parser(
        "reference", help="print every option with unit, default and explanation, as YAML"
    )
    reference.set_defaults(handler=_reference)


def _show(args: argparse.Namespace) -> int:
    path = None if args.config is None else config_file(args.config)
    for line in load_config(path, args.overrides).lines():
        print(line)
    return 0


def _reference(args: argparse.Namespace) -> int:
    print(Path(config_file("reference")).read_text(encoding="utf-8"), end="")
    return 0
