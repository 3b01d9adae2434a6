"""Whole requests through the engine on one device: time, share of the counted floor, memory, stages; answers checked first.

Qwen3 decoders of the named sizes with weights drawn on the device, a catalogue of a million random semantic ids, random
histories, a new one for every run. Of every row and normalisation, answers are held against a plain torch decoder in float32
on the same device by `assert_same_answer`; that decoder against the runtime on the CPU, once per model and normalisation. A
row with a wrong answer has no figure: it is listed among the failures, and the exit code is 1. What no time was left for is
named apart from them.

median_ms is the time of a batch on the device, from the first copy of its inputs to the end of the copy of its outcome, with
whatever the device waits for the host in between. device_ms is that of its graphs alone, the prefill and all rounds: what a
batch takes when the next one follows it closely. wall_median_ms is the time at the caller, from the first request's submission
to the last answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools._bench.command import exit_code_of, number, whole  # noqa: E402
from tools._bench.device_facts import commit_of, device_facts  # noqa: E402
from tools._bench.engine_load import measure_engine  # noqa: E402
from tools._bench.engine_log import progress  # noqa: E402
from tools._bench.engine_matrix import (  # noqa: E402
    HISTORY_SEED,
    MODEL_SEED,
    ModelMatrix,
    NoTimeLeft,
    Outcome,
    Plan,
    noting,
)
from tools._bench.engine_profile import profile_model  # noqa: E402
from tools._bench.engine_rows import (  # noqa: E402
    ALL_SHAPES,
    LOAD_PROMPT_TOKENS,
    LOAD_ROW,
    MEMORY_PROMPT_TOKENS,
    MEMORY_ROW,
    ROWS,
    TINY_LOAD_ROW,
    TINY_MEMORY_ROW,
    TINY_PROMPT_TOKENS,
    TINY_ROWS,
    Row,
    choose,
)
from tools._bench.engine_run import SHIPPED, shipped_config  # noqa: E402
from tools._bench.engine_timing import FEWEST_RUNS  # noqa: E402
from tools._bench.floor import BF16_TFLOPS  # noqa: E402
from tools._bench.report_file import EXIT_NO_DEVICE, ReportFile, print_report  # noqa: E402
from tools._bench.sid_catalog import Prefixes, draw_items, write_catalog  # noqa: E402
from tools._bench.timing import add_output_arguments  # noqa: E402
from xgr_runtime.errors import DeviceError  # noqa: E402
from xgr_runtime.hal.discovery import DEVICE_CHOICES, open_device  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xgr_runtime.hal.device import Device

CATALOG_SEED = 10
TINY_ITEMS, TINY_WIDTH = 3000, 16
MAX_PROMPT_TOKENS, MAX_WIDTH = 5120, 1024
RUNS, QUICK_RUNS = 20, 8
ROW_S = 5.0
PARTS = (
    "memory",
    "rows",
    "load",
)  # in this order: the first start compiles the kernels, and tells what that takes
MEMORY_SHARE, LOAD_S = 0.32, 45.0  # of the time limit, at most; kept for the load part


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report. The other parts than `rows` run in processes of their own where there is more than one."""
    start_s = time.monotonic()
    end_s = start_s + args.time_limit
    commit = commit_of(ROOT, args.commit)
    device = open_device(args.device).device
    table = TINY_ROWS if args.tiny else ROWS
    profiled = choose(table, args.profile) if args.profile else []
    rows = choose(table, args.rows) if args.rows or not args.profile else []
    rows = [row for row in table if row in rows or row in profiled]
    parts = args.part or (["rows"] if args.profile else list(PARTS))
    file = ReportFile(args.out, takes_failed=args.even_failed)
    report = head_of(args, device, commit)
    names = [row.name for row in rows] if "rows" in parts else []

    def keep() -> None:
        known = with_outcome(report, outcome, parts)
        done = {
            entry["row"]
            for key in ("rows", "not_measured", "failures")
            for entry in known.get(key, ())
        }
        missing = [name for name in names if name not in done]
        file.keep(known, missing + [p for p in parts if p != "rows" and p not in {*known, *done}])

    outcome = Outcome(on_change=keep)
    rows_end_s = end_s - (min(LOAD_S, args.time_limit / 3) if "load" in parts else 0.0)
    progress(f"{device.name}: {report['environment']['bf16_product_tflops']} TFLOP/s")
    with tempfile.TemporaryDirectory() as folder:
        plan, report["catalog"] = plan_of(args, device, commit, Path(folder), rows_end_s)
        for part in (part for part in PARTS if part in parts):
            with noting(outcome, part):
                left_s = end_s - time.monotonic()
                if part == "rows":
                    measure_rows(plan, rows, profiled, outcome)
                elif len(parts) == 1:
                    report[part] = measure_part(plan, part, is_tiny=args.tiny)
                else:
                    most_s = MEMORY_SHARE * args.time_limit if part == "memory" else left_s
                    report[part] = elsewhere(args, part, min(left_s, most_s))
            outcome.changed()
    report = with_outcome(report, outcome, parts)
    file.finish(report)
    return report


