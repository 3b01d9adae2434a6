"""Turns a bucket into a graph plan: prefill, then the rounds, over static buffers.

Round l reads the hidden state of its parent rows (round 0: of each history's last token), scores the level, selects,
and moves the beams' own KV to the children, so that the next step finds each row's tokens in its slot.
"""

from dataclasses import dataclass

import torch

from xgr_runtime.hal.bound import BoundOps, bind_ops
from xgr_runtime.hal.device import Device
from xgr_runtime.hal.ops.beam import BeamRows
from xgr_runtime.kvcache.shared import SharedKV
from xgr_runtime.kvcache.unshared import UnsharedKV
from xgr_runtime.models.base import ContextInputs, KVCaches, PackedInputs, RecModel, StepInputs
from xgr_runtime.types import Normalization
from xgr_runtime.xbeam.search import LevelHead, run_round
from xgr_runtime.xbeam.slot import CatalogSlot
from xgr_runtime.xbeam.state import BeamState
from xgr_runtime.xschedule.buckets import Bucket
from xgr_runtime.xschedule.buffers import BatchInputs, InputBuffers
from xgr_runtime.xschedule.capacities import Capacities
from xgr_runtime.xschedule.graph_runner import GraphPlan, Segment


@dataclass(frozen=True)
class Target:
    """What a batch is searched against. serial is unique per allocated slot, so a graph never meets another address."""

    slot: CatalogSlot
    head: LevelHead
    serial: int
    normalization: Normalization


