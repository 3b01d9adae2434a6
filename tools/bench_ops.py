"""Every op by every provider of a device, at the sizes of the measured models: time, rates, share of what is possible.

Parity first: the conformance cases of each provider, then each call that is timed against the torch reference in float32. What
is wrong has no figure: it is listed among the failures, and the exit code is 1. Beside the providers stand torch's own kernels,
and FlashInfer's where it is installed; one of them that cannot run is listed with its reason and is no failure.

floor_ms is the longer of two times: the call's floating-point operations at the rate of a large bf16 product, its bytes, each
read or written once, at that of a copy within the device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools._bench import op_attention, op_cache, op_products, op_search, op_stream  # noqa: E402
from tools._bench.command import exit_code_of, number, whole  # noqa: E402
from tools._bench.device_facts import commit_of, device_facts  # noqa: E402
from tools._bench.floor import BF16_TFLOPS  # noqa: E402
from tools._bench.op_check import bound_provider, check_cases, check_work, providers, spec_of  # noqa: E402
from tools._bench.op_findings import findings  # noqa: E402
from tools._bench.op_processes import CALLS, check_elsewhere, check_tasks  # noqa: E402
from tools._bench.op_timing import num_sets, time_calls  # noqa: E402
from tools._bench.op_work import COPY_TB_PER_S, RIDGE, OpWork, Place  # noqa: E402
from tools._bench.plain_decoder import strict_float32  # noqa: E402
from tools._bench.report_file import EXIT_NO_DEVICE, ReportFile, print_report  # noqa: E402
from tools._bench.timing import add_output_arguments, progress  # noqa: E402
from xgr_runtime.errors import DeviceError  # noqa: E402
from xgr_runtime.hal.discovery import DEVICE_CHOICES, open_device  # noqa: E402
from xgr_runtime.hal.providers import load_providers  # noqa: E402
from xgr_runtime.hal.registry import all_ops  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from xgr_runtime.hal.device import Device

TINY_ITEMS = 3000
RUNS = 25
# What the checks leave: seconds for each call, timed by everybody who takes it; of a short limit no more than a share.
TIMED_S, MOST_TIMED = 0.2, 0.4


def wanted_ops(patterns: Sequence[str]) -> list[str]:
    """The declared ops whose names match one of the patterns, all where none is given; SystemExit where one matches nothing."""
    declared = list(all_ops())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in declared):
            raise SystemExit(f"no op is named {pattern!r}; ops: {', '.join(sorted(declared))}")
    return [n for n in declared if not patterns or any(fnmatchcase(n, p) for p in patterns)]


def all_works(place: Place, num_items: int, wanted: Sequence[str]) -> Iterator[OpWork]:
    """Every measured call of these ops."""
    parts = [op_attention.works(place), op_cache.works(place)]
    searched = ("head_", "level_", "children_", "select_", "flag_", "flagged_")
    if any(name.startswith(searched) for name in wanted):
        parts.append(op_search.works(place, num_items))
    parts += [
        op_stream.works(place),
        op_products.works(place),
    ]  # the most: last, should time run short
    for part in parts:
        yield from (work for work in part if work.op in wanted)


def check(device: Device, dtype: torch.dtype, works: Sequence[OpWork]) -> list[dict[str, Any]]:
    """The works themselves against the reference."""
    with strict_float32():
        return [
            entry for work in works for entry in check_work(work, all_ops()[work.op], dtype, device)
        ]


def cases_of(
    device: Device, dtype: torch.dtype, names: Iterable[str], only: str = ""
) -> list[dict[str, Any]]:
    """Conformance cases of ops; only: of that provider."""
    return [entry for name in names for entry in check_cases(all_ops()[name], dtype, device, only)]


def print_checks(args: argparse.Namespace, device: Device, place: Place, num_items: int) -> None:
    """What `ask_checks` reads: a line with the checks of calls, then one with those of the cases too, which may take long."""
    names, found = wanted_ops(args.op), dict[str, Any]()
    if args.only in ("", CALLS):
        found["checks"] = check(device, place.dtype, list(all_works(place, num_items, names)))
        print(json.dumps(found), flush=True)
    if args.only != CALLS:
        found["parity"] = cases_of(device, place.dtype, names, args.only)
        print(json.dumps(found), flush=True)


def measure(
    device: Device, place: Place, work: OpWork, checks: Sequence[dict[str, Any]], runs: int
) -> Iterator[dict[str, Any]]:
    """A row for each provider and peer that passed its check."""
    op, green = all_ops()[work.op], {c["provider"] for c in checks if "failure" not in c}
    cases = [work.draw(seed) for seed in range(num_sets(work.num_bytes, is_tiny=place.is_tiny))]
    spec = spec_of(device, place.dtype, cases[0])
    found: list[tuple[str, bool, list[Callable[[], object]]]] = [
        (name, False, [partial(fn, **c.args) for c in cases])
        for name, fn in providers(op, spec)
        if name in green
    ]
    peers = {name: peer for name, peer in work.peers.items() if name in green}
    found += [(name, True, [peer(c.args) for c in cases]) for name, peer in peers.items()]
    errors = {c["provider"]: c.get("error_of_tolerance") for c in checks}
    for name, is_peer, calls in found:
        timed = time_calls(device, calls, runs)
        seconds = timed.timing.median_ms / 1e3
        yield {
            "op": work.op,
            "label": work.label,
            "provider": name,
            "is_peer": is_peer,
            "is_bound": not is_peer and name == bound_provider(op, spec),
            "median_ms": timed.timing.median_ms,
            "p20_ms": timed.timing.p20_ms,
            "p80_ms": timed.timing.p80_ms,
            "runs": timed.timing.runs,
            "timed_by": timed.timed_by,
            "sets": timed.sets,
            "flops": work.flops,
            "bytes": work.num_bytes,
            "flops_per_byte": round(work.flops / work.num_bytes, 2),
            "tflops": round(work.flops / seconds / 1e12, 2),
            "gb_per_s": round(work.num_bytes / seconds / 1e9, 1),
            "floor_ms": round(work.floor_ms, 6),
            "bound_by": "compute" if work.is_compute_bound else "memory",
            "share_of_floor": round(work.floor_ms / timed.timing.median_ms, 4),
            "error_of_tolerance": errors.get(name),
            "dims": dict(cases[0].dims),
            "note": work.note,
        }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report."""
    end_s = time.monotonic() + args.time_limit
    device, dtype = open_device(args.device).device, getattr(torch, args.dtype)
    not_loaded = [{"row": f.module, "reason": f.reason} for f in load_providers(device.kind)]
    wanted = wanted_ops(args.op)
    place = Place(device.torch_device, dtype, args.tiny)
    num_items = min(args.items, TINY_ITEMS) if args.tiny else args.items
    if args.check:
        print_checks(args, device, place, num_items)
        return {}
    file = ReportFile(args.out, takes_failed=args.even_failed)
    report: dict[str, Any] = {
        "commit": commit_of(ROOT, args.commit),
        "environment": device_facts(device, is_tiny=args.tiny),
        "floor": {"tflops": BF16_TFLOPS, "tb_per_s": COPY_TB_PER_S, "ridge": round(RIDGE, 1)},
        "dtype": args.dtype,
        "items": num_items,
        "rows": [],
        "not_measured": [],
        "failures": not_loaded,
    }
    works = list(all_works(place, num_items, wanted))
    names = list(dict.fromkeys(work.op for work in works))
    if args.tiny:
        found: dict[str, Any] = {"checks": check(device, dtype, works), "parity": []}
        found["parity"] = cases_of(device, dtype, names) if args.cases else []
    else:
        reserved_s = min(TIMED_S * len(works), MOST_TIMED * args.time_limit)
        found = check_elsewhere(__file__, args, check_tasks(names, device.kind), end_s - reserved_s)
    progress(f"checked {len(works)} calls, {end_s - time.monotonic():.0f} s are left")
    good = sort_out(report, found)
    file.keep(report, [work.name for work in works])
    for place_of, work in enumerate(works):
        mine = [c for c in good if (c["op"], c["label"]) == (work.op, work.label)]
        if time.monotonic() > end_s:
            report["not_measured"].append({"row": work.name, "reason": "no time was left"})
            continue
        try:
            for row in measure(device, place, work, mine, args.runs):
                report["rows"].append(row)
                progress(line_of(row))
        except Exception as error:  # noqa: BLE001 - noted with its message, and the next one runs
            reason = f"{type(error).__name__}: {error}"[-600:]
            report["failures"].append({"row": work.name, "reason": reason})
        file.keep(report, [later.name for later in works[place_of + 1 :]])
    report["findings"] = findings(report["rows"])
    file.finish(report)
    return report


