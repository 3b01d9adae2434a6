"""The ladder of buckets that graphs are captured for: a short list, fixed when the engine starts.

A batch is padded to the smallest rung that holds it, so that no batch within the limits ever needs a graph that is not
there; where the device had no room for some of the list, or a capture failed, to the smallest one that was captured. What costs time is exact or nearly so: new tokens and rows, which every product runs over. What only bounds a
loop has one size or few, since each size multiplies the graphs: page tables have full width, and new tokens, rows and
tokens of one history are bounded by what there may be at most, as kernels read the true lengths on the device.

All rounds of a group have the rows of its widest level. Where widths are equal, the usual case, nothing is lost; where
they grow from level to level the first rounds run over more rows than they have, which a graph per combination of widths
would avoid and no list of graphs could hold.

Where every round is a graph of its own (an Ascend NPU) graphs are few, and attention pads each history to the one with
most rows: such a ladder has fewer sizes of rows, more of histories, and for each of them rows in nearly equal shares beside
rows in any shares. Its prefill is not captured and fits closely.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar

from xgr_runtime.config import RuntimeConfig
from xgr_runtime.errors import ConfigError
from xgr_runtime.hal.device import Device
from xgr_runtime.types import Normalization
from xgr_runtime.xschedule.batch import Batch, SearchGroup
from xgr_runtime.xschedule.buckets import (
    BatchBuckets,
    PrefillBucket,
    RoundsBucket,
    SharedBucket,
    close_prefill_bucket,
    most_rows_L,
)
from xgr_runtime.xschedule.capacities import Capacities

FIRST_TOKENS, FIRST_ROWS = 128, 64
# New tokens of one history alone: what a user who returns brings, behind tokens that are cached. A decoder treats up to
# `models.decoder.FEW_TOKENS` in a way of their own.
FEW_TOKENS = (32, 64)
# Steps that an octave beyond 512 is cut into: a prefill takes most of the time, and its graphs serve every catalogue.
_TOKEN_STEPS, _ROW_STEPS = 4, 2
_FEW_ROWS = 256  # padding each history to so many costs little
_ALMOST = 0.95  # a size of ours that near below the largest one is left out

_Bucket = TypeVar("_Bucket")


@dataclass(frozen=True)
class Rung:
    """The sizes that exist for batches of up to `num_histories` histories, and as many searches of one group.

    tokens: new tokens, ascending, () where prefills are not captured. rows: (rows of a round, most of them of one
    history), ascending.
    """

    num_histories: int
    tokens: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]


class Captured(Protocol):
    """What graphs there are."""

    def has_prefill(self, bucket: PrefillBucket) -> bool:
        """Whether a prefill of that bucket is replayed, or never would be."""
        ...

    def has_rounds(self, shared: SharedBucket, group: SearchGroup, bucket: RoundsBucket) -> bool:
        """Whether all rounds of a group are."""
        ...


@dataclass(frozen=True)
class Ladder:
    """rungs: by ascending num_histories; the last one holds every batch. history_tokens: bounds of a history's length.

    is_copying: whether cached tokens are ever copied, by the graphs of prefills.
    """

    capacities: Capacities
    rungs: tuple[Rung, ...]
    history_tokens: tuple[int, ...]
    is_copying: bool = True

    def of(self, batch: Batch, captured: Captured | None = None) -> BatchBuckets:
        """The smallest buckets that hold `batch`.

        captured: what there are graphs for, None where every bucket is as good. Of the buckets that hold the batch those
        with most parts that have graphs, and the smallest of these: padding costs less than running op by op.
        """
        largest = max(batch.num_histories, *(group.num_searches for group in batch.groups))
        longest = int(batch.histories.kv_lens_H.max())
        needs = [_Need.of(group) for group in batch.groups]
        best, most = None, -1
        for shared, rung in self._all_that_hold(largest, longest):
            prefill = _first(
                self._prefills(rung, shared, batch), captured.has_prefill if captured else None
            )
            groups = [
                _first(
                    need.buckets(rung),
                    partial(captured.has_rounds, shared, need.group) if captured else None,
                )
                for need in needs
            ]
            found = [one for one in groups if one is not None]
            if prefill is None or len(found) < len(groups):
                continue
            number = prefill[1] + sum(has_graph for _, has_graph in found)
            if number > most:
                best, most = BatchBuckets(prefill[0], tuple(one for one, _ in found)), number
            if most == 1 + len(found):
                break
        if best is None:
            raise AssertionError(f"no bucket holds batch {batch.batch_id}: it is beyond the limits")
        return best

    def _all_that_hold(self, largest: int, longest: int) -> Iterator[tuple[SharedBucket, Rung]]:
        """By ascending sizes, what holds so many histories of so many tokens."""
        for rung in self.rungs:
            if rung.num_histories >= largest:
                for shared in self._all_shared(rung):
                    if shared.max_kv >= longest:
                        yield shared, rung

    def padded_histories(self, num_histories: int) -> int:
        """The histories of the rung that holds so many; as many where none does."""
        sizes = [r.num_histories for r in self.rungs if r.num_histories >= num_histories]
        return min(sizes, default=num_histories)

    def prefills(self) -> Iterator[PrefillBucket]:
        """Every bucket that a prefill is captured for, the one that holds every batch last."""
        for rung in self.rungs:
            for num_tokens in rung.tokens:
                for shared in self._all_shared(rung)[-1:]:
                    yield self._prefill_bucket(num_tokens, shared)

    def rounds(self, num_levels: int) -> Iterator[tuple[SharedBucket, RoundsBucket]]:
        """Every bucket that rounds over a catalogue of so many levels are captured for, the one that holds every batch last."""
        for rung in self.rungs:
            for shared in self._all_shared(rung):
                for rows, max_rows in rung.rows:
                    yield shared, _rounds_bucket(rung.num_histories, rows, max_rows, num_levels)

    def describe(self) -> dict[str, Any]:
        """The list for people: by the most histories of a batch, its sizes of new tokens and of rows."""
        return {
            "history_tokens": list(self.history_tokens),
            "histories": {
                rung.num_histories: {
                    "tokens": list(rung.tokens),
                    "rows": [
                        rows if rows == most else f"{rows}, up to {most} of one history"
                        for rows, most in rung.rows
                    ],
                }
                for rung in self.rungs
            },
        }

    def _all_shared(self, rung: Rung) -> tuple[SharedBucket, ...]:
        num_pages = self.capacities.num_pages_per_history
        return _shared_buckets(rung.num_histories, self.history_tokens, num_pages)

    def _prefills(self, rung: Rung, shared: SharedBucket, batch: Batch) -> Iterator[PrefillBucket]:
        """Those that hold a batch, ascending."""
        if not rung.tokens:
            yield close_prefill_bucket(batch.histories, self.capacities, shared)
        needed = batch.histories.num_scheduled_tokens
        for size in rung.tokens:
            if size >= needed:
                yield self._prefill_bucket(size, shared)

    def _prefill_bucket(self, num_tokens: int, shared: SharedBucket) -> PrefillBucket:
        return _prefill_bucket(num_tokens, self.capacities.max_history_tokens, shared)


@dataclass(frozen=True)
class _Need:
    """rows: of the widest level of a group. most: of one history."""

    group: SearchGroup
    rows: int
    most: int

    @classmethod
    def of(cls, group: SearchGroup) -> "_Need":
        return cls(group, int(group.widths_SL.sum(axis=0).max()), max(most_rows_L(group)))

    def buckets(self, rung: Rung) -> Iterator[RoundsBucket]:
        """Those of a rung that hold the group, ascending."""
        for rows, max_rows in rung.rows:
            if rows >= self.rows and max_rows >= self.most:
                yield _rounds_bucket(rung.num_histories, rows, max_rows, self.group.num_levels)


def _first(
    sizes: Iterator[_Bucket], has_graph: Callable[[_Bucket], bool] | None
) -> tuple[_Bucket, bool] | None:
    """The smallest bucket that has a graph, else the smallest; whether it has one. None where there is none."""
    smallest: _Bucket | None = None
    for one in sizes:
        if has_graph is None or has_graph(one):
            return one, True
        smallest = smallest or one
    return None if smallest is None else (smallest, False)


# Kept: buckets are few, and one is looked for while the device waits.


@lru_cache(1024)
def _shared_buckets(
    num_histories: int, history_tokens: tuple[int, ...], num_pages: int
) -> tuple[SharedBucket, ...]:
    return tuple(SharedBucket(num_histories, size, num_pages) for size in history_tokens)


@lru_cache(1024)
def _prefill_bucket(num_tokens: int, longest: int, shared: SharedBucket) -> PrefillBucket:
    return PrefillBucket(num_tokens, min(num_tokens, longest), longest, shared)


@lru_cache(1024)
def _rounds_bucket(num_searches: int, rows: int, max_rows: int, num_levels: int) -> RoundsBucket:
    return RoundsBucket(num_searches, (rows,) * num_levels, (max_rows,) * num_levels)


def ladder_of(config: RuntimeConfig, capacities: Capacities, device: Device) -> Ladder:
    """The ladder of a configuration on a device that captures.

    Sizes that `buckets` leaves open are as many as fit the graphs that the device may hold: for the catalogues of the
    configuration, two versions of each, and its normalisations. Raises ConfigError when the sizes that it names do not fit.
    Graphs that are captured when they are needed make room for one another, so these always fit.
    """
    options, c = config.buckets, capacities
    history_tokens = (*options.history_tokens, c.max_history_tokens)
    history_tokens = tuple(sorted(set(history_tokens)))
    num_targets = len(captured_normalizations(config)) * max(1, len(config.catalogs))
    num_targets *= min(2, config.cache.catalog_slots)
    # A page of one token is never found in part, and the last token of a prompt is always computed.
    is_copying = config.cache.prefix_cache and config.cache.page_size_tokens > 1
    is_copying = is_copying and c.max_history_tokens > 1
    num_parts = capacities.num_levels if device.is_graph_per_round else 1
    found: Ladder | None = None
    for histories, rows in _choices(config, capacities, device):
        rungs = tuple(_rungs(config, capacities, device, histories, rows))
        found = Ladder(capacities, rungs, history_tokens, is_copying)
        num_graphs = sum(1 for _ in found.prefills())
        num_graphs += num_targets * num_parts * sum(1 for _ in found.rounds(1))
        if num_graphs <= device.max_graphs or not options.at_start:
            return found
    assert found is not None
    if options.rows or options.histories or options.tokens or options.history_tokens:
        raise ConfigError(
            f"the sizes of buckets need {num_graphs} graphs, and {device.name} holds at most {device.max_graphs}; shorten "
            "buckets.rows, buckets.histories, buckets.tokens, buckets.history_tokens or buckets.normalizations"
        )
    return found


def captured_normalizations(config: RuntimeConfig) -> tuple[Normalization, ...]:
    """Those that graphs are captured for, the one of requests that name none first."""
    return tuple(dict.fromkeys((config.search.normalization, *config.buckets.normalizations)))


def _choices(
    config: RuntimeConfig, capacities: Capacities, device: Device
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(sizes of histories, sizes of rows), the most sizes first; what the configuration names is in all of them."""
    c, options = capacities, config.buckets
    wide = _by_factor(1, c.num_histories, 4 if device.is_graph_per_round else 8)
    narrow = tuple(sorted({1, c.num_histories}))
    rows = [_by_factor(FIRST_ROWS, c.num_rows, factor) for factor in (2, 4)]
    if not device.is_graph_per_round:
        rows.insert(0, _by_octave(FIRST_ROWS, c.num_rows, _ROW_STEPS))
    few = [_by_factor(FIRST_ROWS, c.num_rows, 16), (c.num_rows,)]
    # A batch may have fewer histories than the option says: see `capacities.most_histories`.
    named_histories = (*(n for n in options.histories if n < c.num_histories), c.num_histories)
    named_rows = tuple(sorted({*options.rows, c.num_rows}))
    for histories, sizes in (
        *((wide, sizes) for sizes in rows),
        *((narrow, sizes) for sizes in (*rows, *few)),
        ((c.num_histories,), (c.num_rows,)),
    ):
        yield (
            named_histories if options.histories else histories,
            named_rows if options.rows else sizes,
        )


