"""The batches that are issued and not complete, oldest first. They end in the order in which they were issued."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from xgr_runtime.xschedule.request import RequestState
from xgr_runtime.xschedule.scheduler import Scheduled
from xgr_runtime.xschedule.worker import PendingBatch


@dataclass(frozen=True)
class Issued:
    """A batch on its way. start_s: when its issue began, of time.monotonic(). num_captures: of all graphs at that moment."""

    scheduled: Scheduled
    pending: PendingBatch
    start_s: float
    num_captures: int


class InFlight:
    """A queue of at most `most` batches. Belongs to the thread that issues them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._issued: deque[Issued] = deque()

    def __len__(self) -> int:
        return len(self._issued)

    def add(self, issued: Issued) -> None:
        """The newest one."""
        assert len(self._issued) < self._most, self._most
        self._issued.append(issued)

    @property
    def oldest(self) -> Issued:
        """The one that ends next; there is one."""
        return self._issued[0]

    def take(self) -> Issued:
        """The oldest one, whether it is done or not."""
        return self._issued.popleft()

    def take_finished(self) -> Iterator[Issued]:
        """Those that are done, and the oldest one where nothing else fits beside it."""
        while self._issued and (
            len(self._issued) == self._most or self._issued[0].pending.is_done()
        ):
            yield self._issued.popleft()


class Running:
    """The requests of all batches from their scheduling to their end. The caller serialises all calls."""

    def __init__(self) -> None:
        self._batches: dict[int, tuple[RequestState, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, scheduled: Scheduled) -> None:
        """The requests of a batch run."""
        self._batches[scheduled.batch.batch_id] = scheduled.states

    def remove(self, scheduled: Scheduled) -> None:
        """The requests of a batch have ended."""
        del self._batches[scheduled.batch.batch_id]

    def take_all(self) -> list[RequestState]:
        """Forget all of them; the caller fails their futures."""
        states = self.states
        self._batches.clear()
        return states

    @property
    def states(self) -> list[RequestState]:
        """All requests."""
        return [state for states in self._batches.values() for state in states]

    @property
    def num_rows(self) -> int:
        """Beam rows of the largest batch: batches have the device's rows one after the other."""
        rows = (sum(state.num_rows for state in states) for states in self._batches.values())
        return max(rows, default=0)
