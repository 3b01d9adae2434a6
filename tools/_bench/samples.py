"""Moments and what was seen at them, by one thread of a benchmark, and which of them fall into given spans of time."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LAST_SAMPLE_S = 60.0


@dataclass
class Samples:
    """Moments (seconds) and what was seen at them (milliseconds); written by one thread."""

    at_s: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    has_ended: bool = False

    @contextmanager
    def taking(self) -> Iterator[None]:
        """What the thread does; afterwards, however it ended, nothing more comes."""
        try:
            yield
        finally:
            self.has_ended = True

    def add(self, start_s: float, value_ms: float) -> None:
        self.at_s.append(start_s)
        self.ms.append(value_ms)

    def summary(self, is_inside: Sequence[bool] | np.ndarray[Any, Any]) -> dict[str, float | None]:
        """Percentiles of the chosen samples; None of none."""
        chosen = np.asarray(self.ms)[np.asarray(is_inside, bool)]
        if not len(chosen):
            return {"p50_ms": None, "p99_ms": None, "p999_ms": None, "max_ms": None, "num": 0}
        p50, p99, p999, most = np.percentile(chosen, [50, 99, 99.9, 100]).round(3).tolist()
        return {"p50_ms": p50, "p99_ms": p99, "p999_ms": p999, "max_ms": most, "num": len(chosen)}


def wait_past(moment_s: float, *all_samples: Samples) -> None:
    """Until each has a sample that began after a moment: what ran at it has ended, and was noted.

    Raises RuntimeError when a thread has ended instead, TimeoutError when it seems stuck.
    """
    end_s = time.perf_counter() + LAST_SAMPLE_S
    while not all(samples.at_s and samples.at_s[-1] > moment_s for samples in all_samples):
        if any(samples.has_ended for samples in all_samples):
            raise RuntimeError("a thread of the benchmark has ended before its time")
        if time.perf_counter() > end_s:
            raise TimeoutError(f"no sample began and ended in {LAST_SAMPLE_S:.0f} s")
        time.sleep(1e-3)


def overlap(
    start_s: np.ndarray[Any, Any], end_s: np.ndarray[Any, Any], spans: Sequence[tuple[float, float]]
) -> np.ndarray[Any, Any]:
    """Which samples overlap one of the spans."""
    result = np.zeros(len(start_s), bool)
    for first, last in spans:
        result |= (end_s >= first) & (start_s <= last)
    return result


def by_span(
    samples: Samples,
    changes: Sequence[tuple[float, float]],
    pauses: Sequence[tuple[float, float]],
    warmup_s: float,
) -> dict[str, dict[str, float | None]]:
    """Summaries of what overlaps a change, and of what does not; what overlaps a pause belongs to neither. Seconds.

    What began within `warmup_s` of the first sample is not idle: the process still warms up.
    """
    start = np.asarray(samples.at_s)
    end = start + np.asarray(samples.ms) / 1e3
    in_change, in_pause = overlap(start, end, changes), overlap(start, end, pauses)
    is_late = start > start[0] + warmup_s
    return {
        "idle": samples.summary(~in_change & ~in_pause & is_late),
        "during_change": samples.summary(in_change & ~in_pause),
    }
