"""Runs a batch on one device: rules, inputs, the plan's segments, one copy back. Nothing is read in between."""

from collections.abc import Mapping

import numpy as np

from xgr_runtime.hal.device import Device
from xgr_runtime.xbeam.rules import RuleCache
from xgr_runtime.xschedule.batch import Batch, BatchOutput
from xgr_runtime.xschedule.buckets import bucket_of
from xgr_runtime.xschedule.catalogs import LoadedCatalog
from xgr_runtime.xschedule.graph_runner import GraphRunner
from xgr_runtime.xschedule.model_runner import ModelRunner, Target


class Worker:
    """One device of one process. catalogs maps a batch's slot index to what is loaded there."""

    def __init__(
        self,
        device: Device,
        runner: ModelRunner,
        catalogs: Mapping[int, LoadedCatalog],
        rule_cache: RuleCache,
    ) -> None:
        self._device, self._runner = device, runner
        self._catalogs, self._rule_cache = catalogs, rule_cache
        self.graphs = GraphRunner(device)

    def run(self, batch: Batch) -> BatchOutput:
        """Run `batch` to its end. The outcome's arrays are copies."""
        loaded = self._catalogs[batch.slot_index]
        bucket = bucket_of(
            batch, self._runner.capacities, is_coarse=self._device.is_capturing_supported
        )
        with self._device.segment("inputs"):
            rule_rows = self._place_rules(batch, loaded)
            self._runner.inputs.fill(batch, bucket, rule_rows)
        target = Target(loaded.slot, loaded.head, loaded.slot_index, batch.normalization)
        self.graphs.run(self._runner.plan(bucket, target))
        outcome = self._runner.state.copy_to_host(self._device)
        self._device.record_event().wait()
        num_rows, num_skipped = (int(n) for n in outcome.counters.numpy())
        levels = batch.num_levels
        return BatchOutput(
            scores_LN=outcome.scores_LN[:levels].numpy().copy(),
            nodes_LN=outcome.nodes_LN[:levels].numpy().copy(),
            parents_LN=outcome.parents_LN[:levels].numpy().copy(),
            status_S=outcome.status_S1[: batch.num_searches].numpy().astype(np.int32),
            num_rows=num_rows,
            num_rows_skipped=num_skipped,
        )

    def _place_rules(self, batch: Batch, loaded: LoadedCatalog) -> list[int]:
        """Write new rule sets, copy rows for searches with exclusions, clear their edges; the row of each search."""
        slot, rows = loaded.slot, []
        for row, expression in batch.rule_loads:
            slot.write_rule_set(row, self._rule_cache.get(loaded.catalog, expression))
        for rule in batch.rules:
            if rule.scratch is None:
                rows.append(rule.row)
                continue
            scratch = slot.scratch_row(rule.scratch)
            slot.copy_row(rule.row, scratch)
            slot.clear(scratch, rule.cleared)
            rows.append(scratch)
        return rows
