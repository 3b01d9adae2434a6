"""Where the device time of one row goes: kernels by name and gaps between them, for each captured graph of a batch.

All work of a graph that is replayed carries the number of the call that launched it. What tracing costs is in the figures: they
are for comparison with each other, the row's own time is that of a run without it.

Once a process has traced, its launches cost more for good: on an H200, torch 2.11, the device waited 0.13 to 0.19 ms more for the
prefill of a lone request, in every row that was timed after the first trace. So rows are profiled when all are timed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tools._bench.busy_share import WORK, busy_share
from tools._bench.drawn_model import DrawnWeights, draw_decoder
from tools._bench.engine_log import progress
from tools._bench.engine_matrix import (
    MODEL_SEED,
    NoTimeLeft,
    maker_of,
    noting,
    open_engine,
    ready_batch,
)
from tools._bench.engine_rows import ALL_SHAPES, NORMALIZATIONS
from tools._bench.engine_run import LastBatches, medians_ms, run_batch, stages_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tools._bench.engine_matrix import Outcome, Plan
    from tools._bench.engine_rows import Normalised, Row
    from xgr_runtime import Engine
    from xgr_runtime.types import RecRequest

    Ready = Callable[[Row, Normalised], list[RecRequest]]

BATCHES, WARMUP = 5, 1
FEWEST_KERNELS = 20  # of a captured graph; fewer with the same number are a copy or a single launch
TOP = 14
LONGEST_NAME = 72


@dataclass(frozen=True)
class Interval:
    """Work of the device, in nanoseconds. launch: the number of the call that launched it."""

    name: str
    start: int
    end: int
    launch: int


def profile_model(plan: Plan, name: str, rows: list[Row], outcome: Outcome) -> None:
    """Those rows of a model, which have been timed: its engines again. What fails is noted, and the next one runs."""
    shape = ALL_SHAPES[name]
    progress(f"{name}: drawing the weights, for profiles")
    model = draw_decoder(shape, DrawnWeights(plan.device.torch_device, plan.dtype, MODEL_SEED))
    makers = {row.name: maker_of(plan, shape, number) for number, row in enumerate(rows)}
    for key in dict.fromkeys(row.engine for row in rows):
        own, last = [row for row in rows if row.engine == key], LastBatches([])
        with (
            noting(outcome, f"profiles of {', '.join(row.name for row in own)}"),
            open_engine(plan, model, own[0], last) as engine,
        ):

            def ready(row: Row, how: Normalised, engine: Engine = engine) -> list[RecRequest]:
                return ready_batch(engine, last, makers[row.name], row, how)  # noqa: B023 - used here alone

            for row in own:
                with noting(outcome, f"profile of {row.name}"):
                    if not plan.has_time():
                        raise NoTimeLeft
                    found = profile_row(plan.device.kind, engine, last, ready, row)
                    outcome.profiles += found
                    for profile in found:
                        progress("\n".join(lines_of(profile)))
        outcome.changed()


def profile_row(
    kind: str, engine: Engine, last: LastBatches, ready: Ready, row: Row
) -> list[dict[str, Any]]:
    """Both normalisations of a row, with an engine on a device of that kind.

    ready: gives the requests of a batch, and has asked whatever comes before them.
    """
    return [_profile(kind, engine, last, ready, row, how) for how in NORMALIZATIONS]


def _profile(
    kind: str,
    engine: Engine,
    last: LastBatches,
    ready: Ready,
    row: Row,
    normalization: Normalised,
) -> dict[str, Any]:
    taken = []
    for number in range(WARMUP + BATCHES):
        run_batch(engine, ready(row, normalization))
        stages = stages_ms(last.take()[1])
        taken += [stages] if number >= WARMUP else []
    report = {
        "row": row.name,
        "normalization": normalization,
        "stages_ms": medians_ms(taken),
    }
    if kind != "cuda":
        return {**report, "segments": []}
    batches = [ready(row, normalization) for _ in range(BATCHES)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for requests in batches:
            run_batch(engine, requests)
    last.pairs.clear()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    work = intervals(profile.profiler.kineto_results.events())
    return {**report, "segments": segments(work, BATCHES)}


def intervals(events: Iterable[Any]) -> list[Interval]:
    """The kernels and copies of a torch profile's raw events, in order of time."""
    found = []
    for event in events:
        is_work = event.device_type().name != "CPU" and not event.is_user_annotation()
        if hasattr(event, "activity_type"):
            is_work = event.activity_type() in WORK
        if is_work:
            start, end = event.start_ns(), event.start_ns() + event.duration_ns()
            found.append(Interval(event.name(), start, end, event.correlation_id()))
    return sorted(found, key=lambda interval: interval.start)


def segments(work: list[Interval], batches: int) -> list[dict[str, Any]]:
    """The graphs of a batch, each as the mean over so many batches, and everything outside of them."""
    by_launch: dict[int, list[Interval]] = defaultdict(list)
    for interval in work:
        by_launch[interval.launch].append(interval)
    graphs = [group for group in by_launch.values() if len(group) >= FEWEST_KERNELS]
    per_batch = len(graphs) // batches
    names = ("prefill", "rounds") if per_batch == 2 else tuple(map(str, range(per_batch)))
    found = [_segment(name, graphs[n::per_batch], batches) for n, name in enumerate(names)]
    rest = [group for group in by_launch.values() if len(group) < FEWEST_KERNELS]
    return [*found, _segment("outside of graphs", rest, batches)]


def _segment(name: str, groups: list[list[Interval]], batches: int) -> dict[str, Any]:
    """Milliseconds a batch: from first to last (of each group on its own), without work, and of each kernel."""
    span = gaps = 0.0
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for group in groups:
        starts, ends = np.asarray([(i.start, i.end) for i in group], np.int64).T
        busy = busy_share(starts, ends)
        whole = int(ends.max() - starts.min()) / 1e6
        span += whole
        gaps += whole * (1 - busy.share)
        for interval in group:
            times[interval.name] += interval.end - interval.start
            calls[interval.name] += 1
    return {
        "segment": name,
        "span_ms": round(span / batches, 4),
        "gaps_ms": round(gaps / batches, 4),
        "kernels": round(sum(calls.values()) / batches, 1),
        "top": [
            {
                "kernel": kernel[:LONGEST_NAME],
                "ms": round(ns / batches / 1e6, 4),
                "calls": round(calls[kernel] / batches, 1),
            }
            for kernel, ns in times.most_common(TOP)
        ],
    }


def lines_of(profile: dict[str, Any]) -> list[str]:
    """For people."""
    found = [f"{profile['row']} {profile['normalization']}: stages {profile['stages_ms']}"]
    for segment in profile["segments"]:
        found.append(
            f"  {segment['segment']}: {segment['span_ms']:.3f} ms, {segment['kernels']:g} kernels, "
            f"{segment['gaps_ms']:.3f} ms without work"
        )
        found += [
            f"    {top['ms']:9.4f} ms {top['calls']:7g} x {top['kernel']}" for top in segment["top"]
        ]
    return found
