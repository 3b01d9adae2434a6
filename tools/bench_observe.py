"""What being observed costs: a batch with and without stage times and totals, the record of a call, a scrape.

Two engines serve the same requests in turn (A, B, A, B, ...): one as it is, one whose device has timers that do nothing and
whose totals count nothing. The direct cost of the parts is measured too, because it is smaller than the noise of a batch.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools._bench.command import MAX_COUNT, exit_code_of, whole
from tools._bench.timing import (
    MIN_RUNS,
    Timing,
    add_output_arguments,
    as_dict,
    environment,
    ratio,
    time_interleaved,
    write_report,
)
from xgr_runtime import Engine
from xgr_runtime.config import load_config
from xgr_runtime.hal.discovery import open_device
from xgr_runtime.service.call_record import CallRecord
from xgr_runtime.service.call_totals import CallTotals
from xgr_runtime.service.metrics import ServiceMetrics
from xgr_runtime.shipped import config_file
from xgr_runtime.types import RecRequest, Search
from xgr_runtime.xschedule.stage_clock import RoundMarks, StageClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xgr_runtime.hal.device import Device
    from xgr_runtime.xschedule.totals import Totals

REPEATS = 200  # of what is too short for the clock


class NoTimer:
    """Records nothing."""

    def record(self, point: int) -> None:
        return None

    def seconds(self, start: int, end: int) -> float:
        return 0.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", default="demo", help="a file or a name; default: demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--runs", type=whole(MIN_RUNS, MAX_COUNT), default=101, help=f"at least {MIN_RUNS}"
    )
    parser.add_argument("--batch", type=whole(1, MAX_COUNT), default=1, help="requests at once")
    parser.add_argument("--beam-width", type=whole(1, MAX_COUNT), default=20)
    add_output_arguments(parser)
    args = parser.parse_args(argv)
    overrides = [f"device={args.device}", "cache.prefix_cache=false"]
    config = load_config(config_file(args.config), overrides).config
    timed_device = open_device(args.device).device
    untimed_device = open_device(args.device).device
    untimed_device.timer = NoTimer  # type: ignore[method-assign]
    with (
        Engine.from_config(config, timed_device) as timed,
        Engine.from_config(config, untimed_device) as untimed,
    ):
        untimed._totals.add = lambda *_: None  # type: ignore[method-assign]
        cases = {
            name: asker(engine, args.batch, args.beam_width)
            for name, engine in (("observed", timed), ("unobserved", untimed))
        }
        batches = time_interleaved(cases, max(args.runs, MIN_RUNS), warmup_runs=10)
        processor = cpu_interleaved(cases, max(args.runs, MIN_RUNS))
        parts = measure_parts(timed, timed_device, args.batch)
    added_us = 1e3 * (processor["observed"].median_ms - processor["unobserved"].median_ms)
    report = {
        "batch": args.batch,
        "beam_width": args.beam_width,
        "observed_ratio_to_unobserved": ratio(batches, "observed", "unobserved"),
        "processor_ratio": ratio(processor, "observed", "unobserved"),
        "processor_added_us": round(added_us, 1),
        "batches": as_dict(batches),
        "processor": as_dict(processor),
        "parts_us": parts,
        "device": timed_device.name,
        "environment": environment(),
    }
    write_report(report, args)
    return 0


def asker(engine: Engine, num_requests: int, beam_width: int) -> Callable[[], object]:
    """Asks the same requests every time, all of one batch, and waits for the answers."""
    rng = np.random.default_rng(0)
    search = Search(beam_width=beam_width, num_results=10)
    pinned = engine.catalogs.pin(next(iter(engine.config.catalogs)))
    engine.catalogs.release(pinned)
    ids = pinned.catalog.item_ids
    requests = [
        RecRequest(
            str(i), history_item_ids=rng.choice(ids, 20).astype(np.int64), searches=(search,)
        )
        for i in range(num_requests)
    ]
    return lambda: engine.recommend(requests)


def cpu_interleaved(cases: dict[str, Callable[[], object]], runs: int) -> dict[str, Timing]:
    """As `time_interleaved`, in processor time of all threads: what other processes do does not count."""
    times_ms: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(runs):
        for name in cases if turn % 2 == 0 else reversed(cases):
            start_s = time.process_time()
            cases[name]()
            times_ms[name].append(1e3 * (time.process_time() - start_s))
    return {name: Timing.of(found) for name, found in times_ms.items()}


def measure_parts(engine: Engine, device: Device, num_requests: int) -> dict[str, float]:
    """Median microseconds of one: batch's points recorded and read, batch counted, call recorded; scrape rendered."""
    calls = CallTotals()
    arguments = captured(engine, num_requests)
    metrics = ServiceMetrics(calls, engine.stats, tuple(engine.config.catalogs))
    cases: dict[str, Callable[[], object]] = {
        "stage_times_of_a_batch": lambda: repeat(lambda: clock_one(device)),
        "totals_of_a_batch": lambda: repeat(lambda: engine._totals.add(*arguments)),
        "record_of_a_call": lambda: repeat(lambda: CallRecord(calls, is_logged=False).end_ok()),
        "scrape": lambda: metrics.render(""),
    }
    timings = time_interleaved(cases, 31)
    return {
        name: _each_us(timing, 1 if name == "scrape" else REPEATS)
        for name, timing in timings.items()
    }


def _each_us(timing: Timing, repeats: int) -> float:
    return round(1e3 * timing.median_ms / repeats, 2)


def repeat(fn: Callable[[], object]) -> None:
    for _ in range(REPEATS):
        fn()


def clock_one(device: Device, num_levels: int = 3) -> object:
    """What a batch of one group records and reads."""
    clock = StageClock(device)
    rounds = device.timer()
    marks = RoundMarks(rounds)
    clock.start()
    with clock.copying(is_to_host=False):
        pass
    with clock.prefill(is_next=True):
        pass
    with clock.copying(is_to_host=False):
        pass
    first, last = marks.points(range(num_levels))
    with clock.rounds(num_levels) as timers:
        rounds.record(first)
        for level in range(num_levels):
            if level:
                marks.between(level)
            marks.before_select(level)
            marks.after_select(level)
        rounds.record(last)
        timers.append(rounds)
    with clock.copying(is_to_host=True):
        pass
    device.record_event().wait()
    return clock.read()


def captured(engine: Engine, num_requests: int) -> tuple[Any, ...]:
    """The arguments that the engine counts its largest batch of so many requests with."""
    found: list[tuple[Any, ...]] = []
    totals: Totals = engine._totals
    add = totals.add
    totals.add = lambda *arguments: found.append(arguments)  # type: ignore[method-assign]
    asker(engine, num_requests, 20)()
    totals.add = add  # type: ignore[method-assign]
    return max(found, key=lambda arguments: arguments[0].num_histories)


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