def _rungs(
    config: RuntimeConfig,
    capacities: Capacities,
    device: Device,
    histories: tuple[int, ...],
    rows: tuple[int, ...],
) -> Iterator[Rung]:
    c, width = capacities, config.limits.max_beam_width
    named = config.buckets.tokens
    several = named or _by_octave(FIRST_TOKENS, c.num_tokens, _TOKEN_STEPS)
    fewer = 0
    for number in histories:
        # A batch of few histories has at most so much; one of more histories than the rung before has at least `fewer`.
        most_tokens = min(c.num_tokens, number * c.max_history_tokens)
        most_rows = min(c.num_rows, number * width)
        tokens = (*FEW_TOKENS, *several) if number == 1 and not named else several
        yield Rung(
            number,
            _within(tokens, fewer, most_tokens, is_named=bool(named))
            if device.is_prefill_captured
            else (),
            tuple(_shares(_within(rows, fewer, most_rows), number, device.is_graph_per_round)),
        )
        fewer = number


def _shares(
    rows: tuple[int, ...], num_histories: int, is_padded_to_longest: bool
) -> Iterator[tuple[int, int]]:
    """(rows, most of one history): of any shares, and where each history is padded to the longest of nearly equal ones too."""
    for size in rows:
        most = -(-2 * size // num_histories)
        if is_padded_to_longest and size > _FEW_ROWS and most < size:
            yield size, most
        yield size, size


def _within(
    sizes: tuple[int, ...], lowest: int, highest: int, *, is_named: bool = False
) -> tuple[int, ...]:
    """Those above `lowest` and clearly below `highest`, which are all below it where the configuration names them, and `highest`."""
    end = highest - 1 if is_named else _ALMOST * highest
    return (*(size for size in sizes if lowest < size <= end), highest)


def _by_factor(first: int, last: int, factor: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def _by_octave(first: int, last: int, steps: int) -> tuple[int, ...]:
    """Powers of two up to 512, then `steps` of equal size an octave."""
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += octave if size < 512 else octave // steps
    return (*sizes, last)