def head_of(args: argparse.Namespace, device: Device, commit: str) -> dict[str, Any]:
    """What a report says before anything is measured."""
    return {
        "commit": commit,
        "environment": device_facts(device, is_tiny=args.tiny),
        "floor_tflops": BF16_TFLOPS,
        "seeds": {"catalog": CATALOG_SEED, "model": MODEL_SEED, "histories": HISTORY_SEED},
        "warmup_runs": args.warmup,
        "runs": args.runs,
        "dtype": args.dtype,
        "config": SHIPPED.get(device.kind, "defaults"),
        "page_size_tokens": args.page_size or shipped_config(device.kind).cache.page_size_tokens,
    }


def with_outcome(report: dict[str, Any], outcome: Outcome, parts: Sequence[str]) -> dict[str, Any]:
    """The report and what the rows have given so far."""
    found = dict(report)
    if "rows" in parts:
        found["reference_checks"], found["rows"] = outcome.cpu_checks, outcome.rows
        found["profiles"] = outcome.profiles
    for name, entries in (("not_measured", outcome.late), ("failures", outcome.failures)):
        found[name] = [{"row": row, "reason": reason} for row, reason in entries]
    return found


def plan_of(
    args: argparse.Namespace, device: Device, commit: str, folder: Path, end_s: float
) -> tuple[Plan, dict[str, Any]]:
    """What every row shares, with the catalogue in that folder, and what the report says of the catalogue."""
    shape = ALL_SHAPES[(TINY_ROWS if args.tiny else ROWS)[0].model]  # all have the same codes
    num_items = min(args.items, TINY_ITEMS) if args.tiny else args.items
    items = draw_items(num_items, shape.num_codes, CATALOG_SEED, is_skewed=not args.uniform)
    plan = Plan(
        device=device,
        dtype=getattr(torch, args.dtype),
        items=items,
        catalog=write_catalog(items, folder / "items.xgr", shape.text_vocabulary),
        commit=commit,
        repetitions=args.runs,
        row_s=args.row_seconds,
        warmup=args.warmup,
        checked=args.checked,
        num_judges=max(1, (os.cpu_count() or 2) - 2),
        page_size=args.page_size,
        max_prompt_tokens=TINY_PROMPT_TOKENS if args.tiny else MAX_PROMPT_TOKENS,
        max_width=TINY_WIDTH if args.tiny else MAX_WIDTH,
        allow_reference=args.allow_reference,
        has_time=lambda: time.monotonic() < end_s,
    )
    codes = "uniform" if args.uniform else "skewed"
    fanouts = Prefixes(items.sids, items.num_codes).fanouts()
    return plan, {"items": num_items, "codes": codes, "levels": fanouts}


def measure_rows(plan: Plan, rows: list[Row], profiled: list[Row], outcome: Outcome) -> None:
    """The rows, model after model, then the profiles: nothing is timed after a trace."""
    for name in dict.fromkeys(row.model for row in rows):
        with noting(outcome, name):
            ModelMatrix(plan, name, [row for row in rows if row.model == name], outcome).run()
    for name in dict.fromkeys(row.model for row in profiled):
        with noting(outcome, f"profiles of {name}"):
            profile_model(plan, name, [row for row in profiled if row.model == name], outcome)


