"""The file of a long benchmark: what is known so far lies beside it all along, and it is replaced only by a run without failures.

FILE.partial holds the report while the benchmark runs, so that one that is ended from outside loses nothing. At the end it takes
FILE's place; where something failed it stays what it is, and the good results of before stay too.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from tools._bench.timing import progress

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable
    from pathlib import Path

EXIT_NO_DEVICE = 2


def print_report(report: dict[str, Any], args: argparse.Namespace) -> None:
    """On stdout: one JSON object with --json, else line by line."""
    if args.json:
        print(json.dumps(report, indent=2))
        return
    for key, value in report.items():
        print(f"{key}: {json.dumps(value)}")


class ReportFile:
    """path None: nothing is written. takes_failed: a report with failures replaces FILE too."""

    def __init__(self, path: Path | None, *, takes_failed: bool = False) -> None:
        self._path, self._takes_failed = path, takes_failed

    def keep(self, report: dict[str, Any], missing: Iterable[str]) -> None:
        """What is known so far, and the names of what is not yet: if the run is ended, it has said what it lacks."""
        entries = [{"row": name, "reason": "the run was ended before"} for name in missing]
        if self._path is None:
            return
        known = {**report, "not_measured": [*report["not_measured"], *entries]}
        self._write(known, self._path)

    def finish(self, report: dict[str, Any]) -> None:
        """The whole report."""
        if self._path is None:
            return
        partial = self._write(report, self._path)
        if report.get("failures") and not self._takes_failed:
            progress(f"something failed: the report is {partial}, {self._path} is as it was")
        else:
            os.replace(partial, self._path)

    def _write(self, report: dict[str, Any], path: Path) -> Path:
        partial = path.with_name(path.name + ".partial")
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
        os.replace(beside, partial)
        return partial
