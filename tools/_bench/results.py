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

FEWEST_RUNS = 5
ENGINE_FACTS = ("driver", "torch", "triton", "date", "bf16_product_tflops", "copy_tb_per_s")
TEXTS = ("row", "commit", "model", "normalization", "rules")
NUMBERS = (
    *("width", "history", "requests", "items", "cached_tokens", "median_ms", "p20_ms", "p80_ms"),
    *("floor_ms", "memory_mib", "violations", "near_ties", "runs"),
)
_SIZES = ("width", "history", "requests", "violations", "num_graphs")
MEMORY_NUMBERS = (*_SIZES, "beyond_weights_mib")
LOAD_NUMBERS = (
    *(*_SIZES, "max_batches_in_flight", "peak_reserved_mib", "requests_per_s"),
    *("busy_share", "seconds"),
)
OP_TEXTS = ("op", "label", "provider", "timed_by", "bound_by")
OP_NUMBERS = (
    *("median_ms", "p20_ms", "p80_ms", "flops", "bytes", "flops_per_byte", "tflops", "gb_per_s"),
    *("floor_ms", "share_of_floor", "error_of_tolerance", "runs"),
)


@dataclass(frozen=True)
class Results:
    """The two reports as they were written."""

    engine: dict[str, Any]
    ops: dict[str, Any]


def load_results(folder: Path = FOLDER) -> Results | None:
    """None where neither file is there; SystemExit where one is without the other, or damaged."""
    there = [name for name in (ENGINE, OPS) if (folder / name).exists()]
    if not there:
        return None
    if len(there) == 1:
        raise SystemExit(f"{folder} holds {there[0]} without the other one")
    return Results(*(_read(folder / name) for name in (ENGINE, OPS)))


def _read(path: Path) -> dict[str, Any]:
    """A report whose parts have the right types; the figures in it may be wrong."""
    try:
        report = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path.name} cannot be read: {error}") from None
    if not isinstance(report, dict):
        raise SystemExit(f"{path.name} is damaged: it is no object")
    for name in ("environment", "catalog", "memory", "load"):
        if not isinstance(report.get(name, {}), dict):
            raise SystemExit(f"{path.name} is damaged: {name} is no object")
    for name in ("rows", "failures", "not_measured", "reference_checks"):
        entries = report.get(name, [] if name == "reference_checks" else None)
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise SystemExit(f"{path.name} is damaged: {name} is no list of objects")
    return report


def why_wrong(results: Results) -> list[str]:
    """Everything that is wrong with the reports, [] where nothing is. A target that is missed is not wrong, nor is what the
    report itself says it has no figure of: the README says so too.
    """
    engine, ops = results.engine, results.ops
    found = [*_of_report("engine", engine, ENGINE_FACTS), *_of_report("ops", ops, ())]
    if engine.get("commit") != ops.get("commit"):
        found.append("engine and ops are of different commits")
    for row in engine["rows"]:
        why = [*_of_row(row), *_of_commit(row, engine)]
        found += [f"{row.get('row')} {row.get('normalization')}: {reason}" for reason in why]
    found += [*_of_all_rows(engine), *_of_reference(engine)]
    for part, numbers in (("memory", MEMORY_NUMBERS), ("load", LOAD_NUMBERS)):
        found += [f"{part}: {why}" for why in _of_part(engine, part, numbers)]
    for row in ops["rows"]:
        found += [f"{row.get('op')} {row.get('label')}: {why}" for why in _of_op(row)]
    calls = [(row.get("op"), row.get("label"), row.get("provider")) for row in ops["rows"]]
    found += ["an op's row is there twice"] if len(calls) != len(set(calls)) else []
    return found


def without_figure(report: dict[str, Any]) -> dict[str, str]:
    """What the report itself names as not measured or failed, and why."""
    entries = [*report["not_measured"], *report["failures"]]
    return {str(entry.get("row")): str(entry.get("reason")) for entry in entries}


def _of_reference(engine: dict[str, Any]) -> list[str]:
    """Of every model with figures the reference was compared with the CPU, under both normalisations."""
    checks = engine.get("reference_checks", [])
    good = {(c.get("model"), c.get("normalization")) for c in checks if c.get("violations") == 0}
    models = sorted({str(row.get("model")) for row in engine["rows"]})
    return [
        f"the reference of {model}, {how}, does not agree with the CPU"
        for model in models
        for how in NORMALIZATIONS
        if (model, how) not in good
    ]


