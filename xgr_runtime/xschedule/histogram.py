"""Distributions as counts between fixed bounds: small, cheap to add to, and what metrics export.

The bounds of the three kinds stand here, because the engine counts into them; what they are called outside is the
service's matter.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

# Seconds of whole requests, queues and batches: dense round 200 ms, where an answer becomes too late to be shown.
REQUEST_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.125, 0.15, 0.16, 0.17, 0.18, 0.19, 0.2,
    0.21, 0.22, 0.23, 0.24, 0.25, 0.275, 0.3, 0.35, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
# Seconds of one stage of a batch: from a kernel's launch to a prefill on a CPU.
STAGE_BOUNDS_S = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02,
    0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
# Numbers of things in a batch.
SIZE_BOUNDS = tuple(float(1 << exponent) for exponent in range(18))


@dataclass
class Histogram:
    """counts: how many values were at most the bound and above the one before; the last counts what is above all."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> "Histogram":
        """As it is now; it does not change with the original."""
        return Histogram(self.bounds, self.counts.copy(), self.sum)
