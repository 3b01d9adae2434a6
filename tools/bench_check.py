"""Measure one row of the engine benchmark again and compare it with the committed results: within 15 %, or exit code 1.

Only on a device like the one that the results are of; elsewhere the exit code is 2. The answers are checked like those of a
whole run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools._bench.command import number  # noqa: E402
from tools._bench.engine_rows import ROWS, choose  # noqa: E402
from tools._bench.results import FOLDER, load_results  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

ROW = "0.6B-w512-h1024-b8"
TOLERANCE = 0.15


def compare(
    before: dict[str, Any], now: dict[str, Any], row: str, tolerance: float
) -> tuple[list[str], bool]:
    """A line for each normalisation, and whether every median is within the tolerance of the committed one."""
    lines, is_good = [], True
    for old in before["rows"]:
        if old["row"] != row:
            continue
        same = [
            n for n in now["rows"] if n["row"] == row and n["normalization"] == old["normalization"]
        ]
        if not same:
            lines.append(f"{row} {old['normalization']}: was not measured")
            is_good = False
            continue
        change = same[0]["median_ms"] / old["median_ms"] - 1
        is_good &= abs(change) <= tolerance
        lines.append(
            f"{row} {old['normalization']}: {same[0]['median_ms']:.3f} ms, committed "
            f"{old['median_ms']:.3f} ms ({old['commit']}): {change:+.1%}"
        )
    return lines, is_good and bool(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", default=ROW, help=f"a row's name, by default {ROW}")
    parser.add_argument("--tolerance", type=number(0, 10), default=TOLERANCE)
    parser.add_argument("--commit", default="", help="as of bench_engine")
    args = parser.parse_args(arguments)
    (row,) = choose(ROWS, [args.row])
    results = load_results(FOLDER)
    if results is None:
        print("no results are committed under tools/results", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "now.json"
        command = [sys.executable, str(ROOT / "tools" / "bench_engine.py"), "--rows", row.name]
        command += ["--part", "rows", "--out", str(out), "--json"]
        command += ["--commit", args.commit] if args.commit else []
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if not out.exists():
            print(f"bench_engine ended with {done.returncode}", file=sys.stderr)
            return 2
        now = json.loads(out.read_text("utf-8"))
    names = [report["environment"]["device"] for report in (results.engine, now)]
    if names[0] != names[1]:
        print(f"the results are of {names[0]}, this is {names[1]}", file=sys.stderr)
        return 2
    lines, is_good = compare(results.engine, now, row.name, args.tolerance)
    print("\n".join(lines))
    return 0 if is_good and done.returncode == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
