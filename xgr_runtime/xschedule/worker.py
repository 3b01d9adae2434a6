"""Issues a batch to one device and gives back what comes of it: inputs, cached tokens, prefill, group by group its rounds, its outcome.

Issuing waits for nothing, so a batch may be issued while others are on the device (`submit`), as many as there are entries:
an entry is whatever a batch owns until its end, its places for inputs and outcomes, its scratch rows, its timers. What all
batches share (the inputs' block, hidden states, the beams' state and KV) is touched on the lane `compute` alone, in the
order of the batches.

    inputs    copy of the inputs | rule sets, exclusions                         next batch ...
    compute           (follows) | prefill ............ (follows) | rounds ... | keep | next batch ...
    results                                                                    (follows) | outcome to the host

So rule sets are written while the prefill runs, and everything on `inputs` while the batch before runs. A batch that is alone
has its inputs copied on `compute`, straight to where segments read. The rows that are
written are read by no batch in flight (`RuleRowTable`; scratch rows are the entry's). Groups of one batch may share rows:
there the second one's are written after the first one's rounds.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from xgr_runtime.errors import DeviceLost
from xgr_runtime.hal.device import Device, Event
from xgr_runtime.hal.explain import explain_error
from xgr_runtime.xbeam.rules import RuleCache
from xgr_runtime.xbeam.slot import CatalogSlot
from xgr_runtime.xbeam.state import BeamOutcome
from xgr_runtime.xschedule.batch import Batch, BatchOutput, GroupOutput, SearchGroup
from xgr_runtime.xschedule.buckets import (
    BatchBuckets,
    PrefillBucket,
    RoundsBucket,
    SharedBucket,
    host_lengths_of,
)
from xgr_runtime.xschedule.catalogs import LoadedCatalog
from xgr_runtime.xschedule.graph_runner import GraphPlan, GraphRunner
from xgr_runtime.xschedule.ladder import Ladder
from xgr_runtime.xschedule.model_runner import ModelRunner, Target, prefill_key
from xgr_runtime.xschedule.stage_clock import StageClock, TimerUses


@dataclass(frozen=True)
class _Entry:
    """What a batch in flight owns. index: of its places in the buffers."""

    index: int
    clock: StageClock


@dataclass(frozen=True)
class _Captured:
    """Which buckets have graphs, as `Ladder.of` asks."""

    device: Device
    runner: ModelRunner
    graphs: GraphRunner

    def has_prefill(self, bucket: PrefillBucket) -> bool:
        """Whether a prefill of that bucket is replayed, or never would be."""
        return not self.device.is_prefill_captured or self.graphs.has_all([prefill_key(bucket)])

    def has_rounds(self, shared: SharedBucket, group: SearchGroup, bucket: RoundsBucket) -> bool:
        """Whether all rounds of a group are."""
        slot, normalization = group.slot_index, group.normalization
        return self.graphs.has_all(self.runner.rounds_keys(shared, bucket, slot, normalization))


class PendingBatch:
    """A batch whose work has been issued. Whatever happens to it, `wait` is called once."""

    def __init__(
        self,
        device: Device,
        batch: Batch,
        outcomes: Sequence[BeamOutcome],
        end: Event,
        clock: StageClock,
        free: Callable[[], None],
    ) -> None:
        self._device, self._batch, self._outcomes = device, batch, outcomes
        self._end, self._clock, self._free = end, clock, free

    def is_done(self) -> bool:
        """Whether `wait` returns at once; on a failed device it does, to say what happened."""
        try:
            return self._end.is_done()
        except RuntimeError:  # what torch raises for every failed device
            return True

    def wait(self) -> BatchOutput:
        """Wait for the outcome; its arrays are copies. Raises as `Worker.run` does."""
        try:
            with _explained(self._device):
                self._end.wait()
                groups = tuple(map(_output, self._batch.groups, self._outcomes))
                return BatchOutput(groups, self._clock.read())
        finally:
            self._free()


class Worker:
    """One device of one process. catalogs maps a group's slot index to what is loaded there. Belongs to one thread.

    begun_s: when the device was given the first work of the batch that was issued last, of time.monotonic().
    """

    def __init__(
        self,
        device: Device,
        runner: ModelRunner,
        catalogs: Mapping[int, LoadedCatalog],
        rule_cache: RuleCache,
        graphs: GraphRunner,
    ) -> None:
        self._device, self._runner = device, runner
        self._catalogs, self._rule_cache = catalogs, rule_cache
        self.graphs = graphs
        self._captured = _Captured(device, runner, graphs)
        self.begun_s = 0.0
        self._timer_uses = TimerUses()
        self._free = [
            _Entry(index, StageClock(device, self._timer_uses))
            for index in range(runner.capacities.num_batches)
        ]

    @property
    def _num_others(self) -> int:
        """Batches in flight beside the one that is being issued."""
        return self._runner.capacities.num_batches - len(self._free) - 1

    def run(self, batch: Batch) -> BatchOutput:
        """Run `batch` to its end. The outcome's arrays are copies.

        Where it raises, the device has finished what was issued: until then that uses the batch's pinned memory, pages and
        rows. Raises DeviceLost where it cannot even do that, and what the device can explain as the error it is.
        """
        return self.submit(batch).wait()

    def submit(self, batch: Batch) -> PendingBatch:
        """Issue `batch` beside at most as many others as the capacities say. Raises as `run` does."""
        assert self._free, "each batch before has to be waited for"
        entry = self._free.pop(0)
        try:
            with _explained(self._device):
                return self._issue(batch, entry)
        except BaseException:
            self._timer_uses.forget()
            self._free.append(entry)
            raise

    def _issue(self, batch: Batch, entry: _Entry) -> PendingBatch:
        device, runner, clock = self._device, self._runner, entry.clock
        plan = self._prepare(batch, entry)
        self.begun_s = time.monotonic()
        clock.start()
        outcomes: list[BeamOutcome] = []
        end: Event | None = None
        with device.on("compute"):  # entered once: what is entered again inside costs nothing
            is_next = self._issue_inputs(batch, entry)
            with clock.prefill(is_next=is_next):
                self.graphs.run(plan.before_rounds)
            for number, group in enumerate(batch.groups):
                self._issue_rules(group, entry, end)
                if number:
                    with device.segment("inputs"):
                        runner.inputs.put_group(entry.index, number)
                with clock.rounds(group.num_levels) as timers:
                    timers += self.graphs.run(plan.groups[number])
                runner.state.keep(entry.index, number)
                end = device.record_event()
                with device.on("results"):
                    device.follow(end)
                    with clock.copying(is_to_host=True):
                        outcomes.append(runner.state.copy_to_host(entry.index, number))
                    arrived = device.record_event()
        return PendingBatch(
            device, batch, outcomes, arrived, clock, lambda: self._free.append(entry)
        )

    def _prepare(self, batch: Batch, entry: _Entry) -> GraphPlan:
        """All that can be done before the device is given anything: then what it gets comes without a gap."""
        runner = self._runner
        sizes = self._sizes_of(batch)
        runner.reserve(entry.index, len(batch.groups))
        rows = [self._rule_rows(group, entry) for group in batch.groups]
        filled = list(zip(batch.groups, sizes.groups, rows, strict=True))
        runner.inputs.fill(entry.index, batch.histories, sizes.prefill, filled)
        targets = [self._target(group) for group in batch.groups]
        lengths = host_lengths_of(batch.histories, sizes.prefill.shared)
        groups = list(zip(sizes.groups, targets, strict=True))
        return runner.plan(sizes.prefill, groups, lengths, is_copying=batch.histories.has_copies)

    def _sizes_of(self, batch: Batch) -> BatchBuckets:
        sizes = self._runner.sizes
        if isinstance(sizes, Ladder) and self.graphs.is_closed:
            return sizes.of(batch, self._captured)
        return sizes.of(batch)

    def _target(self, group: SearchGroup) -> Target:
        loaded = self._catalogs[group.slot_index]
        return Target(loaded.slot, loaded.head, loaded.slot_index, group.normalization)

    def _issue_inputs(self, batch: Batch, entry: _Entry) -> bool:
        """All groups' and the histories' inputs to the device; the first group's and the histories' where segments read.

        Returns whether the last that was issued is the copy, on `compute`.
        """
        device, inputs = self._device, self._runner.inputs
        if not self._num_others and len(batch.groups) == 1:
            # There is nothing to copy beside of, and nobody reads the block: the shortest way.
            with device.segment("inputs"), entry.clock.copying(is_to_host=False):
                inputs.send_first(entry.index)
            return True
        with device.segment("inputs", "inputs"):
            with entry.clock.copying(is_to_host=False):
                inputs.send(entry.index, len(batch.groups))
            arrived = device.record_event()
        with device.segment("inputs"):
            device.follow(arrived)
            inputs.put_first(entry.index)
        return False

    def _rule_rows(self, group: SearchGroup, entry: _Entry) -> list[int]:
        """The row of `alive` that each search of a group reads."""
        slot = self._catalogs[group.slot_index].slot
        return [
            rule.row if rule.scratch is None else self._scratch_row(slot, rule.scratch, entry)
            for rule in group.rules
        ]

    def _scratch_row(self, slot: CatalogSlot, number: int, entry: _Entry) -> int:
        return slot.scratch_row(entry.index * self._runner.capacities.num_searches + number)

    def _issue_rules(self, group: SearchGroup, entry: _Entry, after: Event | None) -> None:
        """Write new rule sets, copy rows for searches with exclusions, clear their edges, before what is issued next.

        after: what still reads those rows, work of an earlier group of this batch.
        """
        excluding = [(rule, rule.scratch) for rule in group.rules if rule.scratch is not None]
        if not group.rule_loads and not excluding:
            return
        device, loaded = self._device, self._catalogs[group.slot_index]
        slot = loaded.slot
        with device.segment("inputs", "inputs"):
            if after is not None:
                device.follow(after)
            with entry.clock.copying(is_to_host=False):
                for row, expression in group.rule_loads:
                    slot.write_rule_set(row, self._rule_cache.get(loaded.catalog, expression))
                for rule, number in excluding:
                    scratch = self._scratch_row(slot, number, entry)
                    slot.copy_row(rule.row, scratch)
                    slot.clear(scratch, rule.cleared)
            written = device.record_event()
        device.follow(written)


@contextmanager
def _explained(device: Device) -> Iterator[None]:
    """What is raised inside leaves when the device has finished what it was given, as the error that the device explains.

    Raises DeviceLost where it cannot finish.
    """
    try:
        yield
    except BaseException as error:
        try:
            device.synchronize()
        except RuntimeError as lost:  # what torch raises for every failed device
            raise DeviceLost(f"{device.name} failed for good: {lost}") from error
        explained = explain_error(device.kind, error)
        if explained is None:
            raise
        raise explained from error


def _output(group: SearchGroup, outcome: BeamOutcome) -> GroupOutput:
    # Of the rows that there are: memory holds those of the largest batch.
    levels, num_rows = group.num_levels, int(group.widths_SL.sum(axis=0).max())
    num_live_rows, num_rows_skipped = outcome.counters.tolist()
    return GroupOutput(
        scores_LN=outcome.scores_LN.numpy()[:levels, :num_rows].copy(),
        nodes_LN=outcome.nodes_LN.numpy()[:levels, :num_rows].copy(),
        parents_LN=outcome.parents_LN.numpy()[:levels, :num_rows].copy(),
        status_S=outcome.status_S1.numpy()[: group.num_searches].astype(np.int32),
        num_live_rows=num_live_rows,
        num_rows_skipped=num_rows_skipped,
    )
