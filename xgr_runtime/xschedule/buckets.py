"""Static sizes of a batch. Where graphs are captured they come from a ladder (`xschedule.ladder`); elsewhere they fit closely.

The prefill and each group's rounds have buckets of their own, so that one prefill graph serves whatever widths follow.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from xgr_runtime.xschedule.batch import Batch, PackedHistories, SearchGroup
from xgr_runtime.xschedule.capacities import Capacities


@dataclass(frozen=True)
class SharedBucket:
    """Padded sizes of the histories' pages: what the rounds see of the prefill. num_pages is per history."""

    num_histories: int
    max_kv: int
    num_pages: int


@dataclass(frozen=True)
class PrefillBucket:
    """Padded sizes of the histories of a batch. max_q: most new tokens of one history, max_kv with the cached ones.

    max_kv is at least that of `shared`: lengths of a history matter less to a prefill than to the rounds.
    """

    num_tokens: int
    max_q: int
    max_kv: int
    shared: SharedBucket


@dataclass(frozen=True)
class RoundsBucket:
    """Padded sizes of one group; rows has one entry per round, max_rows the most rows of one history in it."""

    num_searches: int
    rows: tuple[int, ...]
    max_rows: tuple[int, ...]

    def read_by(self, rounds: range) -> tuple[int | tuple[int, ...], ...]:
        """What of the bucket those rounds depend on: a graph of some rounds serves every bucket that agrees in it.

        A round reads the rows before it and its own; the last one moves no KV, hence the number of rounds.
        """
        first = max(0, rounds.start - 1)
        own = slice(first, rounds.stop)
        return (len(self.rows), self.num_searches, self.rows[own], self.max_rows[own])


@dataclass(frozen=True)
class BatchBuckets:
    """The buckets that hold a batch: its histories, and each of its groups."""

    prefill: PrefillBucket
    groups: tuple[RoundsBucket, ...]


class Sizes(Protocol):
    """The rule by which batches are padded."""

    def of(self, batch: Batch) -> BatchBuckets:
        """The buckets that hold `batch`; every batch within the capacities has some."""
        ...

    def padded_histories(self, num_histories: int) -> int:
        """How many histories a batch of so many is padded to, where no history has several searches."""
        ...

    def describe(self) -> dict[str, Any]:
        """The list of sizes for people; nothing where there is no list."""
        ...


@dataclass(frozen=True)
class HostLengths:
    """Lengths of a batch's histories as the host knows them, padded to the bucket; see `hal.ops.attention`.

    q_starts: [H + 1], where each history's new tokens start. kv_lens: [H], its tokens, cached ones included.
    """

    q_starts: tuple[int, ...]
    kv_lens: tuple[int, ...]


def host_lengths_of(histories: PackedHistories, bucket: SharedBucket) -> HostLengths:
    """The lengths of `histories`; padding histories have no tokens."""
    starts, lengths = histories.q_start_H1.tolist(), histories.kv_lens_H.tolist()
    num_padding = bucket.num_histories - histories.num_histories
    return HostLengths((*starts, *starts[-1:] * num_padding), (*lengths, *[0] * num_padding))


def most_rows_L(group: SearchGroup) -> list[int]:  # noqa: N802 - the suffix is its shape
    """Per round the rows of the history that has most of them."""
    owners = group.history_of_S
    if len(owners) == 1 or (owners[1:] > owners[:-1]).all():  # a search each, as is usual
        return [int(n) for n in group.widths_SL.max(axis=0)]
    return [
        int(np.bincount(group.history_of_S, weights=widths).max()) for widths in group.widths_SL.T
    ]


def round_up(size: int, capacity: int, step: int = 8) -> int:
    """The next multiple of `step`, at most `capacity`."""
    return min(capacity, -(-size // step) * step)


@dataclass(frozen=True)
class CloseFit:
    """Where nothing is captured: multiples of eight, so that shapes repeat, and powers of two of histories and searches."""

    capacities: Capacities

    def of(self, batch: Batch) -> BatchBuckets:
        """The buckets that hold `batch`."""
        c, histories = self.capacities, batch.histories
        max_kv = round_up(int(histories.kv_lens_H.max()), c.max_history_tokens)
        shared = SharedBucket(
            num_histories=self.padded_histories(histories.num_histories),
            max_kv=max_kv,
            num_pages=_power_of_two(histories.page_table_HP.shape[1], c.num_pages_per_history),
        )
        prefill = close_prefill_bucket(histories, c, shared)
        return BatchBuckets(prefill, tuple(self._group(group) for group in batch.groups))

    def padded_histories(self, num_histories: int) -> int:
        """The next power of two, at most as many as a batch may have."""
        return _power_of_two(num_histories, self.capacities.num_histories)

    def describe(self) -> dict[str, Any]:
        """Any size may come."""
        return {}

    def _group(self, group: SearchGroup) -> RoundsBucket:
        c = self.capacities
        totals = group.widths_SL.sum(axis=0).tolist()
        return RoundsBucket(
            num_searches=_power_of_two(group.num_searches, c.num_searches),
            rows=tuple(round_up(n, c.num_rows) for n in totals),
            max_rows=tuple(round_up(n, c.num_rows) for n in most_rows_L(group)),
        )


def close_prefill_bucket(
    histories: PackedHistories, capacities: Capacities, shared: SharedBucket
) -> PrefillBucket:
    """The bucket of a prefill that is not captured."""
    return PrefillBucket(
        num_tokens=round_up(histories.num_scheduled_tokens, capacities.num_tokens),
        max_q=round_up(int(np.diff(histories.q_start_H1).max()), shared.max_kv),
        max_kv=shared.max_kv,
        shared=shared,
    )


def _power_of_two(size: int, capacity: int) -> int:
    return min(capacity, 1 << (size - 1).bit_length())