def measure_part(plan: Plan, part: str, *, is_tiny: bool) -> dict[str, Any]:
    """Memory of an engine for one request, or memory and work of one under load."""
    memory, load = (TINY_MEMORY_ROW, TINY_LOAD_ROW) if is_tiny else (MEMORY_ROW, LOAD_ROW)
    if part == "memory":
        tokens = TINY_PROMPT_TOKENS if is_tiny else MEMORY_PROMPT_TOKENS
        return measure_engine(plan, memory, tokens, is_profiled=False)
    tokens = TINY_PROMPT_TOKENS if is_tiny else LOAD_PROMPT_TOKENS
    return measure_engine(plan, load, tokens, is_profiled=plan.device.kind == "cuda")


def elsewhere(args: argparse.Namespace, part: str, seconds: float) -> Any:
    """A part in a process of its own, whose allocator nobody has used before."""
    if seconds <= 0:
        raise NoTimeLeft
    command = [sys.executable, __file__, "--part", part, "--json", "--device", args.device]
    command += ["--dtype", args.dtype]
    command += ["--page-size", str(args.page_size)] if args.page_size else []
    command += ["--items", str(args.items), "--commit", args.commit]
    switches = ("tiny", "uniform", "quick", "allow_reference")
    command += ["--" + name.replace("_", "-") for name in switches if getattr(args, name)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoTimeLeft(f"it was not done within {seconds:.0f} s") from None
    report = json.loads(done.stdout or "{}")
    if part not in report:
        raise SystemExit(f"ended with {done.returncode}: {report.get('failures', 'no report')}")
    return report[part]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=DEVICE_CHOICES, default="cuda")
    parser.add_argument(
        "--rows", action="append", default=[], help="a row's name or a pattern; may be repeated"
    )
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="instead of all; may be repeated"
    )
    parser.add_argument(
        "--profile",
        action="append",
        default=[],
        metavar="ROW",
        help="kernels and gaps of a row, or of those that match a pattern, too; may be repeated. Without --rows and --part "
        "only they are measured",
    )
    parser.add_argument("--runs", type=whole(1, 1000), default=None, help=f"default {RUNS}")
    parser.add_argument("--warmup", type=whole(1, 1000), default=3)
    parser.add_argument(
        "--row-seconds",
        type=number(0, 1e6),
        default=ROW_S,
        help=f"fewer runs, at least {FEWEST_RUNS}, of a row that takes longer",
    )
    parser.add_argument(
        "--checked",
        type=whole(1, 8),
        default=2,
        help="requests of a batch whose answers are checked",
    )
    parser.add_argument("--items", type=whole(1, 10**8), default=1_000_000)
    parser.add_argument("--uniform", action="store_true", help="codes of items independent")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--page-size",
        type=whole(1, 1024),
        default=None,
        help="tokens, instead of the configuration's",
    )
    parser.add_argument("--allow-reference", action="store_true", help="as ops.allow_reference")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_RUNS} runs: no figures to keep"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model and catalogue: tries the tool"
    )
    parser.add_argument(
        "--time-limit",
        type=number(1, 1e6),
        default=3600.0,
        help="seconds; no row starts after them",
    )
    parser.add_argument("--commit", default="", help="where there is no git: what is measured")
    parser.add_argument(
        "--even-failed",
        action="store_true",
        help="--out's file is replaced also where something failed",
    )
    add_output_arguments(parser)
    args = parser.parse_args(arguments)
    args.runs = args.runs or (QUICK_RUNS if args.quick else RUNS)
    try:
        report = run(args)
    except DeviceError as error:
        progress(str(error))
        return EXIT_NO_DEVICE
    print_report(report, args)
    for late in report["not_measured"]:
        progress(f"NOT MEASURED {late['row']}: {late['reason']}")
    for failure in report["failures"]:
        progress(f"FAILED {failure['row']}: {failure['reason']}")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
