"""When the device will have done what it was given: batches of about the same sizes take about the same time."""

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from xgr_runtime.xschedule.batch import Batch
from xgr_runtime.xschedule.stage_times import StageTimes

LEAD_S = 1e-3  # what a host takes at most to schedule and issue a batch
_RECENT = 0.3  # weight of the last batch in the usual time of its sizes
_MOST_SIZES = 1024


@dataclass
class Forecast:
    """Told of every batch that is issued and ended, in that order. Times of time.monotonic()."""

    _usual_s: dict[Hashable, float] = field(default_factory=dict)
    _sizes: "deque[Hashable]" = field(default_factory=deque)
    _begun_s: float = 0.0

    def forget(self) -> None:
        """Know no usual time any more; while nothing is on the way."""
        self._usual_s.clear()

    def issued(self, batch: Batch, now: float) -> None:
        """A batch has been given to the device, behind those before."""
        if not self._sizes:
            self._begun_s = now
        self._sizes.append(_sizes_of(batch))

    def ended(self, now: float, times: StageTimes | None) -> None:
        """The oldest batch has ended. times: None where they say nothing about others, as of one that failed."""
        sizes = self._sizes.popleft()
        self._begun_s = now
        if times is None:
            return
        seconds = times.prefill_s + sum(times.all_rounds_s)
        if not math.isfinite(
            seconds
        ):  # a device that cannot tell: no number would follow from it any more
            return
        usual_s = self._usual_s.get(sizes, seconds)
        if sizes not in self._usual_s and len(self._usual_s) >= _MOST_SIZES:
            self._usual_s.clear()
        self._usual_s[sizes] = usual_s + _RECENT * (seconds - usual_s)

    def end_s(self) -> float:
        """When everything that was issued is done, as far as is known: of sizes that never ran it is not."""
        return self._begun_s + sum(self._usual_s.get(sizes, 0.0) for sizes in self._sizes)

    def oldest_end_s(self) -> float:
        """When the oldest one is."""
        return self._begun_s + self._usual_s.get(self._sizes[0], 0.0)


def _sizes_of(batch: Batch) -> Hashable:
    histories = batch.histories
    return (
        histories.num_histories,
        histories.num_scheduled_tokens >> 8,
        histories.num_prompt_tokens >> 9,
        *(int(group.widths_SL.sum()) >> 7 for group in batch.groups),
    )
