"""`xgr conformance`: check a device with nothing but the installed package, and write one report to send back."""

import argparse
import logging
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xgr_runtime.errors import DeviceError

if TYPE_CHECKING:
    from xgr_runtime.conformance.report import Report

EXIT_FAILED = 1


def add_parser(subparsers: Any) -> None:
    """Add `xgr conformance`."""
    parser = subparsers.add_parser(
        "conformance",
        help="check every op and whole searches on a device; one JSON report",
        description="Run every provider of every op on a device against its reference, searches with known answers through "
        "a whole engine, and a small decoder against float64. Exit code: 0 all of it passed; 1 something failed, the device "
        "was lost, a provider module could not be loaded (for another reason than Triton's absence), or of an op, the "
        "searches or the decoder nothing ran in one of the dtypes; 2 it could not start. A refusal by name is no failure "
        "where other cases of the same dtype ran. The reference counts as an op's provider only where the device has no "
        "other one, and only on the CPU or with --allow-reference.",
    )
    parser.add_argument(
        "--device", required=True, metavar="KIND", help="auto, or a kind that `xgr doctor` lists"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="the report; written anew after every part, so a crash loses one",
    )
    parser.add_argument(
        "--ops",
        type=lambda text: [name.strip() for name in text.split(",") if name.strip()],
        default=[],
        metavar="NAME,...",
        help="only these ops one by one (default: all); searches and decoder run all the same",
    )
    parser.add_argument(
        "--allow-reference",
        action="store_true",
        help="accept the torch reference in engines on accelerators, as ops.allow_reference does",
    )
    parser.set_defaults(handler=_conformance)


def _conformance(args: argparse.Namespace) -> int:
    # torch takes a second to import; `xgr client` needs none
    from xgr_runtime.conformance.report import ReportError, ReportFile  # noqa: PLC0415
    from xgr_runtime.conformance.run import all_parts, chosen_ops, new_report, run  # noqa: PLC0415
    from xgr_runtime.doctor import examine  # noqa: PLC0415
    from xgr_runtime.hal.discovery import open_device  # noqa: PLC0415

    chosen_ops(args.ops)
    file = None if args.json is None else ReportFile(args.json)
    try:
        opened = open_device(args.device)
    except DeviceError as error:
        if file is not None:
            file.write_not_started(args.device, str(error))
        raise
    for kind, reason in opened.passed_over:
        print(f"{kind} is not used: {reason}")
    device = opened.device
    facts = examine(allow_reference=args.allow_reference).to_dict()
    del facts["ops"]  # asked without sizes; the parity entries say who is bound for which case
    report = new_report(device, args.ops, facts, allow_reference=args.allow_reference)
    if file is not None:
        file.write(report)
    print(f"{device.kind}: {device.name} {device.capability}".rstrip(), flush=True)
    errors: list[ReportError] = []

    def save(report: "Report") -> None:
        """A write that fails now must not end the run: it is told behind the table."""
        try:
            if file is not None and not errors:
                file.write(report)
        except ReportError as error:
            errors.append(error)

    with ExitStack() as stack:
        stack.enter_context(_only_errors())
        stack.callback(lambda: print("\n".join(report.summary()), flush=True))
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="xgr-conformance-"))
        parts = all_parts(device, report, Path(name))
        run(device, report, parts, save=save, say=lambda line: print(line, flush=True))
    if errors:
        raise errors[0]
    return 0 if report.result == "passed" else EXIT_FAILED


@contextmanager
def _only_errors() -> Iterator[None]:
    """The report says who was bound and why; as warnings of every engine it would bury the table."""
    logger = logging.getLogger("xgr_runtime")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