def _of_all_rows(engine: dict[str, Any]) -> list[str]:
    """Each row of the table once, under both normalisations, or named as one that has no figure; no other rows."""
    wanted = {(row.name, normalization) for row in ROWS for normalization in NORMALIZATIONS}
    measured = [(row.get("row"), row.get("normalization")) for row in engine["rows"]]
    found = [
        f"{row} {how} is no row of the table" for row, how in measured if (row, how) not in wanted
    ]
    # what went wrong before a row began is named by its model, or by all rows of an engine
    named = " ".join(without_figure(engine))
    models = {row.name: row.model for row in ROWS}
    for row, how in sorted(wanted - set(measured)):
        if row not in re.split(r"[ ,]+", named) and models[row] not in without_figure(engine):
            found.append(f"{row} {how} is not measured")
    return [*found, *(["a row is there twice"] if len(measured) != len(set(measured)) else [])]


def _of_report(name: str, report: dict[str, Any], facts: tuple[str, ...]) -> list[str]:
    found = []
    if not re.fullmatch(r"[0-9a-f]{7,40}", str(report.get("commit"))):
        found.append(f"{name}: commit is {report.get('commit')!r}")
    environment = report.get("environment", {})
    if "H200" not in str(environment.get("device")):
        found.append(f"{name}: is not of an H200")
    found += [f"{name}: environment has no {n}" for n in facts if n not in environment]
    if report.get("dtype") != "bfloat16":
        found.append(f"{name}: dtype is {report.get('dtype')!r}")
    for entry in (*report["not_measured"], *report["failures"]):
        if not entry.get("row") or not entry.get("reason"):
            found.append(f"{name}: {entry} does not say what has no figure and why")
    if not report["rows"]:
        found.append(f"{name}: nothing is measured")
    return found


def _of_fields(row: dict[str, Any], texts: tuple[str, ...], numbers: tuple[str, ...]) -> list[str]:
    found = [f"{n} is {row.get(n)!r}" for n in texts if not isinstance(row.get(n), str)]
    for name in numbers:
        value: Any = row.get(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            found.append(f"{name} is {value!r}")
    return found


def _of_times(row: dict[str, Any]) -> list[str]:
    found = []
    if not 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]:
        found.append("its percentiles are not in order")
    if row["runs"] < FEWEST_RUNS:
        found.append(f"{row['runs']} runs are too few")
    return found


def _of_part(engine: dict[str, Any], part: str, numbers: tuple[str, ...]) -> list[str]:
    figures = engine.get(part)
    if not figures:
        return [] if part in without_figure(engine) else ["is not measured"]
    found = [*_of_fields(figures, ("model",), numbers), *_of_commit(figures, engine)]
    start = figures.get("start")
    starts = (
        _of_fields(start, (), ("seconds", "graphs")) if isinstance(start, dict) else ["is none"]
    )
    found += [f"start: {why}" for why in starts]
    if not found and figures["violations"]:
        found.append("an answer is wrong")
    if not found and not 0 <= figures.get("busy_share", 1) <= 1:
        found.append(f"busy_share is {figures['busy_share']}")
    return found


def _of_commit(figures: dict[str, Any], report: dict[str, Any]) -> list[str]:
    is_same = figures.get("commit") == report.get("commit")
    return [] if is_same else [f"commit is {figures.get('commit')!r}, not the report's"]


def _of_row(row: dict[str, Any]) -> list[str]:
    found = _of_fields(row, TEXTS, NUMBERS)
    if found:
        return found
    if row["model"] not in SHAPES or row["normalization"] not in NORMALIZATIONS:
        return [f"model {row['model']!r}, normalization {row['normalization']!r}"]
    found = _of_times(row)
    for known in ROWS:
        sizes = (known.model, known.width, known.history, known.requests)
        is_same = sizes == (row["model"], row["width"], row["history"], row["requests"])
        if known.name == row["row"] and not is_same:
            found.append("its sizes are not those of its name")
    is_vocab = row["normalization"] == "vocab"
    work = Work(row["history"], row["width"], row["requests"], row["cached_tokens"], is_vocab)
    if abs(floor_ms(SHAPES[row["model"]], work) - row["floor_ms"]) > 1e-3:
        found.append(f"its floor is not {row['floor_ms']} ms")
    if row["violations"]:
        found.append(f"{row['violations']} answers are wrong")
    return found


def _of_op(row: dict[str, Any]) -> list[str]:
    found = _of_fields(row, OP_TEXTS, OP_NUMBERS)
    if found:
        return found
    found = _of_times(row)
    if row["error_of_tolerance"] > 1:
        found.append("its result is wrong")
    if not isinstance(row.get("is_bound"), bool):
        found.append(f"is_bound is {row.get('is_bound')!r}")
    return found


def engine_row(results: Results, row: Row, normalization: str) -> dict[str, Any] | None:
    """The figures of a row of the table, None where it has none."""
    for found in results.engine["rows"]:
        if (found["row"], found["normalization"]) == (row.name, normalization):
            return dict(found)
    return None
