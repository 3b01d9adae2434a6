"""Time of a call on the device: replays of a graph that holds it several times, each time with other inputs.

The inputs of one replay together are larger than the last-level cache, so that none is read out of it. A call that cannot be
captured is timed between events, launches included; on a CPU the clock is read round each call.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tools._bench.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xgr_runtime.hal.device import Device

ROTATED_BYTES = 160e6  # three times the 50 MB of an H200
MOST_SETS = 24
WARMUP_S = 0.02
LONGEST_S = 0.3


@dataclass(frozen=True)
class OpTiming:
    """Of one call. timed_by: replay, events or clock. sets: of inputs that take turns."""

    timing: Timing
    timed_by: str
    sets: int


def num_sets(num_bytes: float, *, is_tiny: bool) -> int:
    """Sets of inputs of so many bytes that exceed the cache together."""
    return 1 if is_tiny else int(max(1, min(MOST_SETS, -(-ROTATED_BYTES // max(1.0, num_bytes)))))


def time_calls(device: Device, calls: Sequence[Callable[[], object]], runs: int) -> OpTiming:
    """Each run makes every call once."""
    if device.kind != "cuda":
        return OpTiming(Timing.of(_by_clock(calls, runs)), "clock", len(calls))
    for call in calls:
        call()
    torch.cuda.synchronize()
    try:
        replay, how = _captured(calls), "replay"
    except RuntimeError:
        torch.cuda.synchronize()
        replay, how = (lambda: [call() for call in calls]), "events"
    times = _between_events(replay, runs)
    return OpTiming(Timing.of([ms / len(calls) for ms in times]), how, len(calls))


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def _between_events(run: Callable[[], object], runs: int) -> list[float]:
    end_s = time.perf_counter() + WARMUP_S
    while time.perf_counter() < end_s:
        run()
        torch.cuda.synchronize()
    times: list[float] = []
    end_s = time.perf_counter() + LONGEST_S
    while len(times) < runs and (len(times) < 5 or time.perf_counter() < end_s):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)))
    return times


def _by_clock(calls: Sequence[Callable[[], object]], runs: int) -> list[float]:
    times = []
    for number in range(runs + 1):
        start = time.perf_counter()
        for call in calls:
            call()
        if number:
            times.append((time.perf_counter() - start) * 1e3 / len(calls))
    return times
