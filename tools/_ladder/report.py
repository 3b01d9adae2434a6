"""What a rung came to, the table of all rungs, and whether the whole counts as passed."""

from __future__ import annotations

import json
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

NAMES = ("L0", "L1", "L2", "L3", "L4", "L5", "L6", "L7")
# L5 needs a vendor's compiler, L6 a GPU, L7 kernels that do not exist yet; the others run on any machine.
MAY_NOT_RUN = ("L5", "L6", "L7")
# Rungs that execute a provider's function. L5 compiles it only.
COVERING = ("L2", "L3", "L4")

TEXT_WIDTH = 96

Result = Literal["passed", "failed", "not_run"]
Pair = tuple[str, str]


@dataclass(frozen=True)
class Outcome:
    """One rung. counts: what was executed, by name; reason: why it failed or did not run, "" where it passed.

    providers: the (op, provider) pairs whose functions ran, or were compiled, on this rung.
    """

    rung: str
    checked: str
    counts: Mapping[str, int]
    result: Result
    reason: str = ""
    seconds: float = 0.0
    providers: tuple[Pair, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "rung": self.rung,
            "checked": self.checked,
            "counts": dict(self.counts),
            "result": self.result,
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
            "providers": [{"op": op, "provider": name} for op, name in sorted(self.providers)],
        }


def write_json(path: Path, outcomes: Iterable[Outcome]) -> None:
    """A list with one entry per rung, in order."""
    entries = [outcome.to_dict() for outcome in outcomes]
    path.write_text(json.dumps(entries, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def problems(outcomes: Iterable[Outcome]) -> list[str]:
    """Why the run as a whole did not pass, a line per cause; empty: it passed."""
    found = []
    by_name = {outcome.rung: outcome for outcome in outcomes}
    for name in NAMES:
        outcome = by_name.get(name)
        if outcome is None:
            found.append(f"{name} is missing from the report")
        elif outcome.result == "failed":
            found.append(f"{name} failed: {outcome.reason}")
        elif outcome.result == "not_run" and name not in MAY_NOT_RUN:
            found.append(f"{name} did not run: {outcome.reason}")
        elif outcome.result == "passed" and not any(outcome.counts.values()):
            found.append(f"{name} executed nothing")
    return found


def uncovered(registered: Iterable[Pair], outcomes: Iterable[Outcome]) -> list[Pair]:
    """Registered (op, provider) pairs that no covering rung executed."""
    executed = {
        pair for outcome in outcomes if outcome.rung in COVERING for pair in outcome.providers
    }
    return sorted(set(registered) - executed)


def rung_table(outcomes: Sequence[Outcome]) -> str:
    """A row per rung: what was checked, what was executed, how it ended."""
    rows: list[tuple[str, ...]] = [("rung", "result", "time", "checked")]
    for outcome in outcomes:
        counts = ", ".join(f"{number} {name}" for name, number in outcome.counts.items())
        rows.append((outcome.rung, outcome.result, f"{outcome.seconds:.0f} s", outcome.checked))
        for text in (counts, *outcome.reason.splitlines()[:1]):
            rows.extend(("", "", "", f"  {line}") for line in textwrap.wrap(text, TEXT_WIDTH))
    return _aligned(rows)


def provider_table(registered: Iterable[Pair], outcomes: Iterable[Outcome]) -> str:
    """A row per registered provider of an op: the rungs that executed or compiled it."""
    rungs: dict[Pair, list[str]] = defaultdict(list)
    for outcome in outcomes:
        for pair in outcome.providers:
            rungs[pair].append(outcome.rung)
    rows = [(op, name, " ".join(rungs[op, name]) or "none") for op, name in sorted(registered)]
    return _aligned([("op", "npu provider", "rungs"), *rows])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
