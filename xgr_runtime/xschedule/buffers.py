"""The static inputs of a batch: what segments read, at addresses that never change, and how a batch's content gets there.

Everything lies in one block of device memory, which captured graphs read: a group's part, then the histories' part. The
host fills pinned memory laid out the same way. One copy takes it to the device on the lane `inputs`, while the batch before
still runs; where it lands is the batch's own, and a copy on the device brings it from there into the block when `compute`
has come that far. So a batch in flight owns an *entry*, pinned memory and device memory, from its issue to its end.

The groups of a batch use the same part of the block one after the other: each one's part of the entry is copied there
before its rounds. In an entry the last group comes first and group 0 last, next to the histories: so what a batch uses is
contiguous however many groups it has, and group 0 and the histories are one copy on the device as well.

The whole block is copied whatever the batch fills of it: with 8,192 tokens and rows it is 0.6 MB, which takes about 12 us on
the way to the device, beside the batch before, and less than 1 us on it. What the host can tell of a row lies there ready to
read, rather than be worked out by kernels of a few microseconds in every round.

Padding: tokens go to the null page, histories have length 0, rows belong to search number S (one past the last),
which is the bucket's number of searches.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from xgr_runtime.hal.device import Device
from xgr_runtime.hal.memory import allocate, allocate_pinned
from xgr_runtime.xschedule.batch import PackedHistories, SearchGroup
from xgr_runtime.xschedule.buckets import PrefillBucket, RoundsBucket, SharedBucket
from xgr_runtime.xschedule.capacities import Capacities
from xgr_runtime.xschedule.input_fill import Arrays, GroupPart, RowPlans, fill_histories

ALIGNMENT_BYTES = 256  # of every array and of every row of a matrix with rows of its own
_WHAT = "inputs"
_OPTIONS = "scheduler.max_batch_tokens, scheduler.max_batch_rows or scheduler.max_batch_histories"


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32}
_MOST_VIEWS = 512  # of all buckets: kept where buckets are few, as those of graphs are
_View = TypeVar("_View")


@dataclass(frozen=True)
class PrefillInputs:
    """Views of the histories' part that only the prefill reads."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    kv_slots_T: torch.Tensor
    last_row_H: torch.Tensor
    q_start_H1: torch.Tensor


@dataclass(frozen=True)
class SharedInputs:
    """Views of the histories' part that the prefill and every round read."""

    kv_lens_H: torch.Tensor
    page_table_HP: torch.Tensor


@dataclass(frozen=True)
class CopyInputs:
    """Views of the histories' part that only the copies before a prefill read; all int32 [H]."""

    source_H: torch.Tensor
    target_H: torch.Tensor
    num_tokens_H: torch.Tensor


@dataclass(frozen=True)
class GroupInputs:
    """Views of a group's part. Level 0 of `starts` and `search_of_row` is the root, then each round.

    first_slot_N: unshared slot of each row of round 0. positions: per round, where the token of each of its rows stands.
    """

    history_of_S: torch.Tensor
    rule_row_S: torch.Tensor
    slot_start_S1: torch.Tensor
    starts: tuple[torch.Tensor, ...]
    search_of_row: tuple[torch.Tensor, ...]
    history_row_starts: tuple[torch.Tensor, ...]
    first_slot_N: torch.Tensor
    positions: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Field:
    """An array inside a part: its first byte and what it holds."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """The array inside a part's bytes."""
        return block[self.start : self.end].view(self.dtype).view(self.shape)


