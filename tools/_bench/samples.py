"""Moments and what was seen at them, by one thread of a benchmark, and which of them fall into given spans of time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Samples:
    """Moments (seconds) and what was seen at them (milliseconds); written by one thread."""

    at_s: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)

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


def overlap(
    start_s: np.ndarray[Any, Any], end_s: np.ndarray[Any, Any], spans: Sequence[tuple[float, float]]
) -> np.ndarray[Any, Any]:
    """Which samples overlap one of the spans."""
    result = np.zeros(len(start_s), bool)
    for first, last in spans:
        result |= (end_s >= first) & (start_s <= last)
    return result
