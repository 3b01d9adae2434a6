"""The committed results: where they lie, and what has to be true of them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools._bench.engine_rows import NORMALIZATIONS, ROWS, Row
from tools._bench.floor import SHAPES, Work, floor_ms

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tools" / "results"
ENGINE, OPS = "bench_engine_h200.json", "bench_ops_h200.json"

TEXTS = ("commit", "model", "normalization", "rules")
NUMBERS = (
    *("width", "history", "requests", "items", "cached_tokens", "median_ms", "p20_ms", "p80_ms"),
    *("floor_ms", "memory_mib", "violations", "near_ties"),
)
OP_TEXTS = ("op", "label", "provider", "timed_by", "bound_by")
OP_NUMBERS = (
    *("median_ms", "p20_ms", "p80_ms", "flops", "bytes", "flops_per_byte", "tflops", "gb_per_s"),
    *("floor_ms", "share_of_floor", "error_of_tolerance"),
)


@dataclass(frozen=True)
class Results:
    """The two reports as they were written."""

    engine: dict[str, Any]
    ops: dict[str, Any]


def load_results(folder: Path = FOLDER) -> Results | None:
    """None where neither file is there; one without the other is an error."""
    there = [name for name in (ENGINE, OPS) if (folder / name).exists()]
    if not there:
        return None
    if len(there) == 1:
        raise SystemExit(f"{folder} holds {there[0]} without the other one")
    engine, ops = (json.loads((folder / name).read_text("utf-8")) for name in (ENGINE, OPS))
    return Results(engine, ops)


def why_wrong(results: Results) -> list[str]:
    """Everything that is wrong with the reports, [] where nothing is."""
    found = [*_of_report("engine", results.engine), *_of_report("ops", results.ops)]
    for row in results.engine["rows"]:
        found += [f"{row.get('row')} {row.get('normalization')}: {why}" for why in _of_row(row)]
    wanted = {(row.name, normalization) for row in ROWS for normalization in NORMALIZATIONS}
    measured = [(row.get("row"), row.get("normalization")) for row in results.engine["rows"]]
    found += [f"{row} {how} is not measured" for row, how in sorted(wanted - set(measured))]
    found += ["a row is there twice"] if len(measured) != len(set(measured)) else []
    for part in ("memory", "load"):
        if results.engine.get(part, {}).get("violations") != 0:
            found.append(f"{part} is not measured")
    for row in results.ops["rows"]:
        found += [f"{row.get('op')} {row.get('label')}: {why}" for why in _of_op(row)]
    return found


def _of_report(name: str, report: dict[str, Any]) -> list[str]:
    found = []
    if not re.fullmatch(r"[0-9a-f]{7,40}", str(report.get("commit"))):
        found.append(f"{name}: commit is {report.get('commit')!r}")
    if "H200" not in report.get("environment", {}).get("device", ""):
        found.append(f"{name}: is not of an H200")
    found += [f"{name}: {f['row']} failed: {f['reason']}"[:200] for f in report["failures"]]
    return found


def _of_fields(row: dict[str, Any], texts: tuple[str, ...], numbers: tuple[str, ...]) -> list[str]:
    found = [f"{n} is {row.get(n)!r}" for n in texts if not isinstance(row.get(n), str)]
    for name in numbers:
        value: Any = row.get(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            found.append(f"{name} is {value!r}")
    if not found and not 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]:
        found.append("its percentiles are not in order")
    return found


def _of_row(row: dict[str, Any]) -> list[str]:
    found = _of_fields(row, TEXTS, NUMBERS)
    if found:
        return found
    if row["model"] not in SHAPES or row["normalization"] not in NORMALIZATIONS:
        return [f"model {row['model']!r}, normalization {row['normalization']!r}"]
    is_vocab = row["normalization"] == "vocab"
    work = Work(row["history"], row["width"], row["requests"], row["cached_tokens"], is_vocab)
    if abs(floor_ms(SHAPES[row["model"]], work) - row["floor_ms"]) > 1e-3:
        found.append(f"its floor is not {row['floor_ms']} ms")
    if row["violations"]:
        found.append(f"{row['violations']} answers are wrong")
    return found


def _of_op(row: dict[str, Any]) -> list[str]:
    found = _of_fields(row, OP_TEXTS, OP_NUMBERS)
    if not found and row["error_of_tolerance"] > 1:
        found.append("its result is wrong")
    return found


def engine_row(results: Results, row: Row, normalization: str) -> dict[str, Any]:
    """The figures of a row of the table."""
    for found in results.engine["rows"]:
        if (found["row"], found["normalization"]) == (row.name, normalization):
            return dict(found)
    raise KeyError(f"{row.name} {normalization}")
