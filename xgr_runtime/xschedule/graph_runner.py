"""Runs a batch's segments, captured once per bucket where the device can capture.

A `GraphPlan` is the prefill's segment and the rounds of each group. How many segments the rounds of a group are is the
device's choice: a GPU puts all of them into one graph, an Ascend NPU keeps one graph per round. Nothing is read by the
host between segments.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from xgr_runtime.hal.device import Device, Graph, Kernel, Timer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Segment:
    """A function over static buffers. Segments with an equal key are interchangeable.

    timer: what `run` records into, None where nothing is. points: of that timer, the segment's first and last, which the
    runner records; ValueError where there is one of the two alone.
    kv_lens: the histories' lengths, for graphs that are told them at replay. slot_index: the catalogue slot it reads, None
    where it reads none. is_eager: never captured. before_capture: makes what other segments leave for this one harmless to
    read, since a capture may run it before they ran. captured_by: what would have made a graph of it, for a warning.
    """

    name: str
    key: Hashable
    run: Callable[[], None]
    timer: Timer | None = None
    points: tuple[int, int] | None = None
    kv_lens: tuple[int, ...] = ()
    slot_index: int | None = None
    is_eager: bool = False
    before_capture: Callable[[], None] = lambda: None
    captured_by: str = ""

    def __post_init__(self) -> None:
        if (self.timer is None) != (self.points is None):
            raise ValueError(f"{self.name}: a timer and its points belong together")


@dataclass(frozen=True)
class GraphPlan:
    """The segments of a batch: the prefill, then group by group, each with its inputs copied before its rounds.

    copies: of cached pages, before the prefill; None where there are none.
    """

    prefill: Segment
    groups: tuple[tuple[Segment, ...], ...]
    copies: Segment | None = None

    @property
    def before_rounds(self) -> tuple[Segment, ...]:
        """What brings the histories' keys and values."""
        return (self.prefill,) if self.copies is None else (self.copies, self.prefill)


@dataclass(frozen=True)
class _Captured:
    """A graph and the timer of the segment it was made from. Not the segment: that would keep a retired catalogue alive."""

    graph: Graph
    timer: Timer | None
    slot_index: int | None


def _everything(segment: Segment) -> bool:
    return True


