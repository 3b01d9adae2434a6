"""Runs a batch on one device: the histories' prefill, then group by group its rules, inputs, rounds, one copy back.

The host only issues work, in the order of one stream, and waits once, when the last group's copy is issued. So the
groups share the device's buffers, and what the host writes for a group (pinned inputs, the place of its outcome) is
that group's own until then.
"""

from collections.abc import Mapping

import numpy as np

from xgr_runtime.errors import DeviceLost
from xgr_runtime.hal.device import Device
from xgr_runtime.hal.explain import explain_error
from xgr_runtime.xbeam.rules import RuleCache
from xgr_runtime.xbeam.state import BeamOutcome
from xgr_runtime.xschedule.batch import Batch, BatchOutput, GroupOutput, SearchGroup
from xgr_runtime.xschedule.buckets import host_lengths_of
from xgr_runtime.xschedule.catalogs import LoadedCatalog
from xgr_runtime.xschedule.graph_runner import GraphRunner
from xgr_runtime.xschedule.model_runner import ModelRunner, Target
from xgr_runtime.xschedule.stage_clock import StageClock


class Worker:
    """One device of one process. catalogs maps a group's slot index to what is loaded there."""

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
        self._clock = StageClock(device)

    def run(self, batch: Batch) -> BatchOutput:
        """Run `batch` to its end. The outcome's arrays are copies.

        Where it raises, the device has finished what was issued: until then that reads the pinned inputs, which the next
        batch writes anew. Raises DeviceLost where it cannot even do that, and what the device can explain as the error it is.
        """
        try:
            return self._run(batch)
        except BaseException as error:
            try:
                self._device.synchronize()
            except RuntimeError as lost:  # what torch raises for every failed device
                raise DeviceLost(f"{self._device.name} failed for good: {lost}") from error
            explained = explain_error(self._device.kind, error)
            if explained is None:
                raise
            raise explained from error

    def _run(self, batch: Batch) -> BatchOutput:
        runner = self._runner
        clock = self._clock
        histories = batch.histories
        sizes = runner.sizes.of(batch)
        prefill, buckets = sizes.prefill, sizes.groups
        targets = [self._target(group) for group in batch.groups]
        lengths = host_lengths_of(histories, prefill.shared)
        plan = runner.plan(prefill, list(zip(buckets, targets, strict=True)), lengths)
        runner.reserve(len(batch.groups))
        clock.start()
        with clock.copying(is_to_host=False), self._device.segment("inputs"):
            runner.histories.fill(histories, prefill)
        clock.add_prefill(self.graphs.run((plan.prefill,)))
        outcomes: list[BeamOutcome] = []
        for number, (group, bucket) in enumerate(zip(batch.groups, buckets, strict=True)):
            with clock.copying(is_to_host=False), self._device.segment("inputs"):
                rule_rows = self._place_rules(group)
                runner.searches.fill(number, group, histories, bucket, prefill.shared, rule_rows)
            clock.add_rounds(self.graphs.run(plan.groups[number]), group.num_levels)
            with clock.copying(is_to_host=True):
                outcomes.append(runner.state.copy_to_host(number))
        self._device.record_event().wait()
        return BatchOutput(tuple(map(_output, batch.groups, outcomes)), clock.read())

    def _target(self, group: SearchGroup) -> Target:
        loaded = self._catalogs[group.slot_index]
        return Target(loaded.slot, loaded.head, loaded.slot_index, group.normalization)

    def _place_rules(self, group: SearchGroup) -> list[int]:
        """Write new rule sets, copy rows for searches with exclusions, clear their edges; the row of each search."""
        loaded, rows = self._catalogs[group.slot_index], []
        slot = loaded.slot
        for row, expression in group.rule_loads:
            slot.write_rule_set(row, self._rule_cache.get(loaded.catalog, expression))
        for rule in group.rules:
            if rule.scratch is None:
                rows.append(rule.row)
                continue
            scratch = slot.scratch_row(rule.scratch)
            slot.copy_row(rule.row, scratch)
            slot.clear(scratch, rule.cleared)
            rows.append(scratch)
        return rows


def _output(group: SearchGroup, outcome: BeamOutcome) -> GroupOutput:
    levels = group.num_levels
    num_live_rows, num_rows_skipped = (int(n) for n in outcome.counters.numpy())
    return GroupOutput(
        scores_LN=outcome.scores_LN[:levels].numpy().copy(),
        nodes_LN=outcome.nodes_LN[:levels].numpy().copy(),
        parents_LN=outcome.parents_LN[:levels].numpy().copy(),
        status_S=outcome.status_S1[: group.num_searches].numpy().astype(np.int32),
        num_live_rows=num_live_rows,
        num_rows_skipped=num_rows_skipped,
    )