def sort_out(report: dict[str, Any], found: dict[str, Any]) -> list[dict[str, Any]]:
    """What the checks have found, into the report; returned are the checks of those that may be timed."""
    wrong = [p for p in found["parity"] if p["failed"]]
    report["failures"] += found.get("lost", [])
    report["failures"] += [
        {"row": f"{p['op']} {p['provider']}", "reason": p["failures"]} for p in wrong
    ]
    report["not_measured"] += found.get("late", [])
    report |= {"parity": found["parity"], "peers_not_run": []}
    for entry in found["checks"]:
        if "failure" in entry:
            row = {"row": f"{entry['op']} {entry['label']} {entry['provider']}"}
            target = report["peers_not_run" if entry.get("peer") else "failures"]
            target.append({**row, "reason": entry["failure"]})
    bad = {(p["op"], p["provider"]) for p in wrong}
    return [c for c in found["checks"] if (c["op"], c["provider"]) not in bad]


def line_of(row: dict[str, Any]) -> str:
    """A row for people."""
    bound = "*" if row["is_bound"] else " "
    return (
        f"{row['op']:24} {row['label']:38} {bound}{row['provider']:30} {row['median_ms']:9.4f} ms "
        f"({row['p20_ms']:.4f}-{row['p80_ms']:.4f}) {row['tflops']:7.1f} TFLOP/s "
        f"{row['gb_per_s']:8.1f} GB/s {row['share_of_floor']:.0%} of the floor ({row['bound_by']})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=DEVICE_CHOICES, default="cuda")
    parser.add_argument("--op", action="append", default=[], help="a name or pattern, repeatable")
    parser.add_argument("--runs", type=whole(1, 1000), default=RUNS)
    parser.add_argument("--items", type=whole(1, 10**8), default=1_000_000)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--time-limit", type=number(1, 1e6), default=600.0, help="seconds")
    parser.add_argument("--commit", default="", help="where there is no git: what is measured")
    parser.add_argument("--check", action="store_true", help="only what precedes the timing")
    parser.add_argument("--only", default="", help="with --check: calls, or a provider's cases")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: tries the tool")
    parser.add_argument("--cases", action="store_true", help="with --tiny: conformance cases too")
    parser.add_argument(
        "--even-failed",
        action="store_true",
        help="--out's file is replaced also where something failed",
    )
    add_output_arguments(parser)
    args = parser.parse_args(arguments)
    if args.only and not args.check:
        parser.error("--only needs --check: what is timed is checked whole")
    try:
        report = run(args)
    except DeviceError as error:
        progress(str(error))
        return EXIT_NO_DEVICE
    if args.check:
        return 0
    print_report(report, args)
    for late in report["not_measured"]:
        progress(f"NOT MEASURED {late['row']}: {late['reason']}")
    for failure in report["failures"]:
        progress(f"FAILED {failure['row']}: {failure['reason']}")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
