"""Captures graphs beside traffic and before it: the whole list when an engine starts, and those of a catalogue's new slot
between batches, before the load of its version returns and anybody can activate it.

A graph is captured by running a batch made up for its bucket, the way every batch runs, while the graph runner is open: so
whatever runs afterwards has run once, and a bucket that cannot run fails here. Where a device compiles kernels, those of the
whole list are compiled before its first capture. The made-up histories
lie in the null page, so that nothing that is cached or searched is touched; only the thread that runs batches may do it, with
no batch on the way. The largest bucket comes first, since all graphs share one pool and a smaller one then fits into what a
larger one needed.

Normalisations that are not listed get no graphs. They run once all the same for each new slot, op by op in the smallest and
in the largest bucket, so that their kernels are compiled before somebody asks for them.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from xgr_runtime.config import RuntimeConfig
from xgr_runtime.errors import DeviceLost
from xgr_runtime.hal.device import Device
from xgr_runtime.kvcache.allocator import NULL_PAGE, num_pages_of
from xgr_runtime.types import NORMALIZATIONS, Normalization
from xgr_runtime.xschedule.batch import (
    Batch,
    PackedHistories,
    RuleRow,
    SearchGroup,
    pack_histories,
)
from xgr_runtime.xschedule.buckets import PrefillBucket, RoundsBucket, SharedBucket
from xgr_runtime.xschedule.catalogs import LoadedCatalog
from xgr_runtime.xschedule.graph_runner import GraphRunner
from xgr_runtime.xschedule.kernel_search import STEP_S, KernelSearch
from xgr_runtime.xschedule.ladder import Ladder, captured_normalizations
from xgr_runtime.xschedule.model_runner import ModelRunner, prefill_key
from xgr_runtime.xschedule.progress import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Missing:
    """One bucket to capture.

    size: tokens or rows. is_last_resort: whether it holds every batch. keys: of the segments that are captured of the batch that
    is run for it.
    """

    name: str
    size: int
    is_last_resort: bool
    keys: tuple[Hashable, ...]
    make_batch: Callable[[], Batch]


@dataclass
class _Ask:
    """Once the running thread has begun: what is missing, what is only run, how far it is, and what the device had taken before.

    search: of the kernels of both, until it is done.
    """

    catalogs: Sequence[LoadedCatalog]
    future: "Future[None]" = field(default_factory=Future)
    missing: deque[Missing] = field(default_factory=deque)
    unlisted: deque[Batch] = field(default_factory=deque)
    has_begun: bool = False
    search: KernelSearch | None = None
    progress: Progress | None = None
    taken_bytes: int = 0


class WarmUp:
    """What is still to be captured, and the steps that do it.

    `ask` and `fail` may be called from any thread; `step` belongs to the one that runs batches. run: runs a batch to its end.
    active_slots: the slots whose graphs never make room for others.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        device: Device,
        run: Callable[[Batch], object],
        runner: ModelRunner,
        graphs: GraphRunner,
        active_slots: Callable[[], set[int]],
    ) -> None:
        self._device, self._run, self._runner, self._graphs = device, run, runner, graphs
        self._active_slots = active_slots
        self._normalizations = captured_normalizations(config)
        self._is_wanted = graphs.is_capturing and config.buckets.at_start
        self._lock = threading.Lock()
        self._asks: deque[_Ask] = deque()
        self._room_lock = threading.Lock()
        self._kept_slots = Counter[int]()  # not active yet
        self._run_slots: set[int] = set()  # whose unlisted normalisations have run

    @property
    def is_pending(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._asks)

    def begin(self, catalogs: Sequence[LoadedCatalog]) -> "Future[None]":
        """Ask for the whole list; from now on nothing is captured but what is asked for, where that is configured."""
        if self._is_wanted:
            self._graphs.close()
            sizes = self._runner.sizes.describe()
            for number, of_rung in sizes.get("histories", {}).items():
                listed = "; ".join(f"{name} {_listed(values)}" for name, values in of_rung.items())
                logger.info("graphs of up to %d histories: %s", number, listed)
            logger.info("graphs of normalisations %s", ", ".join(self._normalizations))
        return self.ask(catalogs)

    @contextmanager
    def keeping(self, slot_index: int) -> Iterator[bool]:
        """While it lasts, graphs of that slot make no room for others.

        Gives whether some of them had to before, or could not be captured: then they are to be captured anew.
        """
        with self._room_lock:
            self._kept_slots[slot_index] += 1
            has_gaps = slot_index in self._graphs.dropped_slots
        try:
            yield has_gaps
        finally:
            with self._room_lock:
                self._kept_slots[slot_index] -= 1
                self._kept_slots += Counter()  # without those of none

    def ask(self, catalogs: Sequence[LoadedCatalog]) -> "Future[None]":
        """Have every graph that is missing for these versions captured, which the caller keeps pinned until it is done.

        The future holds nothing, or what the first bucket that failed has raised.
        """
        ask = _Ask(catalogs)
        if self._is_wanted:
            with self._lock:
                self._asks.append(ask)
        else:
            ask.future.set_result(None)
        return ask.future

    def fail(self, error: BaseException) -> None:
        """Nothing is captured any more: whoever waits hears of `error`."""
        with self._lock:
            asks, self._asks = self._asks, deque()
        for ask in asks:
            _end_progress(ask)
            ask.future.set_exception(error)

    @property
    def is_compiling(self) -> bool:
        """Whether the next step waits for other threads alone: batches may be on the way meanwhile."""
        with self._lock:
            ask = self._asks[0] if self._asks else None
        return ask is not None and ask.search is not None and ask.search.is_compiling

    def step(self, wait_s: float = STEP_S) -> bool:
        """Search or capture one bucket, or see what has been compiled after `wait_s` at most; False when there was nothing to do.

        Raises DeviceLost alone.
        """
        with self._lock:
            ask = self._asks[0] if self._asks else None
        if ask is None:
            return False
        try:
            self._step(ask, wait_s)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything, and who asked must hear of it
            self._finish(ask, error)
        return True

    def _step(self, ask: _Ask, wait_s: float) -> None:
        if not ask.has_begun:
            ask.has_begun = True
            ask.missing = self._that_fit(ask)
            ask.unlisted = deque(self._unlisted(ask.catalogs))
            ask.search = self._search(ask) if self._device.is_compiling else None
        if ask.search is not None:
            if ask.search.step(wait_s):
                return
            ask.search = None
        if ask.progress is None:
            ask.progress = Progress("capturing graphs", len(ask.missing))
            ask.taken_bytes = self._device.memory().taken_bytes
        if ask.missing:
            one = ask.missing.popleft()
            ask.progress.step(one.name)
            with self._graphs.opened(lambda segment: segment.key in one.keys):
                self._run(one.make_batch())
        elif ask.unlisted:
            with self._graphs.opened(lambda segment: False):
                self._run(ask.unlisted.popleft())
        else:
            self._run_slots |= _slots_of(ask)
            self._note_done(ask, ask.progress)
            self._finish(ask, None)

    def _search(self, ask: _Ask) -> KernelSearch:
        batches = [(one.name, one.make_batch) for one in ask.missing]
        batches += [("other normalisations", partial(_same, batch)) for batch in ask.unlisted]
        return KernelSearch(self._graphs, self._run, batches)

    def _finish(self, ask: _Ask, error: Exception | None) -> None:
        with self._lock:
            if ask in self._asks:
                self._asks.remove(ask)
        _end_progress(ask)
        if error is None:
            ask.future.set_result(None)
            return
        with self._room_lock:
            self._graphs.dropped_slots |= _slots_of(ask)
        ask.future.set_exception(error)

    def _that_fit(self, ask: _Ask) -> deque[Missing]:
        """What is missing for an ask, as far as the device holds more graphs, the largest first."""
        found = deque(self.missing(ask.catalogs))
        number = sum(len(one.keys) for one in found)
        with self._room_lock:
            keep = self._active_slots() | _slots_of(ask) | self._kept_slots.keys()
            room = self._graphs.make_room(number, keep)
            self._graphs.dropped_slots -= _slots_of(ask)
        if number > room:
            logger.warning(
                "%d more graphs do not fit the device, which holds at most %d: the smallest buckets are padded to larger ones; shorten "
                "buckets.rows or buckets.normalizations, or lower cache.catalog_slots",
                number - room,
                self._graphs.max_graphs,
            )
        while number > room:
            number -= len(found.pop().keys)
        return found

    def _note_done(self, ask: _Ask, progress: Progress) -> None:
        taken = self._device.memory().taken_bytes - ask.taken_bytes
        self._graphs.num_bytes += max(0, taken)
        logger.info(
            "graphs of catalogue %s are captured: %d in all, %.1f s, %d MiB more of the device",
            ", ".join(f"{one.name} {one.version}" for one in ask.catalogs),
            self._graphs.num_graphs,
            progress.elapsed_s,
            max(0, taken) >> 20,
        )

    def missing(self, catalogs: Sequence[LoadedCatalog]) -> list[Missing]:
        """What has no graph yet for these versions: what holds every batch, then the largest first. On the thread that runs batches."""
        ladder = self._runner.sizes
        if not isinstance(ladder, Ladder) or not catalogs:
            return []
        found = [*self._rounds(ladder, catalogs), *self._prefills(ladder, catalogs[0])]
        missing = [one for one in found if not self._graphs.has_all(one.keys)]
        return sorted(missing, key=lambda one: (one.is_last_resort, one.size), reverse=True)

    def _rounds(self, ladder: Ladder, catalogs: Sequence[LoadedCatalog]) -> Iterator[Missing]:
        for loaded in catalogs:
            sizes = list(ladder.rounds(loaded.catalog.num_levels))
            for shared, bucket in sizes:
                for normalization in self._normalizations:
                    rows, most = bucket.rows[0], bucket.max_rows[0]
                    name = f"{rows} rows ({most} of one history), {shared.num_histories} histories, {normalization}"
                    keys = self._runner.rounds_keys(
                        shared, bucket, loaded.slot_index, normalization
                    )
                    make = partial(
                        self._rounds_batch, ladder, shared, bucket, loaded, normalization
                    )
                    yield Missing(name, rows, (shared, bucket) == sizes[-1], keys, make)

    def _prefills(self, ladder: Ladder, loaded: LoadedCatalog) -> Iterator[Missing]:
        sizes = list(ladder.prefills())
        for bucket in sizes:
            name = f"{bucket.num_tokens} tokens, {bucket.shared.num_histories} histories"
            make = partial(self._prefill_batch, bucket, ladder, loaded)
            keys = (prefill_key(bucket),)
            yield Missing(name, bucket.num_tokens, bucket == sizes[-1], keys, make)

    def _prefill_batch(self, bucket: PrefillBucket, ladder: Ladder, loaded: LoadedCatalog) -> Batch:
        number = min(bucket.shared.num_histories, bucket.num_tokens)
        lengths = _shares(bucket.num_tokens, number, ladder.capacities.max_history_tokens)
        histories = self._histories(lengths, lengths)
        return _batch(histories, [1] * number, loaded, self._normalizations[0])

    def _unlisted(self, catalogs: Sequence[LoadedCatalog]) -> Iterator[Batch]:
        """Batches of the normalisations that get no graphs, for slots where they never ran."""
        ladder = self._runner.sizes
        if not isinstance(ladder, Ladder):
            return
        for loaded in catalogs:
            if loaded.slot_index in self._run_slots:
                continue
            sizes = list(ladder.rounds(loaded.catalog.num_levels))
            ends = {min(sizes, key=_rows_of): None, max(sizes, key=_rows_of): None}
            for normalization in NORMALIZATIONS:
                if normalization not in self._normalizations:
                    for shared, bucket in ends:
                        yield self._rounds_batch(ladder, shared, bucket, loaded, normalization)

    def _rounds_batch(
        self,
        ladder: Ladder,
        shared: SharedBucket,
        bucket: RoundsBucket,
        loaded: LoadedCatalog,
        normalization: Normalization,
    ) -> Batch:
        """One new token a history; the first is as long as its class begins, and has most rows."""
        rows, most = bucket.rows[0], bucket.max_rows[0]
        number = min(shared.num_histories, rows)
        longest = 1 + max((n for n in ladder.history_tokens if n < shared.max_kv), default=0)
        histories = self._histories([longest, *[1] * (number - 1)], [1] * number)
        widths = [most] if number == 1 else []
        if number > 1:
            first = min(most, rows - number + 1)
            widths = [first, *_shares(rows - first, number - 1, most)]
        return _batch(histories, widths, loaded, normalization)

    def _histories(self, lengths: Sequence[int], new: Sequence[int]) -> PackedHistories:
        page_size = self._runner.kv.shared.page_size
        return pack_histories(
            [np.zeros(length, dtype=np.int64) for length in lengths],
            [[NULL_PAGE] * num_pages_of(length, page_size) for length in lengths],
            page_size,
            [length - count for length, count in zip(lengths, new, strict=True)],
        )


