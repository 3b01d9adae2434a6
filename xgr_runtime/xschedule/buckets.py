"""Static sizes of a batch. A captured graph exists per bucket; a device that captures nothing pads only a little.

The prefill and each group's rounds have buckets of their own, so that one prefill graph serves whatever widths follow.
"""

from dataclasses import dataclass

import numpy as np

from xgr_runtime.xschedule.batch import PackedHistories, SearchGroup
from xgr_runtime.xschedule.capacities import Capacities


@dataclass(frozen=True)
class SharedBucket:
    """Padded sizes of the histories' pages: what the rounds see of the prefill. num_pages is per history."""

    num_histories: int
    max_kv: int
    num_pages: int


@dataclass(frozen=True)
class PrefillBucket:
    """Padded sizes of the histories of a batch. max_q: most new tokens of one history, max_kv with the cached ones."""

    num_tokens: int
    max_q: int
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


def round_up(size: int, capacity: int, *, is_coarse: bool) -> int:
    """The bucket of `size`: the next of four steps an octave (coarse), or the next multiple of 8, at most `capacity`."""
    step = 8
    if is_coarse and size > 32:
        step = 1 << max(3, (size - 1).bit_length() - 3)
    return min(capacity, -(-size // step) * step)


def prefill_bucket_of(
    histories: PackedHistories,
    capacities: Capacities,
    *,
    is_coarse: bool,
    is_prefill_coarse: bool,
) -> PrefillBucket:
    """The bucket that holds `histories`.

    is_coarse: whether the rounds are captured. is_prefill_coarse: whether the prefill is too. Where only the rounds are, there
    is a graph a round, of which there must be few, and kernels are told the lengths: max_kv has the classes of the pages.
    """
    c = capacities
    longest = int(histories.kv_lens_H.max())
    if is_coarse and not is_prefill_coarse:
        max_kv = _power_of_two(longest, c.max_history_tokens)
    else:
        max_kv = round_up(longest, c.max_history_tokens, is_coarse=is_coarse)
    return PrefillBucket(
        num_tokens=round_up(len(histories.token_ids_T), c.num_tokens, is_coarse=is_prefill_coarse),
        max_q=_max_q(int(np.diff(histories.q_start_H1).max()), max_kv, is_coarse=is_prefill_coarse),
        shared=SharedBucket(
            num_histories=_power_of_two(histories.num_histories, c.num_histories),
            max_kv=max_kv,
            num_pages=_power_of_two(histories.page_table_HP.shape[1], c.num_pages_per_history),
        ),
    )


def rounds_bucket_of(
    group: SearchGroup, capacities: Capacities, *, is_coarse: bool
) -> RoundsBucket:
    """The bucket that holds `group`."""
    c = capacities
    totals = group.widths_SL.sum(axis=0)
    largest = [np.bincount(group.history_of_S, weights=w).max() for w in group.widths_SL.T]
    return RoundsBucket(
        num_searches=_power_of_two(group.num_searches, c.num_searches),
        rows=tuple(round_up(int(n), c.num_rows, is_coarse=is_coarse) for n in totals),
        max_rows=tuple(round_up(int(n), c.num_rows, is_coarse=is_coarse) for n in largest),
    )


def _max_q(longest: int, max_kv: int, *, is_coarse: bool) -> int:
    """Where graphs are captured, few classes: all of a history new (or more than half of it), or a power of two."""
    if not is_coarse:
        return round_up(longest, max_kv, is_coarse=False)
    return max_kv if 2 * longest > max_kv else _power_of_two(max(8, longest), max_kv)


def _power_of_two(size: int, capacity: int) -> int:
    return min(capacity, 1 << (size - 1).bit_length())
