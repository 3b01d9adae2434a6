"""The report of a conformance run: plain data for JSON, lines for a terminal, and a file that is always whole."""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xgr_runtime import __version__
from xgr_runtime.conformance.engines import EngineEntry
from xgr_runtime.conformance.parity import ParityEntry
from xgr_runtime.conformance.verdict import ReportPart, is_optional, parts_that_never_ran
from xgr_runtime.errors import XgrError, printable
from xgr_runtime.files import kind_of

SCHEMA = 1
_SHOWN_FAILURES = 3
_WIDTH = 200  # characters of a message on a terminal; the file has more


class ReportError(XgrError, ValueError):
    """The report's file cannot be written."""


@dataclass
class Report:
    """What was checked so far. in_progress: what runs, "" before and after. stopped: why the run ended early.

    environment: versions and devices, as `xgr doctor` reports them. load_failures: (module, reason) of provider modules
    that could not be imported. started_utc: ISO 8601.
    """

    xgr_version: str
    started_utc: str
    environment: Mapping[str, Any]
    device: Mapping[str, str]
    options: Mapping[str, Any]
    load_failures: tuple[tuple[str, str], ...] = ()
    parity: list[ParityEntry] = field(default_factory=list)
    engines: list[EngineEntry] = field(default_factory=list)
    in_progress: str = ""
    stopped: str = ""
    is_complete: bool = False
    seconds: float = 0.0

    @property
    def result(self) -> str:
        """passed or failed, see verdict.py; incomplete while it runs and where it ended early without a failure."""
        results = [e.result for e in self.parity] + [e.result for e in self.engines]
        is_any_missing = any(not is_optional(reason) for _, reason in self.load_failures)
        if "failed" in results or is_any_missing or self.never_ran:
            return "failed"
        return "passed" if self.is_complete else "incomplete"

    @property
    def never_ran(self) -> list[ReportPart]:
        """The parts of a complete run of which no case ran."""
        if not self.is_complete:
            return []
        may_fall_back = self.device["kind"] == "cpu" or bool(self.options["allow_reference"])
        return parts_that_never_ran(self.parity, self.engines, may_fall_back=may_fall_back)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object; names are explained in the README."""
        return {
            "schema": SCHEMA,
            "result": self.result,
            "xgr_version": self.xgr_version,
            "started_utc": self.started_utc,
            "seconds": _digits(self.seconds),
            "device": dict(self.device),
            "options": dict(self.options),
            "in_progress": self.in_progress,
            "stopped": self.stopped,
            "never_ran": [asdict(part) for part in self.never_ran],
            "load_failures": [
                {"module": module, "reason": reason, "is_optional": is_optional(reason)}
                for module, reason in self.load_failures
            ],
            "parity": [_parity_dict(entry) for entry in self.parity],
            "engines": [_engine_dict(entry) for entry in self.engines],
            "environment": dict(self.environment),
        }

    def summary(self) -> list[str]:
        """The last lines on a terminal."""
        ran = sum(entry.num_run for entry in self.parity)
        checked = sum(entry.num_checked for entry in self.engines)
        failed = sum(e.num_failed for e in self.parity) + sum(e.num_failed for e in self.engines)
        lines = [f"provider module {m} was not loaded: {_cut(r)}" for m, r in self.load_failures]
        lines += [f"nothing of {part} could run" for part in self.never_ran]
        if self.stopped:
            lines.append(f"stopped early: {_cut(self.stopped)}")
        totals = f"{ran} op cases, {checked} searches, {failed} failed, {self.seconds:.1f} s"
        return [*lines, f"result: {self.result} ({totals})"]


def _parity_dict(entry: ParityEntry) -> dict[str, Any]:
    return {
        "op": entry.op,
        "provider": entry.provider,
        "dtype": entry.dtype,
        "result": entry.result,
        "cases": entry.num_cases,
        "run": entry.num_run,
        "failed": entry.num_failed,
        "refused": entry.num_refused,
        "bound_by_default": entry.num_default,
        "largest_error": _digits(entry.error.absolute),
        "largest_error_of_tolerance": _digits(entry.error.of_tolerance),
        "worst_case": entry.worst_case,
        "failures": [{"case": case, "message": text} for case, text in entry.failures],
        "refusals": [{"reason": r, "cases": n} for r, n in entry.refusals.items()],
        "seconds": _digits(entry.seconds),
    }


def _engine_dict(entry: EngineEntry) -> dict[str, Any]:
    return {
        "check": entry.what,
        "dtype": entry.shape.dtype_name,
        "page_size": entry.shape.page_size,
        "may_be_dense": entry.shape.is_dense,
        "result": entry.result,
        "reason": entry.reason,
        "checked": entry.num_checked,
        "failed": entry.num_failed,
        "failures": [{"what": what, "first_difference": text} for what, text in entry.failures],
        "largest_score_error": _digits(entry.max_error),
        "tolerance": entry.tolerance,
        "graph_captures": entry.num_graph_captures,
        "providers": entry.providers,
        "seconds": _digits(entry.seconds),
    }


def _digits(value: float) -> float | str:
    """Four digits; JSON has no infinity."""
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def parity_header() -> str:
    """The head of the table of `parity_lines`."""
    return (
        f"{'op':<24} {'provider':<10} {'dtype':<9} {'run':>4} {'failed':>6} {'refused':>7} "
        f"{'bound':>5} {'error':>8} {'of tol.':>8}  result"
    )


def parity_lines(entry: ParityEntry) -> list[str]:
    """One row, the reason where nothing ran, and the first failures."""
    row = (
        f"{entry.op:<24} {entry.provider:<10} {entry.dtype:<9} {entry.num_run:>4} {entry.num_failed:>6} "
        f"{entry.num_refused:>7} {entry.num_default:>5} {entry.error.absolute:>8.1e} "
        f"{entry.error.of_tolerance:>8.1e}  {entry.result}"
    )
    reasons = [f"    {_cut(reason)}" for reason in [*entry.refusals][:1] if not entry.num_run]
    return [row, *reasons, *_failure_lines(entry.failures)]


def engine_lines(entry: EngineEntry) -> list[str]:
    """One row, the reason where it could not be built, and the first failures."""
    row = (
        f"{entry.what:<10} {entry.shape!s:<36} {entry.num_checked:>4} checked {entry.num_failed:>4} failed, "
        f"error {entry.max_error:.1e}, {entry.num_graph_captures} graphs  {entry.result}"
    )
    reasons = [f"    {_cut(line)}" for line in entry.reason.splitlines()]
    return [row, *reasons, *_failure_lines(entry.failures)]


def _failure_lines(failures: list[tuple[str, str]]) -> list[str]:
    shown = [f"    {what}: {_cut(message)}" for what, message in failures[:_SHOWN_FAILURES]]
    more = len(failures) - _SHOWN_FAILURES
    return [*shown, f"    and {more} more"] if more > 0 else shown


def _cut(text: str) -> str:
    return printable(" ".join(text.split()), _WIDTH)


class ReportFile:
    """A file that holds the newest report, replaced in one step. Raises ReportError."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            kind = kind_of(self.path.stat().st_mode) if self.path.exists() else ""
        except (OSError, ValueError) as error:
            raise self._error(error) from error
        if kind:
            raise self._error(ValueError(f"it is {kind}"))

    def write(self, report: Report) -> None:
        """Replace the file's content."""
        self._write(report.to_dict())

    def write_not_started(self, device: str, reason: str) -> None:
        """Replace the file's content by why there is no report: one of an earlier run would be taken for it."""
        facts = {"schema": SCHEMA, "xgr_version": __version__, "device": device, "stopped": reason}
        self._write({**facts, "result": "not started"})

    def _write(self, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=1) + "\n"
        try:
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=".conformance-")
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                os.chmod(name, 0o644)
                os.replace(name, self.path)
            except BaseException:
                os.unlink(name)
                raise
        except (OSError, ValueError) as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> ReportError:
        reason = error.strerror if isinstance(error, OSError) else ""
        return ReportError(f"cannot write the report to {self.path}: {reason or error}")