class _Layout:
    """Where the arrays of a part lie. Rows of matrices are padded, so that each begins aligned."""

    def __init__(self, arrays: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.fields: dict[str, _Field] = {}
        end = 0
        for name, ((*outer, length), dtype) in arrays.items():
            padded = _aligned(length * dtype.itemsize) // dtype.itemsize
            self.fields[name] = field = _Field(end, (*outer, padded), dtype)
            end = field.end
        self.num_bytes = end

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """All arrays inside a part's bytes on the device."""
        return {name: field.view(block) for name, field in self.fields.items()}

    def host_views(self, block: npt.NDArray[np.uint8]) -> Arrays:
        """All arrays inside a part's bytes on the host."""
        return {
            name: block[field.start : field.end].view(_NUMPY[field.dtype]).reshape(field.shape)
            for name, field in self.fields.items()
        }


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _history_layout(c: Capacities) -> _Layout:
    return _Layout(
        {
            "last_row": ((c.num_histories,), torch.int64),
            "q_start": ((c.num_histories + 1,), torch.int32),
            "kv_lens": ((c.num_histories,), torch.int32),
            "copies": ((3, c.num_histories), torch.int32),
            "page_table": ((c.num_histories, c.num_pages_per_history), torch.int32),
            "token_ids": ((c.num_tokens,), torch.int64),
            "positions": ((c.num_tokens,), torch.int64),
            "kv_slots": ((c.num_tokens,), torch.int64),
        }
    )


def _group_layout(c: Capacities) -> _Layout:
    levels = c.num_levels
    return _Layout(
        {
            "history_of": ((c.num_searches,), torch.int64),
            "rule_row": ((c.num_searches,), torch.int32),
            "slot_start": ((c.num_searches + 1,), torch.int32),
            "starts": ((levels + 1, c.num_searches + 1), torch.int32),
            "search_of_row": ((levels + 1, c.num_rows), torch.int32),
            "history_row_starts": ((levels, c.num_histories + 1), torch.int32),
            "first_slot": ((c.num_rows,), torch.int32),
            "row_positions": ((levels, c.num_rows), torch.int64),
        }
    )


class _Entry:
    """What a batch in flight owns, with room for that many groups: pinned memory, where its copy lands, and host views."""

    def __init__(self, num_groups: int, group: _Layout, history: _Layout, device: Device) -> None:
        self.num_groups = num_groups
        shape = (num_groups * group.num_bytes + history.num_bytes,)
        self.pinned = allocate_pinned(device, shape, torch.uint8, what=_WHAT, lower=_OPTIONS)
        self.landed = allocate(shape, torch.uint8, device.torch_device, what=_WHAT, lower=_OPTIONS)
        self._group_bytes = group.num_bytes
        host = self.pinned.numpy()
        starts = [self.group_start(number) for number in range(num_groups)]
        self.groups = [GroupPart(group.host_views(host[start:])) for start in starts]
        self.histories = history.host_views(host[num_groups * group.num_bytes :])
        # Cut once: from group number i to the end, and group number i alone.
        self.to_send = [(self.landed[start:], self.pinned[start:]) for start in starts]
        self.landed_groups = [self.landed[start : start + group.num_bytes] for start in starts]

    @property
    def first_pinned(self) -> torch.Tensor:
        """The pinned memory of group 0 and the histories, which is as large as the block."""
        return self.to_send[0][1]

    def group_start(self, number: int) -> int:
        """The first byte of a group's part."""
        return (self.num_groups - 1 - number) * self._group_bytes


class InputBuffers:
    """The block that segments read, and an entry for each batch in flight. is_capturing: whether the device may be asked for graphs."""

    def __init__(self, capacities: Capacities, device: Device, *, is_capturing: bool) -> None:
        self._device = device
        self._group, self._history = _group_layout(capacities), _history_layout(capacities)
        self._dummy_slot = capacities.num_rows  # behind all slots that rows may have
        num_bytes = self._group.num_bytes + self._history.num_bytes
        self._block = allocate(
            (num_bytes,), torch.uint8, device.torch_device, what=_WHAT, lower=_OPTIONS
        )
        self._of_group = self._group.views(self._block)
        self._of_histories = self._history.views(self._block[self._group.num_bytes :])
        self._group_block = self._block[: self._group.num_bytes]
        self._entries = [self._new_entry(1) for _ in range(capacities.num_batches)]
        repeated = device.repeated_copy if is_capturing else partial(partial, device.copy)
        self._send_first = [repeated(self._block, entry.first_pinned) for entry in self._entries]
        self._row_plans = RowPlans(self._dummy_slot)
        self._cuts: dict[Hashable, object] = {}

    def _new_entry(self, num_groups: int) -> _Entry:
        return _Entry(num_groups, self._group, self._history, self._device)

    def reserve(self, entry: int, num_groups: int) -> None:
        """Have room for that many groups in an entry that no batch in flight owns; not inside a segment."""
        if self._entries[entry].num_groups < num_groups:
            self._entries[entry] = own = self._new_entry(num_groups)
            # Making a repeated copy is not for while batches run.
            self._send_first[entry] = partial(self._device.copy, self._block, own.first_pinned)

    def prefill_view(self, bucket: PrefillBucket) -> PrefillInputs:
        """The block cut to `bucket`; equal buckets see equal addresses."""
        return self._cut(bucket, lambda: self._cut_prefill(bucket))

    def copy_view(self, num_histories: int) -> CopyInputs:
        """The block cut to the copies of so many histories; equal numbers see equal addresses."""
        rows = self._of_histories["copies"]
        return self._cut(
            ("copies", num_histories), lambda: CopyInputs(*(row[:num_histories] for row in rows))
        )

    def shared_view(self, bucket: SharedBucket) -> SharedInputs:
        """The block cut to `bucket`; equal buckets see equal addresses."""
        return self._cut(bucket, lambda: self._cut_shared(bucket))

    def group_view(self, bucket: RoundsBucket, shared: SharedBucket) -> GroupInputs:
        """The block cut to the buckets; equal buckets see equal addresses."""
        return self._cut((bucket, shared), lambda: self._cut_group(bucket, shared))

    def _cut(self, key: Hashable, cut: Callable[[], _View]) -> _View:
        """What was cut for a bucket: cutting costs the host microseconds for each tensor, batch by batch."""
        found = self._cuts.get(key)
        if found is None:
            if len(self._cuts) >= _MOST_VIEWS:
                self._cuts.clear()
            found = self._cuts[key] = cut()
        return cast("_View", found)

    def _cut_prefill(self, bucket: PrefillBucket) -> PrefillInputs:
        t, h, d = bucket.num_tokens, bucket.shared.num_histories, self._of_histories
        return PrefillInputs(
            token_ids_T=d["token_ids"][:t],
            positions_T=d["positions"][:t],
            kv_slots_T=d["kv_slots"][:t],
            last_row_H=d["last_row"][:h],
            q_start_H1=d["q_start"][: h + 1],
        )

    def _cut_shared(self, bucket: SharedBucket) -> SharedInputs:
        h, d = bucket.num_histories, self._of_histories
        return SharedInputs(
            kv_lens_H=d["kv_lens"][:h], page_table_HP=d["page_table"][:h, : bucket.num_pages]
        )

    def _cut_group(self, bucket: RoundsBucket, shared: SharedBucket) -> GroupInputs:
        s, h, d = bucket.num_searches, shared.num_histories, self._of_group
        rows = (s, *bucket.rows)
        return GroupInputs(
            history_of_S=d["history_of"][:s],
            rule_row_S=d["rule_row"][:s],
            slot_start_S1=d["slot_start"][: s + 1],
            starts=tuple(row[: s + 1] for row in d["starts"][: len(rows)]),
            search_of_row=tuple(d["search_of_row"][i, :n] for i, n in enumerate(rows)),
            history_row_starts=tuple(
                row[: h + 1] for row in d["history_row_starts"][: len(bucket.rows)]
            ),
            first_slot_N=d["first_slot"][: bucket.rows[0]],
            positions=tuple(d["row_positions"][i, :n] for i, n in enumerate(bucket.rows)),
        )

    def fill(
        self,
        entry: int,
        histories: PackedHistories,
        prefill: PrefillBucket,
        groups: Sequence[tuple[SearchGroup, RoundsBucket, Sequence[int]]],
    ) -> None:
        """Write a batch and its padding into an entry's pinned memory.

        groups: each with its bucket and with the row of `alive` of each of its searches.
        """
        # Cut outside of segments, which are the same run by run.
        self.prefill_view(prefill)
        self.shared_view(prefill.shared)
        self.copy_view(prefill.shared.num_histories)
        own = self._entries[entry]
        fill_histories(own.histories, histories, prefill)
        for part, (group, bucket, rule_rows) in zip(own.groups, groups, strict=False):
            plan = self._row_plans.of(group, bucket, prefill.shared, histories.num_histories)
            part.fill(plan, group, histories, rule_rows)

    def send(self, entry: int, num_groups: int) -> None:
        """Issue the one copy of what was filled to the device."""
        self._device.copy(*self._entries[entry].to_send[num_groups - 1])

    def send_first(self, entry: int) -> None:
        """Issue the one copy of an entry's histories and first group straight into the block, which nobody reads then."""
        self._send_first[entry]()

    def put_first(self, entry: int) -> None:
        """Bring an entry's histories and its first group into the block; ordered behind the entry's copy by the caller."""
        landed, _ = self._entries[entry].to_send[0]
        self._device.copy(self._block, landed)

    def put_group(self, entry: int, number: int) -> None:
        """Bring another group of an entry into the block."""
        self._device.copy(self._group_block, self._entries[entry].landed_groups[number])
