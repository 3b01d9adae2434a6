"""`xgr doctor`: print what this machine can run, as a table or as JSON."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from xgr_runtime.errors import DeviceError

if TYPE_CHECKING:
    from xgr_runtime.doctor import Report


def add_parser(subparsers: Any) -> None:
    """Add `xgr doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="devices, versions, and which provider each op binds",
        description="Print versions, devices with the reason for each that cannot be used, and who runs each op, with every "
        "refusal. Exit code: 0, or 2 where --device names one that cannot be used.",
    )
    parser.add_argument(
        "--device",
        metavar="KIND",
        help="look at that device only, of those that are listed without it; it must be there",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="of the tensors that the ops are asked about, as model.dtype",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--allow-reference",
        action="store_true",
        help="count the torch reference as a provider on accelerators, as ops.allow_reference does",
    )
    parser.set_defaults(handler=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    # torch takes a second to import; `xgr client` needs none
    import torch  # noqa: PLC0415

    from xgr_runtime.doctor import examine  # noqa: PLC0415

    dtype = getattr(torch, args.dtype)
    report = examine(allow_reference=args.allow_reference, device=args.device, dtype=dtype)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)
    (asked,) = report.devices if args.device is not None else (None,)
    if asked is not None and not asked.is_usable:
        raise DeviceError(f"device {args.device!r} is not usable here: {asked.reason}")
    return 0


def _print(report: "Report") -> None:
    print(f"python {report.python} on {report.platform}")
    for name, version in report.packages.items():
        print(f"  {name:<14} {version}")
    for name, version in report.libraries.items():
        print(f"  {name:<14} {version}")
    print("devices")
    for device in report.devices:
        what = (
            " ".join(dict.fromkeys(filter(None, (device.name, device.capability))))
            if device.is_usable
            else f"not usable: {device.reason}"
        )
        print(f"  {device.kind:<6} {what}")
    unloaded = _unloaded(report)
    if report.ops:
        print("ops")
    width = max((len(op.op) for op in report.ops), default=0)
    for op in report.ops:
        print(f"  {op.op:<{width}} {op.device:<5} {op.dtype:<9} {op.provider or 'NONE'}")
        for reason in op.refusals:
            if (op.device, reason) not in unloaded:
                print(f"      refused: {reason}")
    if unloaded:
        print("provider modules that are absent from all of these ops")
    for kind, reason in unloaded:
        print(f"  {kind:<6} {reason}")


def _unloaded(report: "Report") -> list[tuple[str, str]]:
    """(device kind, "module: reason") of provider modules that could not be imported, as the ops' refusals hold them."""
    from xgr_runtime.hal.providers import load_providers  # noqa: PLC0415 - as in _doctor

    return [
        (kind, f"{failure.module}: {failure.reason}")
        for kind in dict.fromkeys(op.device for op in report.ops)
        for failure in load_providers(kind)
    ]