class ModelRunner:
    """Owns the buffers of a batch in flight: inputs, hidden states, KV, beam state."""

    def __init__(
        self,
        model: RecModel,
        device: Device,
        dtype: torch.dtype,
        capacities: Capacities,
        num_pages: int,
        page_size: int,
        *,
        allow_reference: bool,
    ) -> None:
        self._model, self._device, self._dtype = model, device, dtype
        self._allow_reference = allow_reference
        self.capacities = capacities
        place = device.torch_device
        rounds = capacities.num_levels
        self.kv = KVCaches(
            SharedKV(model.kv_spec, num_pages, page_size, place),
            UnsharedKV(model.kv_spec, capacities.num_rows, rounds, place),
        )
        self.inputs = InputBuffers(capacities, device)
        self.state = BeamState(rounds, capacities.num_rows, capacities.num_searches, device)
        self._hidden_HM = torch.zeros(
            (capacities.num_histories, model.hidden_size), dtype=dtype, device=place
        )
        self._bound: dict[Bucket, BoundOps] = {}

    def bind(self, bucket: Bucket) -> BoundOps:
        """The ops of a bucket, resolved on first use and kept where buckets are few."""
        if bucket in self._bound:
            return self._bound[bucket]
        dims = {
            "T": bucket.num_tokens,
            "H": bucket.num_histories,
            "N": max(bucket.rows),
            "max_kv": bucket.max_kv,
        }
        ops = bind_ops(self._device, self._dtype, dims, allow_reference=self._allow_reference)
        if len(self._bound) >= 256:
            self._bound.clear()
        self._bound[bucket] = ops
        return ops

    def plan(self, bucket: Bucket, target: Target) -> GraphPlan:
        """The segments of a batch of this bucket against `target`."""
        ops, inputs = self.bind(bucket), self.inputs.view(bucket)
        key = (target.serial, target.normalization, bucket)

        def prefill() -> None:
            self._prefill(ops, bucket, inputs)

        def rounds(levels: range) -> None:
            for level in levels:
                self._round(ops, bucket, inputs, target, level)

        all_levels = range(len(bucket.rows))
        parts = (
            [range(i, i + 1) for i in all_levels]
            if self._device.is_graph_per_round
            else [all_levels]
        )
        segments = [Segment("prefill", ("prefill", bucket), prefill)]
        for part in parts:
            name = f"rounds[{part.start}:{part.stop}]"
            segments.append(Segment(name, (name, *key), lambda part=part: rounds(part)))  # type: ignore[misc]
        return GraphPlan(tuple(segments))

    def _prefill(self, ops: BoundOps, bucket: Bucket, inputs: BatchInputs) -> None:
        hidden_HM = self._model.context(
            ops,
            ContextInputs(
                packed=PackedInputs(inputs.token_ids_T),
                positions_T=inputs.positions_T,
                slot_T=inputs.kv_slots_T,
                q_start_H1=inputs.q_start_H1,
                kv_len_H=inputs.kv_lens_H,
                page_table_HP=inputs.page_table_HP,
                last_row_H=inputs.last_row_H,
                max_q=bucket.max_q,
                max_kv=bucket.max_kv,
            ),
            self.kv,
        )
        assert hidden_HM is not None, "a decoder-only model scores round 0 from its context"
        self._hidden_HM[: bucket.num_histories].copy_(hidden_HM)

    def _round(
        self, ops: BoundOps, bucket: Bucket, inputs: BatchInputs, target: Target, level: int
    ) -> None:
        children = self._rows(bucket, inputs, level)
        if level == 0:
            self.state.reset()
            parents = self.state.root(
                bucket.num_searches, inputs.starts[0], inputs.search_of_row[0]
            )
            hidden_NM = self._hidden_HM[inputs.history_of_S]
        else:
            parents = self._rows(bucket, inputs, level - 1)
            if level == 1:
                self._first_slots(bucket, inputs)
            hidden_NM = self._step(ops, bucket, inputs, target, parents, level)
        run_round(
            ops,
            target.head,
            hidden_NM,
            level,
            target.normalization,
            parents,
            children,
            target.slot.levels[level],
            inputs.rule_row_S,
            self.state.status_S1[: bucket.num_searches + 1],
            self.state.counters,
        )
        if 1 <= level < len(bucket.rows) - 1:
            before, after = self.state.slots_2N[(level + 1) % 2], self.state.slots_2N[level % 2]
            ops.reorder_unshared_kv(
                self.kv.unshared.all_rows,
                children.parents_N,
                before[: bucket.rows[level - 1]],
                children.search_of_row_N,
                inputs.slot_start_S1,
                level,
                after[: bucket.rows[level]],
                self.kv.unshared.tile,
            )

    def _step(
        self,
        ops: BoundOps,
        bucket: Bucket,
        inputs: BatchInputs,
        target: Target,
        parents: BeamRows,
        level: int,
    ) -> torch.Tensor:
        num_rows = bucket.rows[level - 1]
        step = StepInputs(
            token_ids_N=target.slot.token_of[level - 1][parents.codes_N.long()],
            positions_N=inputs.history_len_S1[parents.search_of_row_N.long()] + (level - 1),
            page_table_HP=inputs.page_table_HP,
            kv_len_H=inputs.kv_lens_H,
            row_start_H1=inputs.history_row_starts[level - 1],
            slot_N=self.state.slots_2N[(level + 1) % 2][:num_rows],
            max_rows=bucket.max_rows[level - 1],
            max_kv=bucket.max_kv,
            round=level,
        )
        return self._model.step(ops, step, self.kv)

    def _rows(self, bucket: Bucket, inputs: BatchInputs, level: int) -> BeamRows:
        return self.state.rows(
            level, bucket.rows[level], inputs.starts[level + 1], inputs.search_of_row[level + 1]
        )

    def _first_slots(self, bucket: Bucket, inputs: BatchInputs) -> None:
        """Row i of a search starts in slot i of its range; padding rows use the dummy slot behind all ranges."""
        search_N = inputs.search_of_row[1].long()
        row_N = torch.arange(search_N.shape[0], device=search_N.device, dtype=torch.int32)
        slot_N = inputs.slot_start_S1[search_N] + row_N - inputs.starts[1][search_N]
        is_padding_N = search_N == bucket.num_searches
        slot_N = slot_N.masked_fill(is_padding_N, self.kv.unshared.dummy_slot)
        self.state.slots_2N[0, : bucket.rows[0]].copy_(slot_N)
