"""A row's batches timed, normalisations in turn, and its figures out of the times and the verdicts on its answers."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tools._bench.engine_rows import NORMALIZATIONS, RULES_TEXT, Normalised, Row
from tools._bench.engine_run import LastBatches, medians_ms, run_batch, stages_ms
from tools._bench.floor import ModelShape, Work, floor_ms

if TYPE_CHECKING:
    from tools._bench.answer_check import Verdict
    from tools._bench.engine_matrix import Plan
    from tools._bench.engine_profile import Ready
    from xgr_runtime import Engine

FEWEST_RUNS = 8


@dataclass
class Taken:
    """Of each run its stages, and `wall`, in milliseconds. cached_tokens: of each history, the same in all runs."""

    runs: list[dict[str, float]] = field(default_factory=list)
    cached_tokens: int = 0


def time_row(
    plan: Plan, engine: Engine, last: LastBatches, ready: Ready, row: Row
) -> dict[Normalised, Taken]:
    """Batches after warming up, as many as the plan asks for or has time for."""
    taken = {normalization: Taken() for normalization in NORMALIZATIONS}
    end_s = math.inf
    for turn in range(plan.warmup + plan.repetitions):
        if turn == plan.warmup:
            end_s = time.monotonic() + plan.row_s
        if turn >= plan.warmup + FEWEST_RUNS and time.monotonic() > end_s:
            break
        for normalization in NORMALIZATIONS if turn % 2 else NORMALIZATIONS[::-1]:
            results, wall_ms = run_batch(engine, ready(row, normalization))
            _, output = last.take()
            taken[normalization].cached_tokens = results[0].num_cached_tokens
            if turn >= plan.warmup:
                taken[normalization].runs.append({"wall": wall_ms, **stages_ms(output)})
    return taken


def figures_of(
    shape: ModelShape, row: Row, normalization: Normalised, taken: Taken
) -> dict[str, Any]:
    """The row as it is written: what was asked for, times, the counted floor."""
    cached = taken.cached_tokens
    work = Work(row.history, row.width, row.requests, cached, normalization == "vocab")
    floor, stages = floor_ms(shape, work), medians_ms(taken.runs)
    median, low, high = _percentiles([run["span"] for run in taken.runs])
    wall_median, wall_low, wall_high = _percentiles([run["wall"] for run in taken.runs])
    return {
        "model": row.model,
        "width": row.width,
        "history": row.history,
        "requests": row.requests,
        "normalization": normalization,
        "rules": RULES_TEXT[row.kind],
        "cached_tokens": cached,
        "median_ms": median,
        "p20_ms": low,
        "p80_ms": high,
        "device_ms": stages["device"],
        "wall_median_ms": wall_median,
        "wall_p20_ms": wall_low,
        "wall_p80_ms": wall_high,
        "runs": len(taken.runs),
        "floor_ms": round(floor, 4),
        "share_of_floor": round(floor / median, 4),
        "stages_ms": {n: ms for n, ms in stages.items() if n not in ("wall", "span", "device")},
    }


def _percentiles(times_ms: list[float]) -> tuple[float, float, float]:
    low, high = np.percentile(times_ms, [20, 80]).round(4).tolist()
    return round(statistics.median(times_ms), 4), low, high


def parity_of(verdicts: list[Verdict]) -> dict[str, Any]:
    """What the checks of a row's answers have found."""
    stats = [verdict.stats for verdict in verdicts if verdict.stats is not None]
    return {
        "violations": sum(bool(verdict.violation) for verdict in verdicts),
        "near_ties": sum(found.num_rows - found.num_common for found in stats),
        "ranks_swapped": sum(verdict.num_swapped for verdict in verdicts),
        "checked_requests": len(verdicts),
        "checked_rows": sum(found.num_rows for found in stats),
        "safe_rows": sum(found.num_safe for found in stats),
        "possible_sets_checked": sum(found.possible_checked for found in stats),
        "largest_score_error": round(max((found.max_error for found in stats), default=0.0), 6),
    }


def line_of(figures: dict[str, Any]) -> str:
    """For people."""
    return (
        f"{figures['row']:32} {figures['normalization']:6} {figures['median_ms']:9.3f} ms "
        f"({figures['p20_ms']:.3f}-{figures['p80_ms']:.3f}), graphs {figures['device_ms']:.3f}, "
        f"wall {figures['wall_median_ms']:.3f}, "
        f"floor {figures['floor_ms']:.3f} = {figures['share_of_floor']:.0%}, "
        f"error {figures['largest_score_error']}, near ties {figures['near_ties']}"
    )
