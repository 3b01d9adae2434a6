"""Measure one row of the engine benchmark again and compare it with the committed results: within 15 %, or exit code 1.

Only on a device like the one that the results are of; elsewhere the exit code is 2. The answers are checked like those of a
whole run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools._bench.command import exit_code_of, number  # noqa: E402
from tools._bench.engine_rows import NORMALIZATIONS, ROWS  # noqa: E402
from tools._bench.report_file import EXIT_NO_DEVICE  # noqa: E402
from tools._bench.results import FOLDER, load_results, why_wrong  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

# its engine starts soonest: 41 s on an H200 that has compiled nothing yet
ROW = "0.6B-w512-h1024-b1"
TOLERANCE = 0.15


def compare(
    before: dict[str, Any], now: dict[str, Any], row: str, tolerance: float
) -> tuple[list[str], bool]:
    """A line for each normalisation, and whether every median is within the tolerance of the committed one."""
    lines, is_good = [], True
    for how in NORMALIZATIONS:
        old, new = _figures(before, row, how), _figures(now, row, how)
        if old is None or new is None:
            lines.append(
                f"{row} {how}: {'is not committed' if old is None else 'was not measured'}"
            )
            is_good = False
            continue
        change = new["median_ms"] / old["median_ms"] - 1
        is_good &= abs(change) <= tolerance
        lines.append(
            f"{row} {how}: {new['median_ms']:.3f} ms, committed "
            f"{old['median_ms']:.3f} ms ({old['commit']}): {change:+.1%}"
        )
    return lines, is_good


def _figures(report: dict[str, Any], row: str, how: str) -> dict[str, Any] | None:
    rows = [r for r in report["rows"] if (r["row"], r["normalization"]) == (row, how)]
    return rows[0] if rows else None


def committed(row: str) -> dict[str, Any]:
    """The committed report of the engine, which has that row; SystemExit says what is wrong."""
    names = [known.name for known in ROWS]
    if row not in names:
        raise SystemExit(f"--row takes the name of one row, got {row!r}; rows: {', '.join(names)}")
    results = load_results(FOLDER)
    if results is None:
        raise SystemExit("no results are committed under tools/results")
    wrong = why_wrong(results)
    wrong += [
        f"{row} {n} has no figure" for n in NORMALIZATIONS if not _figures(results.engine, row, n)
    ]
    if wrong:
        raise SystemExit("the committed results are wrong: " + "; ".join(wrong))
    return results.engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", default=ROW, help=f"a row's name, by default {ROW}")
    parser.add_argument("--tolerance", type=number(0, 10), default=TOLERANCE)
    parser.add_argument("--commit", default="", help="as of bench_engine")
    args = parser.parse_args(arguments)
    try:
        before = committed(args.row)
    except SystemExit as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "now.json"
        command = [sys.executable, str(ROOT / "tools" / "bench_engine.py"), "--rows", args.row]
        command += ["--part", "rows", "--out", str(out), "--json", "--even-failed"]
        command += ["--commit", args.commit] if args.commit else []
        # as many threads as then, whatever make says: the reference on the CPU takes a minute with one
        cores = os.cpu_count() or 1
        threads = min(int(before["environment"].get("torch_threads", cores)), cores)
        given = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, env=given, stdout=subprocess.DEVNULL, check=False)
        if done.returncode == EXIT_NO_DEVICE:
            return EXIT_NO_DEVICE  # bench_engine has said so
        if not out.exists():
            print(f"bench_engine ended with {done.returncode}", file=sys.stderr)
            return 2
        now = json.loads(out.read_text("utf-8"))
    names = [report["environment"]["device"] for report in (before, now)]
    if names[0] != names[1]:
        print(f"the results are of {names[0]}, this is {names[1]}", file=sys.stderr)
        return 2
    lines, is_good = compare(before, now, args.row, args.tolerance)
    print("\n".join(lines))
    return 0 if is_good and done.returncode == 0 else 1


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
