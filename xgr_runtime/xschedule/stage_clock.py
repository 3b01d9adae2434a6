"""How long the stages of a batch take on the device, read once, after the batch's one wait.

The borders of a stage are points of a device timer: on the CPU the time of the call, on a GPU events of the stream, which
are nodes of the captured graph where the stage lies inside one. So the host reads nothing and waits for nothing between
the segments. Borders of segments are recorded outside of graphs; a device that cannot time inside of them (an Ascend NPU)
does not know how long the selections in them take. Where the host issues work faster than the device does it, the stages of a batch follow each other without a
gap; where it does not, the device's waiting is part of no stage.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from xgr_runtime.hal.device import Device, Timer
from xgr_runtime.xschedule.stage_times import StageTimes

# Points of the prefill's timer (first, last), and how many of the rounds' timer belong to a round: before the round, before
# its selection, after its selection.
PREFILL_POINTS = (0, 1)
POINTS_OF_ROUND = 3


class RoundMarks:
    """Records the points inside one segment of rounds; its first and its last are recorded by who runs the segment."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer

    def points(self, levels: range) -> tuple[int, int]:
        """The first and the last point of a segment of those rounds."""
        return POINTS_OF_ROUND * levels.start, POINTS_OF_ROUND * levels.stop

    def between(self, level: int) -> None:
        """Before a round that is not the segment's first."""
        self.timer.record(POINTS_OF_ROUND * level)

    def before_select(self, level: int) -> None:
        self.timer.record(POINTS_OF_ROUND * level + 1)

    def after_select(self, level: int) -> None:
        self.timer.record(POINTS_OF_ROUND * level + 2)


class StageClock:
    """Collects what one batch at a time records. `start`, then the stages in any order, then `read`."""

    def __init__(self, device: Device) -> None:
        self._timer = device.timer()
        self.start()

    def start(self) -> None:
        """Begin a batch; what an earlier, failed one left is forgotten."""
        self._copies: list[bool] = []
        self._prefill: Sequence[Timer] = ()
        self._rounds: list[tuple[Sequence[Timer], int]] = []

    @contextmanager
    def copying(self, *, is_to_host: bool) -> Iterator[None]:
        """Brackets the issue of copies."""
        point = 2 * len(self._copies)
        self._timer.record(point)
        yield
        self._timer.record(point + 1)
        self._copies.append(is_to_host)

    def add_prefill(self, timers: Sequence[Timer]) -> None:
        """The timers that the prefill's segments record into."""
        self._prefill = timers

    def add_rounds(self, timers: Sequence[Timer], num_levels: int) -> None:
        """The timers that the next group's segments record into: one of all rounds, or one a round."""
        assert len(timers) in (1, num_levels), (len(timers), num_levels)
        self._rounds.append((timers, num_levels))

    def read(self) -> StageTimes:
        """The times of the batch; only when the device has done all of it."""
        copies_s = [0.0, 0.0]
        for number, is_to_host in enumerate(self._copies):
            copies_s[is_to_host] += self._timer.seconds(2 * number, 2 * number + 1)
        return StageTimes(
            to_device_s=copies_s[False],
            prefill_s=sum(timer.seconds(*PREFILL_POINTS) for timer in self._prefill),
            rounds_s=tuple(_read(*group, 0, POINTS_OF_ROUND) for group in self._rounds),
            selects_s=tuple(tuple(map(_known, _read(*group, 1, 2))) for group in self._rounds),
            to_host_s=copies_s[True],
            span_s=self._timer.seconds(0, 2 * len(self._copies) - 1) if self._copies else 0.0,
        )


def _read(timers: Sequence[Timer], num_levels: int, start: int, end: int) -> tuple[float, ...]:
    firsts = [POINTS_OF_ROUND * level for level in range(num_levels)]
    of_level = timers if len(timers) == num_levels else [timers[0]] * num_levels
    return tuple(
        timer.seconds(first + start, first + end)
        for timer, first in zip(of_level, firsts, strict=True)
    )


def _known(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds
