"""Turns buckets into a graph plan: copies of cached tokens where there are some, prefill, then the rounds of each group, over static buffers.

Round l reads the hidden state of its parent rows (round 0: of each history's last token), scores the level, selects,
and moves the beams' own KV to the children, so that the next step finds each row's tokens in its slot.
"""

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from xgr_runtime.hal.bound import BoundOps, bind_ops
from xgr_runtime.hal.device import Device
from xgr_runtime.hal.memory import allocate
from xgr_runtime.hal.ops.beam import BeamRows
from xgr_runtime.kvcache.shared import SharedKV
from xgr_runtime.kvcache.unshared import UnsharedKV
from xgr_runtime.models.base import ContextInputs, KVCaches, PackedInputs, RecModel, StepInputs
from xgr_runtime.types import Normalization
from xgr_runtime.xbeam.search import LevelHead, run_round
from xgr_runtime.xbeam.slot import CatalogSlot
from xgr_runtime.xbeam.state import BeamState
from xgr_runtime.xschedule.buckets import (
    HostLengths,
    PrefillBucket,
    RoundsBucket,
    SharedBucket,
    Sizes,
)
from xgr_runtime.xschedule.buffers import GroupInputs, InputBuffers, SharedInputs
from xgr_runtime.xschedule.capacities import Capacities
from xgr_runtime.xschedule.graph_runner import GraphPlan, Segment
from xgr_runtime.xschedule.ladder import Ladder
from xgr_runtime.xschedule.stage_clock import RoundMarks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """What a group is searched against. slot_index is unique per allocated slot, so a graph never meets another address."""

    slot: CatalogSlot
    head: LevelHead
    slot_index: int
    normalization: Normalization


@dataclass(frozen=True)
class _Rounds:
    """Everything the rounds of a group are made of: sizes, ops, views of the static inputs.

    is_alone: the group is one search, of the only history: its hidden state is the first one.
    """

    shared_bucket: SharedBucket
    bucket: RoundsBucket
    target: Target
    ops: BoundOps
    shared: SharedInputs
    group: GroupInputs
    kv_lens: tuple[int, ...]
    is_alone: bool