def _end_progress(ask: _Ask) -> None:
    if ask.search is not None:
        ask.search.end()
    if ask.progress is not None:
        ask.progress.finish()


def _same(batch: Batch) -> Batch:
    return batch


def _slots_of(ask: _Ask) -> set[int]:
    return {one.slot_index for one in ask.catalogs}


def _rows_of(sizes: tuple[SharedBucket, RoundsBucket]) -> tuple[int, int]:
    shared, bucket = sizes
    return bucket.rows[0], shared.num_histories


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "as they come"


def _shares(total: int, number: int, most: int) -> list[int]:
    """`total` in that many parts as equal as can be."""
    part, left = divmod(total, number)
    parts = [part + (i < left) for i in range(number)]
    assert parts[0] <= most, (total, number, most)
    return parts


def _batch(
    histories: PackedHistories,
    widths: Sequence[int],
    loaded: LoadedCatalog,
    normalization: Normalization,
) -> Batch:
    """One search a history, without rules."""
    num_levels = loaded.catalog.num_levels
    nothing = tuple(np.zeros(0, dtype=np.int32) for _ in range(num_levels))
    group = SearchGroup(
        slot_index=loaded.slot_index,
        catalog_version=loaded.version,
        normalization=normalization,
        history_of_S=np.arange(len(widths), dtype=np.int32),
        widths_SL=np.repeat(np.asarray(widths, dtype=np.int32)[:, None], num_levels, axis=1),
        rules=(RuleRow(0, None, nothing),) * len(widths),
        rule_loads=(),
    )
    return Batch(0, "full", ("warm-up",) * len(widths), histories, (group,))