class GraphRunner:
    """Keeps the captured graphs of one device.

    While it is open, a segment without a graph is captured, and the least recently used graphs beyond `max_graphs` go.
    Once it is closed, nothing is captured: such a segment runs op by op, on the same addresses and sizes. `run` and what
    opens, closes and finds belong to one thread; `drop_slot` may be called from any.

    num_bytes: of the device's memory that captures have taken, as whoever had them made has counted. dropped_slots: those that
    `make_room` took graphs from, or whose captures failed.

    max_graphs: None for as many as the device allows. is_allowed: whether to capture where the device can.
    """

    def __init__(
        self, device: Device, max_graphs: int | None = None, *, is_allowed: bool = True
    ) -> None:
        self._device = device
        self.max_graphs = device.max_graphs if max_graphs is None else max_graphs
        self.is_capturing = device.is_capturing_supported and is_allowed and self.max_graphs > 0
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._lock = threading.Lock()
        self._wanted: Callable[[Segment], bool] | None = _everything
        self._eager_names: set[str] = set()
        self._found: dict[Kernel, None] | None = None
        self._searched_slots: dict[Hashable, int | None] = {}  # by the segment's key
        self.num_captures = 0
        self.num_eager = 0
        self.num_bytes = 0
        self.dropped_slots: set[int] = set()

    @property
    def num_graphs(self) -> int:
        """How many there are now."""
        return len(self._graphs)

    def close(self) -> None:
        """Capture nothing from now on but in `opened`."""
        self._wanted = None

    @contextmanager
    def opened(self, is_wanted: Callable[[Segment], bool]) -> Iterator[None]:
        """Capture what is wanted and missing while it lasts; between batches."""
        before, self._wanted = self._wanted, is_wanted
        try:
            yield
        finally:
            self._wanted = before

    @contextmanager
    def finding(self, found: dict[Kernel, None]) -> Iterator[None]:
        """While it lasts nothing is run: kernels that segments without a graph have yet to compile go into `found`.

        Each segment is searched once, until `forget_searches`. Between batches.
        """
        self._found = found
        try:
            yield
        finally:
            self._found = None

    def forget_searches(self) -> None:
        """What has been found was not compiled: it is to be found again."""
        with self._lock:
            self._searched_slots.clear()

    @property
    def is_closed(self) -> bool:
        """Whether graphs are replayed and none is captured."""
        return self.is_capturing and self._wanted is None

    def has_all(self, keys: Iterable[Hashable]) -> bool:
        """Whether each of those segments has a graph."""
        with self._lock:
            return all(key in self._graphs for key in keys)

    def run(self, segments: Sequence[Segment]) -> list[Timer]:
        """Run or replay one part of a plan: the prefill, or all rounds of a group. Returns the timers of segments that have one.

        While kernels are searched (`finding`) nothing runs, and the timers are without points.

        A capture may run its segment, and a round moves KV in place: running one twice is not running it once. So all
        missing segments are captured first, and then the whole part is replayed from its start, which resets what its
        rounds change. What the part reads of earlier parts, no segment of it writes.
        """
        if self._found is not None:
            for segment in segments:
                self._find_kernels(segment, self._found)
            return [self._device.timer() for segment in segments if segment.timer is not None]
        found = [
            self._find(segment) if self.is_capturing and not segment.is_eager else None
            for segment in segments
        ]
        timers = []
        for segment, captured in zip(segments, found, strict=True):
            timer = segment.timer if captured is None else captured.timer
            points = segment.points
            with self._device.segment(segment.name):
                if timer is not None and points is not None:
                    timer.record(points[0])
                if captured is None:
                    segment.run()
                else:
                    captured.graph.replay(segment.kv_lens)
                if timer is not None and points is not None:
                    timer.record(points[1])
                    timers.append(timer)
        return timers

    def make_room(self, number: int, keep: Container[int | None]) -> int:
        """Drop graphs of the slots that are not to be kept, least recently used first, to have room for so many; the room."""
        with self._device.sharing(), self._lock:
            latest_first = dict.fromkeys(g.slot_index for g in reversed(self._graphs.values()))
            for slot in reversed(latest_first):
                if self.max_graphs - len(self._graphs) >= number:
                    break
                if slot is None or slot in keep:
                    continue
                for key in [k for k, found in self._graphs.items() if found.slot_index == slot]:
                    del self._graphs[key]
                self.dropped_slots.add(slot)
            return self.max_graphs - len(self._graphs)

    def drop_slot(self, slot_index: int) -> None:
        """Forget the graphs that read a catalogue slot which no longer exists."""
        with self._device.sharing(), self._lock:
            for key in [k for k, found in self._graphs.items() if found.slot_index == slot_index]:
                del self._graphs[key]
            for key in [k for k, slot in self._searched_slots.items() if slot == slot_index]:
                del self._searched_slots[key]
            self.dropped_slots.discard(slot_index)

    def _find(self, segment: Segment) -> _Captured | None:
        with self._lock:
            if segment.key in self._graphs:
                self._graphs.move_to_end(segment.key)
                return self._graphs[segment.key]
        if self._wanted is None:
            self._note_eager(segment)
            return None
        return self._capture(segment) if self._wanted(segment) else None

    def _find_kernels(self, segment: Segment, found: dict[Kernel, None]) -> None:
        if segment.key in self._searched_slots or self.has_all([segment.key]):
            return
        with self._device.segment(segment.name):
            segment.before_capture()
        found.update(dict.fromkeys(self._device.missing_kernels(segment.name, segment.run)))
        with self._lock:
            self._searched_slots[segment.key] = segment.slot_index

    def _capture(self, segment: Segment) -> _Captured:
        with self._device.segment(segment.name):
            segment.before_capture()
        graph = self._device.capture(segment.name, segment.run)
        captured = _Captured(graph, segment.timer, segment.slot_index)
        self.num_captures += 1
        with self._lock:
            while len(self._graphs) >= self.max_graphs:
                self._graphs.popitem(last=False)
            self._graphs[segment.key] = captured
        return captured

    def _note_eager(self, segment: Segment) -> None:
        self.num_eager += 1
        if segment.captured_by not in self._eager_names:
            self._eager_names.add(segment.captured_by)
            logger.warning(
                "%s runs op by op, slower, as no graph was captured for it: %s",
                segment.name,
                segment.captured_by,
            )