class ModelRunner:
    """Owns what segments read and write: inputs (an entry for each batch in flight), hidden states, KV, beam state."""

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
        is_capturing: bool,
        sizes: Sizes,
    ) -> None:
        self._model, self._device, self._dtype = model, device, dtype
        self.sizes = sizes
        # A kernel in each graph that finds nothing to copy costs less than a graph more to replay where there is something.
        self._is_copy_in_prefill = (
            device.is_prefill_captured and isinstance(sizes, Ladder) and sizes.is_copying
        )
        self._allow_reference = allow_reference
        self.capacities = capacities
        place = device.torch_device
        rounds = capacities.num_levels
        self.kv = KVCaches(
            SharedKV(model.kv_spec, num_pages, page_size, place),
            UnsharedKV(model.kv_spec, capacities.num_rows, rounds, place),
        )
        self.inputs = InputBuffers(capacities, device, is_capturing=is_capturing)
        self.state = BeamState(
            rounds, capacities.num_rows, capacities.num_searches, device, capacities.num_batches
        )
        self._hidden_HM = allocate(
            (capacities.num_histories, model.hidden_size),
            dtype,
            place,
            what="hidden states",
            lower="scheduler.max_batch_histories",
        )
        self._counting_H1 = torch.arange(
            capacities.num_histories + 1, dtype=torch.int32, device=place
        )
        self._bound: dict[tuple[tuple[str, int], ...], BoundOps] = {}
        self.providers: dict[str, set[str]] = {}
        self._unloaded: set[str] = set()
        c = capacities
        largest = {"H": c.num_histories, "max_kv": c.max_history_tokens}
        tokens, rows = c.num_tokens, c.num_rows
        # An op that nobody provides is found here, not in the first large batch under traffic.
        ops = self.bind({"T": tokens, "N": tokens, **largest, "max_q": c.max_history_tokens})
        self._copy_page_starts = ops.copy_page_starts
        self.bind({"T": rows, "N": rows, **largest, "max_rows": rows})

    def reserve(self, entry: int, num_groups: int) -> None:
        """Have room for that many groups in the entry of a batch that is not issued yet; not inside a segment."""
        self.inputs.reserve(entry, num_groups)
        self.state.reserve(entry, num_groups)

    def bind(self, dims: Mapping[str, int]) -> BoundOps:
        """The ops for these sizes of a bucket, resolved on first use and kept where buckets are few."""
        key = tuple(dims.items())
        if key in self._bound:
            return self._bound[key]
        shared = self.kv.shared
        pages = {"page_size": shared.page_size, "num_pages": shared.num_pages}
        sizes = {**self._model.op_sizes, **pages, **dims}
        ops = bind_ops(self._device, self._dtype, sizes, allow_reference=self._allow_reference)
        if len(self._bound) >= 256:
            self._bound.clear()
        self._bound[key] = ops
        self._note(ops)
        return ops

    def _note(self, ops: BoundOps) -> None:
        """Log every provider once per op, and once why a provider module of this device could not be loaded."""
        for binding in ops.bindings:
            known = self.providers.setdefault(binding.op_name, set())
            if binding.provider in known:
                continue
            known.add(binding.provider)
            logger.info("op %s: provider %s", binding.op_name, binding.provider)
            for refusal in binding.refusals:
                if refusal.is_load_failure and refusal.provider not in self._unloaded:
                    self._unloaded.add(refusal.provider)
                    logger.warning("providers %s %s", refusal.provider, refusal.reason)

    def plan(
        self,
        prefill: PrefillBucket,
        groups: Sequence[tuple[RoundsBucket, Target]],
        lengths: HostLengths,
        *,
        is_copying: bool = False,
    ) -> GraphPlan:
        """The segments of a batch: its histories' bucket and lengths, and of each group the bucket and what it is searched against.

        is_copying: whether cached tokens of a history lie in a page that it does not read.
        """
        return GraphPlan(
            self._prefill_segment(prefill, lengths),
            tuple(
                self._rounds_segments(prefill.shared, *group, lengths.kv_lens) for group in groups
            ),
            self._copy_segment(prefill.shared.num_histories)
            if is_copying and not self._is_copy_in_prefill
            else None,
        )

    def _copy_segment(self, num_histories: int) -> Segment:
        return Segment(
            "copies",
            ("copies", num_histories),
            partial(self._copy, num_histories),
            is_eager=True,
        )

    def _copy(self, num_histories: int) -> None:
        copies = self.inputs.copy_view(num_histories)
        pages = self.kv.shared.all_pages
        self._copy_page_starts(pages, copies.source_H, copies.target_H, copies.num_tokens_H)

    def _prefill_segment(self, bucket: PrefillBucket, lengths: HostLengths) -> Segment:
        tokens = bucket.num_tokens
        shared = bucket.shared
        sizes = {"T": tokens, "N": tokens, "H": shared.num_histories}
        ops = self.bind({**sizes, "max_q": bucket.max_q, "max_kv": bucket.max_kv})
        return Segment(
            "prefill",
            prefill_key(bucket),
            partial(self._prefill, ops, bucket, lengths),
            kv_lens=lengths.kv_lens,
            is_eager=not self._device.is_prefill_captured,
            captured_by="the device would have to have room for the graphs of all buckets",
        )

    def _rounds_segments(
        self,
        shared: SharedBucket,
        bucket: RoundsBucket,
        target: Target,
        kv_lens: tuple[int, ...],
    ) -> tuple[Segment, ...]:
        views = self.inputs.shared_view(shared), self.inputs.group_view(bucket, shared)
        segments = []
        for part in self._parts(bucket):
            read = _read_by(part, shared)
            # only where the number of histories is one of the graph's sizes
            is_alone = read is not None and read.num_histories == bucket.num_searches == 1
            ops = self.bind(_rounds_dims(bucket, part, read))
            rounds = _Rounds(shared, bucket, target, ops, *views, kv_lens, is_alone)
            marks = RoundMarks(self._device.timer())
            body = partial(self._rounds, rounds, part, marks)
            segments.append(
                Segment(
                    _name(part),
                    _rounds_key(part, shared, bucket, target.slot_index, target.normalization),
                    body,
                    marks.timer,
                    marks.points(part),
                    kv_lens,
                    target.slot_index,
                    before_capture=self.state.clear,
                    captured_by=f"buckets.normalizations would have to list {target.normalization}, and the catalogue's slot "
                    f"({target.slot_index}) to be there when graphs are captured",
                )
            )
        return tuple(segments)

    def _parts(self, bucket: RoundsBucket) -> list[range]:
        """The rounds of each graph."""
        levels = range(len(bucket.rows))
        if not self._device.is_graph_per_round:
            return [levels]
        return [range(level, level + 1) for level in levels]

    def rounds_keys(
        self,
        shared: SharedBucket,
        bucket: RoundsBucket,
        slot_index: int,
        normalization: Normalization,
    ) -> tuple[Hashable, ...]:
        """Those of the segments that the rounds of a group would be, without making them."""
        return tuple(
            _rounds_key(part, shared, bucket, slot_index, normalization)
            for part in self._parts(bucket)
        )

    def _rounds(self, rounds: _Rounds, levels: range, marks: RoundMarks) -> None:
        for level in levels:
            if level > levels.start:
                marks.between(level)
            self._round(rounds, level, marks)

    def _prefill(self, ops: BoundOps, bucket: PrefillBucket, lengths: HostLengths) -> None:
        if self._is_copy_in_prefill:
            self._copy(bucket.shared.num_histories)
        inputs = self.inputs.prefill_view(bucket)
        shared = self.inputs.shared_view(bucket.shared)
        out_HM = self._hidden_HM[: bucket.shared.num_histories]
        hidden_HM = self._model.context(
            ops,
            ContextInputs(
                packed=PackedInputs(inputs.token_ids_T),
                positions_T=inputs.positions_T,
                slot_T=inputs.kv_slots_T,
                q_start_H1=inputs.q_start_H1,
                kv_len_H=shared.kv_lens_H,
                page_table_HP=shared.page_table_HP,
                last_row_H=inputs.last_row_H,
                last_start_H1=self._counting_H1[: bucket.shared.num_histories + 1],
                max_q=bucket.max_q,
                max_kv=bucket.max_kv,
                q_starts=lengths.q_starts,
                kv_lens=lengths.kv_lens,
                out_HM=out_HM,
            ),
            self.kv,
        )
        assert hidden_HM is not None, "a decoder-only model scores round 0 from its context"
        if hidden_HM is not out_HM:
            out_HM.copy_(hidden_HM)

    def _round(self, rounds: _Rounds, level: int, marks: RoundMarks) -> None:
        bucket, target, inputs, ops = rounds.bucket, rounds.target, rounds.group, rounds.ops
        children = self._rows(rounds, level)
        if level == 0:
            self.state.reset()
            parents = self.state.root(
                bucket.num_searches, inputs.starts[0], inputs.search_of_row[0]
            )
            hidden_HM = self._hidden_HM
            hidden_NM = hidden_HM[:1] if rounds.is_alone else hidden_HM[inputs.history_of_S]
        else:
            parents = self._rows(rounds, level - 1)
            hidden_NM = self._step(rounds, parents, level)
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
            partial(marks.before_select, level),
        )
        marks.after_select(level)
        if 1 <= level < len(bucket.rows) - 1:
            after = self.state.slots_2N[level % 2]
            ops.reorder_unshared_kv(
                self.kv.unshared.all_rows,
                children.parents_N,
                self._slots(rounds, level),
                children.search_of_row_N,
                inputs.slot_start_S1,
                level,
                after[: bucket.rows[level]],
                self.kv.unshared.tile,
            )

    def _step(self, rounds: _Rounds, parents: BeamRows, level: int) -> torch.Tensor:
        bucket, inputs = rounds.bucket, rounds.group
        step = StepInputs(
            ids_N=parents.codes_N,
            positions_N=inputs.positions[level - 1],
            page_table_HP=rounds.shared.page_table_HP,
            kv_len_H=rounds.shared.kv_lens_H,
            row_start_H1=inputs.history_row_starts[level - 1],
            slot_N=self._slots(rounds, level),
            max_rows=bucket.max_rows[level - 1],
            max_kv=rounds.shared_bucket.max_kv,
            kv_lens=rounds.kv_lens,
            round=level,
            token_of_C=rounds.target.slot.token_of[level - 1],
        )
        return self._model.step(rounds.ops, step, self.kv)

    def _rows(self, rounds: _Rounds, level: int) -> BeamRows:
        inputs, num_rows = rounds.group, rounds.bucket.rows[level]
        starts, search_of_row = inputs.starts[level + 1], inputs.search_of_row[level + 1]
        return self.state.rows(level, num_rows, starts, search_of_row)

    def _slots(self, rounds: _Rounds, level: int) -> torch.Tensor:
        """The unshared slots of the parent rows of round `level`: those of round 0 are inputs, a reorder writes the others."""
        if level == 1:
            return rounds.group.first_slot_N
        return self.state.slots_2N[(level + 1) % 2][: rounds.bucket.rows[level - 1]]


