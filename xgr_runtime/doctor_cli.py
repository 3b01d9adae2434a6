"""`xgr doctor`: print what this machine can run, as a table or as JSON."""

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xgr_runtime.doctor import Report


def add_parser(subparsers: Any) -> None:
    """Add `xgr doctor`."""
    parser = subparsers.add_parser(
        "doctor", help="devices, versions, and which provider each op binds"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--allow-reference",
        action="store_true",
        help="count the torch reference as a provider on accelerators, as ops.allow_reference does",
    )
    parser.set_defaults(handler=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from xgr_runtime.doctor import examine  # noqa: PLC0415 - torch takes a second to import; `xgr client` needs none

    report = examine(allow_reference=args.allow_reference)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)
    return 0


def _print(report: "Report") -> None:
    print(f"python {report.python} on {report.platform}")
    for name, version in report.packages.items():
        print(f"  {name:<14} {version}")
    print("devices")
    for device in report.devices:
        what = (
            f"{device.name} {device.capability}".strip()
            if device.is_usable
            else f"not usable: {device.reason}"
        )
        print(f"  {device.kind:<6} {what}")
    print("ops")
    for op in report.ops:
        print(f"  {op.op:<24} {op.device:<5} {op.dtype:<9} {op.provider or 'NONE'}")
        for reason in op.refusals:
            print(f"      refused: {reason}")
