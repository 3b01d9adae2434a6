"""How long the stages of a batch take on the device, read once, after the batch's one wait.

The borders of a stage are points of a device timer: on the CPU the time of the call, on a GPU events of a lane, which
are nodes of the captured graph where the stage lies inside one. So the host reads nothing and waits for nothing between
the segments. Borders of segments are recorded outside of graphs; a device that cannot time inside of them (an Ascend NPU)
does not know how long the selections in them take. Where the host issues work faster than the device does it, the stages of
a batch follow each other without a gap; where it does not, the device's waiting is part of no stage.

A batch records the borders of its prefill and of each group's rounds in a timer of its own, which is always right; of a
batch that captured a graph in between, that includes the capture. What lies inside the rounds is recorded by timers of
their segments. A captured graph has one timer, whose points every replay records anew: with several batches in flight the
next one may have replayed the graph before this one's times are read, and what only that timer knew is then unknown.

A device that is idle waits for each point that the host records before the first work. So where a prefill follows the copy
of its inputs on the same lane, with nothing in between, the end of the one is the beginning of the other.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from xgr_runtime.hal.device import Device, Timer
from xgr_runtime.xschedule.stage_times import StageTimes

# How many points of the rounds' timer belong to a round: before the round, before its selection, after its selection.
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


@dataclass
class TimerUses:
    """Which batch has recorded into a timer last, over all batches in flight."""

    last: "WeakKeyDictionary[Timer, int]" = field(default_factory=WeakKeyDictionary)
    num_batches: int = 0

    def forget(self) -> None:
        """Nobody knows who recorded last: a batch has failed half-way."""
        self.last.clear()


@dataclass(frozen=True)
class _Rounds:
    """The rounds of a group. place: of its first border among the points of the batch's own timer."""

    timers: Sequence[Timer]
    num_levels: int
    place: int


class StageClock:
    """Collects what one batch at a time records. `start`, then the stages in any order, then `read`.

    uses: shared with the clocks of the other batches in flight.
    """

    def __init__(self, device: Device, uses: TimerUses | None = None) -> None:
        self._timer = device.timer()
        self._uses = uses or TimerUses()
        self.start()

    def start(self) -> None:
        """Begin a batch; what an earlier, failed one left is forgotten."""
        self._copies: list[tuple[bool, int]] = []
        self._num_points = 0
        self._prefill: int | None = None
        self._rounds: list[_Rounds] = []
        self._uses.num_batches += 1
        self._batch = self._uses.num_batches

    @contextmanager
    def copying(self, *, is_to_host: bool) -> Iterator[None]:
        """Brackets the issue of copies, on the lane that they are issued on."""
        with self._bracket() as place:
            yield
        self._copies.append((is_to_host, place))

    @contextmanager
    def prefill(self, *, is_next: bool = False) -> Iterator[None]:
        """Brackets the prefill. is_next: nothing was issued since the copies before, which were issued on its lane."""
        with self._bracket(is_next=is_next) as place:
            yield
        self._prefill = place

    @contextmanager
    def rounds(self, num_levels: int) -> Iterator[list[Timer]]:
        """Brackets the rounds of the next group; into the list goes one timer of all rounds, or one a round."""
        timers: list[Timer] = []
        with self._bracket() as place:
            yield timers
        assert len(timers) in (1, num_levels), (len(timers), num_levels)
        for timer in timers:
            self._uses.last[timer] = self._batch
        self._rounds.append(_Rounds(timers, num_levels, place))

    @contextmanager
    def _bracket(self, *, is_next: bool = False) -> Iterator[int]:
        """is_next: begins at the last point that there is."""
        place = self._num_points - is_next
        self._num_points = place + 2
        if not is_next:
            self._timer.record(place)
        yield place
        self._timer.record(place + 1)

    def read(self) -> StageTimes:
        """The times of the batch; only when the device has done all of it."""
        copies_s = [0.0, 0.0]
        for is_to_host, place in self._copies:
            copies_s[is_to_host] += self._between(place)
        rounds_s = tuple(self._levels(part, 0, POINTS_OF_ROUND) for part in self._rounds)
        return StageTimes(
            to_device_s=copies_s[False],
            prefill_s=0.0 if self._prefill is None else self._between(self._prefill),
            rounds_s=tuple(tuple(map(_known, levels)) for levels in rounds_s),
            selects_s=tuple(tuple(map(_known, self._levels(part, 1, 2))) for part in self._rounds),
            to_host_s=copies_s[True],
            span_s=self._timer.seconds(0, self._num_points - 1) if self._num_points else 0.0,
            all_rounds_s=tuple(map(self._whole, self._rounds, rounds_s)),
        )

    def _between(self, place: int) -> float:
        """Inside a bracket."""
        return self._timer.seconds(place, place + 1)

    def _is_known(self, part: _Rounds) -> bool:
        """Whether no later batch has recorded into the timers of a part."""
        return all(self._uses.last.get(timer) == self._batch for timer in part.timers)

    def _whole(self, part: _Rounds, levels: tuple[float | None, ...]) -> float:
        """All rounds of a part; levels: each of them."""
        found = [seconds for seconds in levels if seconds is not None]
        return sum(found) if len(found) == part.num_levels else self._between(part.place)

    def _levels(self, part: _Rounds, start: int, end: int) -> tuple[float | None, ...]:
        """Between two points of each round of a part; None where others have recorded into its timers since."""
        if not self._is_known(part):
            return (None,) * part.num_levels
        return _read(part, start, end)


def _read(part: _Rounds, start: int, end: int) -> tuple[float, ...]:
    firsts = [POINTS_OF_ROUND * level for level in range(part.num_levels)]
    timers = part.timers if len(part.timers) == len(firsts) else [part.timers[0]] * len(firsts)
    return tuple(
        timer.seconds(first + start, first + end)
        for timer, first in zip(timers, firsts, strict=True)
    )


def _known(seconds: float | None) -> float | None:
    """None also for what the device cannot tell."""
    return None if seconds is None or math.isnan(seconds) else seconds
