"""Every op under NVIDIA's checkers, several processes at a time, within a time limit; a few lines say what they found:

    python3 tools/cuda_sanitize_all.py --seconds 150 --log sanitize.log

First memcheck has to find a write that is planted; without that, silence would mean nothing. Then every group of ops runs
without a checker, which compiles its kernels, and under each. A run is clean where the program has said that all agreed and the
checker that it counted no error: a program that dies early leaves exit code 0. Exit code 0: all clean; 1: something was found or
had no time; 2: the checker does not work here, or no op that was asked for has a CUDA provider. Those without one are named.

What the checkers are known to report though it is no fault (NVIDIA's release notes,
docs.nvidia.com/compute-sanitizer/ReleaseNotes): racecheck before 2025.4 on mbarriers, before 2026.1 on barriers of a warpgroup,
by which the products and attention of Hopper hand tiles on; initcheck, in every version so far, on memory that bulk copies with a
descriptor have written (stream_linear_silu_mul, linear_silu_mul); racecheck 2026.4, by our reading of the PTX, on what a warpgroup gives
another (beam_attention, attention_parts_kernels.py): its threads write, meet at a barrier of the warpgroup, and one of them
arrives at an mbarrier, for which the other warpgroup waits before it reads. In the PTX the barrier, the release of the arrival and
the acquire of the wait follow each other, which orders the writes of all; racecheck seems not to follow that. CUDA 13.0 has 2025.3.1; the package nvidia-cuda-sanitizer-api
13.5 has 2026.4, whose program --checker takes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.cuda_sanitize import AGREED, DTYPES, offer_providers  # noqa: E402
from xgr_runtime.hal.providers import load_providers  # noqa: E402
from xgr_runtime.hal.registry import all_ops  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SCRIPT = ROOT / "tools" / "cuda_sanitize.py"
TOOLS = ("memcheck", "racecheck", "initcheck")
PLAIN, PLANT = "plain", "plant"
PLANT_S = 45.0  # a checker that does not work with a driver may wait for ever
# Their checks take longest, or end worst: each has a process of its own and begins early. The others share one by threes.
ALONE = re.compile(
    r"beam_attention|prefill_|shared_attention|select_|head_logsumexp|linear_|stream_|children_"
)
TOGETHER = 3
PORTS = 20  # of each checker, so that those started together do not meet
MOST_KINDS = 4  # of a process's findings, by how often they came
OPTIONS = {
    # a process that goes on after an error names those of the next ops too; the gap shows writes behind a tensor's end
    # (of the driver's functions torch asks for some that are not there, which is no error)
    "memcheck": [
        "--padding",
        "512",
        "--destroy-on-device-error",
        "kernel",
        "--report-api-errors",
        "no",
    ],
    "racecheck": ["--racecheck-num-workers", "2"],
    "initcheck": [],
}
# Of torch's own kernels nothing is asked, but initcheck has to see what they write.
TORCH = ["--kernel-name-exclude", "kns=_ZN2at"]
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed)")
_FINDING = re.compile(
    r"=========\s+(?:Error: |Warning: )?((?:Invalid|Race reported|Uninitialized|Misaligned|Barrier|Program hit|Potential)[^\n]*)"
)
_KERNEL = re.compile(r"=========\s+at ([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Run:
    """One process. tool: a checker, or PLAIN. result: clean, found, wrong (results), late or died."""

    tool: str
    ops: tuple[str, ...]
    result: str
    seconds: float
    text: str

    @property
    def name(self) -> str:
        return f"{self.tool} {' '.join(self.ops)}"


def groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Ops that share a process, the longest first."""
    alone = [n for n in names if ALONE.match(n)]
    others = [n for n in names if not ALONE.match(n)]
    starts = range(0, len(others), TOGETHER)
    return [*((n,) for n in alone), *(tuple(others[i : i + TOGETHER]) for i in starts)]


def with_providers(asked: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of these ops, in their declared order, those that have a CUDA provider, and the others."""
    found: tuple[list[str], list[str]] = ([], [])
    for name, op in all_ops().items():
        if name in asked:
            found[all(i.device_kind != "cuda" for i in op.impls)].append(name)
    return found


def judge(tool: str, text: str, *, is_late: bool) -> str:
    """What a process's output says."""
    summaries = [int(errors or hazards) for errors, hazards in _SUMMARY.findall(text)]
    if any(summaries) or _FINDING.search(text):
        return "found"
    if is_late:
        return "late"
    if AGREED in text and (tool == PLAIN or summaries):
        return "clean"
    return "wrong" if re.search("^wrong: ", text, re.MULTILINE) else "died"


def findings(text: str) -> list[str]:
    """Kinds of findings, each with the first kernel it is said to be in and how often it came."""
    lines, counted = text.splitlines(), Counter[str]()
    for number, line in enumerate(lines):
        found = _FINDING.match(line)
        if found:
            what = re.sub(r"0x[0-9a-f]+", "", found[1])
            at = next(filter(None, map(_KERNEL.match, lines[number + 1 : number + 4])), None)
            counted[f"{what[:110]} in {at[1] if at else '?'}"] += 1
    return [f"{times} x {what}" for what, times in counted.most_common(MOST_KINDS)]


class Checker:
    """Starts processes and keeps the time."""

    def __init__(self, args: argparse.Namespace, checker: str) -> None:
        self._args, self._checker = args, checker
        self._end_s, self._numbers = time.monotonic() + args.seconds, count()

    def command(self, tool: str, ops: Sequence[str], number: int) -> list[str]:
        """Of a process; number: which of all, for its ports."""
        own = [
            sys.executable,
            str(SCRIPT),
            "--dtypes",
            *self._args.dtypes,
            "--most",
            str(self._args.most),
        ]
        own += ["--plant"] if tool == PLANT else ["--ops", *ops]
        if tool == PLAIN:
            return own
        kind = "memcheck" if tool == PLANT else tool
        options = ["--tool", kind, "--print-limit", "40", "--launch-timeout", "0", *OPTIONS[kind]]
        options += ["--target-processes", "application-only", "--check-exit-code", "no"]
        options += ["--port", str(49152 + PORTS * (number % 500)), "--max-connections", str(PORTS)]
        options += [] if kind == "initcheck" else TORCH
        return [self._checker, *options, *own, *(["--unfilled"] if kind == "initcheck" else [])]

    def run(self, tool: str, ops: tuple[str, ...]) -> Run:
        """Wait for one; late where there was no time to begin or to end."""
        number = next(self._numbers)
        start = time.monotonic()
        each = min(PLANT_S, self._args.each) if tool == PLANT else self._args.each
        seconds = min(each, self._end_s - start)
        if seconds < 1:
            return Run(tool, ops, "late", 0.0, "not begun")
        command = self.command(tool, ops, number)
        with subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            is_late = False
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)  # the checked program too, which holds the pipe
                output, _ = process.communicate()
                is_late = True
        text = output.decode(errors="replace")
        took = time.monotonic() - start
        return Run(tool, ops, judge(tool, text, is_late=is_late), took, text)

    def run_all(
        self, tools: Sequence[str], ops: Sequence[tuple[str, ...]]
    ) -> Iterator[tuple[str, list[Run]]]:
        """Several at a time; the runs of each tool when they have ended, while those of the next run."""
        with ThreadPoolExecutor(self._args.processes) as pool:
            begun = [[pool.submit(self.run, tool, group) for group in ops] for tool in tools]
            for tool, runs in zip(tools, begun, strict=True):
                yield tool, [run.result() for run in runs]


def say(tool: str, runs: Sequence[Run]) -> None:
    """A line for the tool and a few for each process that is not clean."""
    clean = sum(len(run.ops) for run in runs if run.result == "clean")
    total, longest = sum(len(run.ops) for run in runs), max(runs, key=lambda run: run.seconds)
    print(
        f"== {tool}: {clean} of {total} ops clean; longest {longest.seconds:.0f} s: {longest.ops[0]}",
        flush=True,
    )
    for run in runs:
        if run.result == "clean":
            continue
        print(f"   {run.result} after {run.seconds:.0f} s: {' '.join(run.ops)}")
        last = [line for line in run.text.splitlines() if line.strip()][-2:]
        wrong = [line for line in run.text.splitlines() if line.startswith("wrong: ")][:MOST_KINDS]
        for line in [*findings(run.text), *wrong] or last:
            print(f"      {line[:220]}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--ops", nargs="+", choices=sorted(all_ops()), help="all without it")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--most", type=int, default=2, help="cases of an op (default: 2)")
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything")
    parser.add_argument("--each", type=float, default=60.0, help="seconds of a process at most")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--checker", default="compute-sanitizer", help="the program or its path")
    parser.add_argument("--log", type=Path, help="what all of them printed")
    args = parser.parse_args(arguments)
    path = shutil.which(args.checker)
    if path is None:
        print(f"there is no {args.checker} here", file=sys.stderr)
        return 2
    offer_providers()
    for failed in load_providers("cuda"):
        print(f"not loaded: {failed.module}: {failed.reason}")
    names, without = with_providers(args.ops or list(all_ops()))
    if not names:
        parser.error(f"no CUDA provider of {', '.join(without)}: nothing to check")
    if without:
        print(f"not checked, no CUDA provider: {', '.join(without)}", flush=True)
    checker, ops = Checker(args, path), groups(names)
    runs = [checker.run(PLANT, ())]
    if runs[0].result != "found":
        print(f"{path} did not find what was planted: {runs[0].result}\n{runs[0].text[-2000:]}")
        return 2
    print(f"{path} finds what is planted, {runs[0].seconds:.0f} s: {findings(runs[0].text)}")
    for tool, found in chain(checker.run_all([PLAIN], ops), checker.run_all(args.tools, ops)):
        say(tool, found)
        runs += found
        if args.log:  # what is known so far, should the whole be ended
            args.log.write_text("".join(f"#### {r.name}: {r.result}\n{r.text}\n" for r in runs))
    return 0 if all(run.result == "clean" for run in runs[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
