"""The `xgr` command. Each part of the runtime adds its own sub-commands; this file only puts them together.

Whatever ends a command early is one line on standard error and a documented exit code: an error that a user can mend, an output
that cannot be written, ctrl-C. A reader that closes the pipe is not even an error.
"""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import xgr_runtime
from xgr_runtime import config_cli, conformance_cli, doctor_cli, shipped_cli
from xgr_runtime.errors import XgrError, printable
from xgr_runtime.service import catalog_admin_cli, metrics_cli, service_cli
from xgr_runtime.xbeam import catalog_cli

EXIT_USAGE, EXIT_SYSTEM = 2, 5
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
BROKEN_BACKEND = "Failed to load the backend extension"  # what `import torch` says then
EXIT_CODES = (
    "Exit codes of every command: 0 done, 2 wrong usage, configuration or input, 5 the output could not be written or the system "
    "refused something else, 130 interrupted, 141 the reader of the output went away. Commands may add their own."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(_one_line(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse drops the errors of writing."""
        if file is not None and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; every sub-command sets `handler`: parsed arguments -> exit code."""
    parser = _Parser(
        prog="xgr", description=(xgr_runtime.__doc__ or "").partition("\n")[0], epilog=EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"xgr {xgr_runtime.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    service_cli.add_serve_parser(subparsers)
    service_cli.add_client_parser(subparsers)
    catalog_admin_cli.add_commands(catalog_cli.add_parser(subparsers))
    config_cli.add_parser(subparsers)
    metrics_cli.add_parser(subparsers)
    doctor_cli.add_parser(subparsers)
    conformance_cli.add_parser(subparsers)
    shipped_cli.add_parsers(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (see EXIT_CODES). Raises SystemExit for wrong usage and --help, as argparse does."""
    _load_backends_when_asked()
    try:
        return _run(argv)
    except XgrError as error:
        _complain(f"{type(error).__name__}: {error}")
        return EXIT_USAGE
    except MemoryError as error:
        _complain(f"this machine has no memory for it{f': {error}' if str(error) else ''}")
        return EXIT_SYSTEM
    except BrokenPipeError:
        _discard_output()
        return EXIT_PIPE_CLOSED
    except OSError as error:
        _discard_output()
        _complain(str(error))
        return EXIT_SYSTEM
    except RuntimeError as error:
        if BROKEN_BACKEND not in str(error):
            raise
        _complain(f"DeviceError: {error} Left unset, xgr loads it where its device is asked for.")
        return EXIT_USAGE
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED


def _load_backends_when_asked() -> None:
    """`import torch` loads every installed backend and fails where one cannot be loaded, an NPU's without its libraries.

    Whoever runs on the CPU needs none, and the NPU's is loaded when that device is asked for, which says what is missing.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault(AUTOLOAD, "0")


def _run(argv: Sequence[str] | None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Arguments and paths may hold bytes that are no text, and a terminal may know few characters.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args = build_parser().parse_args(argv)
        return int(args.handler(args))
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where it can still be reported that it fails


def _one_line(text: str) -> str:
    return printable(" ".join(text.splitlines()))


def _complain(text: str) -> None:
    try:
        print(f"xgr: {_one_line(text)}", file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def _discard_output() -> None:
    """What standard output still holds cannot be written; the interpreter would try, complain and change the exit code."""
    _discard(sys.stdout)


def _discard(stream: object) -> None:
    if not isinstance(stream, io.TextIOWrapper):
        return
    try:
        number = stream.fileno()
    except (
        io.UnsupportedOperation
    ):  # a caller's buffer in place of the stream, which cannot fail later
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
