"""Which share of a span of time a GPU worked, from a profile: the union of the intervals of kernels and copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

WORK = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Busy:
    """share of seconds, in which num_intervals began; longest_gap_us without any work."""

    share: float
    seconds: float
    num_intervals: int
    longest_gap_us: float


def busy_share(starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64]) -> Busy:
    """From the first interval's start to the last one's end; intervals may overlap and come in any order."""
    order = np.argsort(starts_ns, kind="stable")
    starts, ends = starts_ns[order], ends_ns[order]
    reached = np.maximum.accumulate(ends)
    gaps = np.maximum(starts[1:] - reached[:-1], 0)
    whole = int(reached[-1] - starts[0])
    return Busy(
        share=round(1 - int(gaps.sum()) / whole, 5),
        seconds=round(whole / 1e9, 4),
        num_intervals=len(starts),
        longest_gap_us=round(int(gaps.max(initial=0)) / 1e3, 1),
    )


def device_intervals(events: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and ends, in nanoseconds, of the kernels and copies among a torch profile's raw events."""
    found = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if _is_work(event)
    ]
    if not found:
        raise SystemExit(f"none of the profile's {len(events)} events is work of a device")
    starts, ends = np.asarray(found, np.int64).T
    return starts, ends


def _is_work(event: Any) -> bool:
    """Annotations span the time of what they annotate, gaps included. Older torch does not name an event's activity."""
    if hasattr(event, "activity_type"):
        return event.activity_type() in WORK
    return event.device_type().name != "CPU" and not event.is_user_annotation()