def prefill_key(bucket: PrefillBucket) -> Hashable:
    """Of the histories' sizes a prefill depends on their number and on its own bound of their lengths alone."""
    shared = bucket.shared
    sizes = (bucket.num_tokens, bucket.max_q, bucket.max_kv)
    return ("prefill", *sizes, shared.num_histories, shared.num_pages)


def _rounds_key(
    part: range,
    shared: SharedBucket,
    bucket: RoundsBucket,
    slot_index: int,
    normalization: Normalization,
) -> Hashable:
    read = _read_by(part, shared)
    return (_name(part), slot_index, normalization, read, bucket.read_by(part))


def _name(part: range) -> str:
    return f"rounds[{part.start}:{part.stop}]"


def _read_by(part: range, shared: SharedBucket) -> SharedBucket | None:
    """Round 0 scores what the prefill left: it depends on no sizes of the histories."""
    return shared if part.stop > 1 else None


def _rounds_dims(bucket: RoundsBucket, part: range, shared: SharedBucket | None) -> dict[str, int]:
    """The sizes that ops of those rounds are bound for; none of the histories where `shared` is None."""
    own = slice(max(0, part.start - 1), part.stop)
    num_rows = max(bucket.rows[own])
    dims = {"T": num_rows, "N": num_rows, "max_rows": max(bucket.max_rows[own])}
    if shared is not None:
        dims |= {"H": shared.num_histories, "max_kv": shared.max_kv}
    return dims
