"""The `xgr` command. Each part of the runtime adds its own sub-commands; this file only puts them together."""

import argparse
import sys
from collections.abc import Sequence

import xgr_runtime
from xgr_runtime import config_cli, doctor_cli
from xgr_runtime.errors import XgrError
from xgr_runtime.service import service_cli
from xgr_runtime.xbeam import catalog_cli

EXIT_USAGE = 2


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; every sub-command sets `handler`: parsed arguments -> exit code."""
    parser = argparse.ArgumentParser(prog="xgr", description=xgr_runtime.__doc__)
    parser.add_argument("--version", action="version", version=f"xgr {xgr_runtime.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    service_cli.add_serve_parser(subparsers)
    service_cli.add_client_parser(subparsers)
    catalog_cli.add_parser(subparsers)
    config_cli.add_parser(subparsers)
    doctor_cli.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors a user can mend are one line on standard error and exit code 2."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.handler(args))
    except XgrError as error:
        print(f"xgr: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
