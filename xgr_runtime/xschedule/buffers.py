"""The static inputs of a batch: allocated once, filled from pinned memory, seen by segments as views of one address.

The groups of a batch use the same device tensors one after the other: their copies and segments are issued in order on
one stream, so a later group's inputs cannot arrive before an earlier group's rounds have read theirs. The host runs
ahead of that stream, so each group has pinned memory of its own, which is free again when the batch has ended.

Padding: tokens go to the null page, histories have length 0, rows belong to search number S (one past the last),
which is the bucket's number of searches.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from xgr_runtime.hal.device import Device
from xgr_runtime.hal.memory import allocate, allocate_pinned
from xgr_runtime.kvcache.allocator import NULL_PAGE
from xgr_runtime.xschedule.batch import PackedHistories, SearchGroup
from xgr_runtime.xschedule.buckets import PrefillBucket, RoundsBucket, SharedBucket
from xgr_runtime.xschedule.capacities import Capacities

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class PrefillInputs:
    """Views of the histories' buffers that only the prefill reads."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    kv_slots_T: torch.Tensor
    last_row_H: torch.Tensor
    q_start_H1: torch.Tensor


@dataclass(frozen=True)
class SharedInputs:
    """Views of the histories' buffers that the prefill and every round read."""

    kv_lens_H: torch.Tensor
    page_table_HP: torch.Tensor


@dataclass(frozen=True)
class GroupInputs:
    """Views of a group's buffers. Level 0 of `starts` and `search_of_row` is the root, then each round."""

    history_of_S: torch.Tensor
    history_len_S1: torch.Tensor
    rule_row_S: torch.Tensor
    slot_start_S1: torch.Tensor
    starts: tuple[torch.Tensor, ...]
    search_of_row: tuple[torch.Tensor, ...]
    history_row_starts: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Mirror:
    """Pinned memory as the device copies it and as the host writes it."""

    tensor: torch.Tensor
    array: npt.NDArray[np.generic]


class _Mirrored:
    """Device tensors by name, and pinned host mirrors of all of them as often as reserved.

    options: those that the sizes follow.
    """

    def __init__(self, shapes: Shapes, device: Device, options: str) -> None:
        self._shapes, self._device, self._options = shapes, device, options
        self.tensors = {
            name: allocate(
                shape, dtype, device.torch_device, what=f"inputs ({name})", lower=options
            )
            for name, (shape, dtype) in shapes.items()
        }
        self._mirrors: list[dict[str, _Mirror]] = []
        self.reserve(1)

    def reserve(self, num_mirrors: int) -> None:
        """Allocate mirrors up to that number; not inside a segment."""
        while len(self._mirrors) < num_mirrors:
            mirror = {}
            for name, (shape, dtype) in self._shapes.items():
                what = f"inputs ({name})"
                tensor = allocate_pinned(self._device, shape, dtype, what=what, lower=self._options)
                mirror[name] = _Mirror(tensor, tensor.numpy())
            self._mirrors.append(mirror)

    def put(
        self,
        name: str,
        values: npt.NDArray[np.generic],
        size: int,
        padding: int,
        *,
        mirror: int = 0,
        row: int | None = None,
    ) -> None:
        """Write values and padding up to `size` into a mirror and issue their copy to the device."""
        pinned, target = self._mirrors[mirror][name], self.tensors[name]
        host, array = pinned.tensor, pinned.array
        if row is not None:
            host, array, target = host[row], array[row], target[row]
        array[: len(values)] = values
        array[len(values) : size] = padding
        self._device.copy(target[:size], host[:size])

    def put_table(self, name: str, values: npt.NDArray[np.generic], padding: int) -> None:
        """Write a matrix into the corner of the first mirror, padding around it; issue the copy of the whole."""
        pinned = self._mirrors[0][name]
        pinned.array[:] = padding
        pinned.array[: values.shape[0], : values.shape[1]] = values
        self._device.copy(self.tensors[name], pinned.tensor)


class HistoryBuffers:
    """What a batch's histories bring to the device."""

    def __init__(self, capacities: Capacities, device: Device) -> None:
        c = capacities
        self._buffers = _Mirrored(
            {
                "token_ids": ((c.num_tokens,), torch.int64),
                "positions": ((c.num_tokens,), torch.int64),
                "kv_slots": ((c.num_tokens,), torch.int64),
                "last_row": ((c.num_histories,), torch.int64),
                "q_start": ((c.num_histories + 1,), torch.int32),
                "kv_lens": ((c.num_histories,), torch.int32),
                "page_table": ((c.num_histories, c.num_pages_per_history), torch.int32),
            },
            device,
            "scheduler.max_batch_tokens or scheduler.max_batch_histories",
        )

    def prefill_view(self, bucket: PrefillBucket) -> PrefillInputs:
        """The buffers cut to `bucket`; equal buckets see equal addresses."""
        t, h, d = bucket.num_tokens, bucket.shared.num_histories, self._buffers.tensors
        return PrefillInputs(
            token_ids_T=d["token_ids"][:t],
            positions_T=d["positions"][:t],
            kv_slots_T=d["kv_slots"][:t],
            last_row_H=d["last_row"][:h],
            q_start_H1=d["q_start"][: h + 1],
        )

    def shared_view(self, bucket: SharedBucket) -> SharedInputs:
        """The buffers cut to `bucket`; equal buckets see equal addresses."""
        h, d = bucket.num_histories, self._buffers.tensors
        return SharedInputs(
            kv_lens_H=d["kv_lens"][:h], page_table_HP=d["page_table"][:h, : bucket.num_pages]
        )

    def fill(self, histories: PackedHistories, bucket: PrefillBucket) -> None:
        """Issue the copies of the histories and their padding."""
        t, h, put = bucket.num_tokens, bucket.shared.num_histories, self._buffers.put
        q_start_H1 = histories.q_start_H1
        put("token_ids", histories.token_ids_T, t, 0)
        put("positions", histories.positions_T, t, 0)
        put("kv_slots", histories.kv_slots_T, t, 0)
        put("last_row", q_start_H1[1:].astype(np.int64) - 1, h, 0)
        put("q_start", q_start_H1, h + 1, int(q_start_H1[-1]))
        put("kv_lens", histories.kv_lens_H, h, 0)
        self._buffers.put_table("page_table", histories.page_table_HP, NULL_PAGE)


class GroupBuffers:
    """What a group's searches bring to the device. number: the group's place in its batch."""

    def __init__(self, capacities: Capacities, device: Device) -> None:
        c, levels = capacities, capacities.num_levels
        self._buffers = _Mirrored(
            {
                "history_of": ((c.num_searches,), torch.int64),
                "history_len": ((c.num_searches + 1,), torch.int64),
                "rule_row": ((c.num_searches,), torch.int32),
                "slot_start": ((c.num_searches + 1,), torch.int32),
                "starts": ((levels + 1, c.num_searches + 1), torch.int32),
                "search_of_row": ((levels + 1, c.num_rows), torch.int32),
                "history_row_starts": ((levels, c.num_histories + 1), torch.int32),
            },
            device,
            "scheduler.max_batch_rows or scheduler.max_batch_histories",
        )

    def reserve(self, num_groups: int) -> None:
        """Have pinned memory for that many groups of a batch; not inside a segment."""
        self._buffers.reserve(num_groups)

    def view(self, bucket: RoundsBucket, shared: SharedBucket) -> GroupInputs:
        """The buffers cut to the buckets; equal buckets see equal addresses."""
        s, h, d = bucket.num_searches, shared.num_histories, self._buffers.tensors
        rows = (s, *bucket.rows)
        return GroupInputs(
            history_of_S=d["history_of"][:s],
            history_len_S1=d["history_len"][: s + 1],
            rule_row_S=d["rule_row"][:s],
            slot_start_S1=d["slot_start"][: s + 1],
            starts=tuple(row[: s + 1] for row in d["starts"][: len(rows)]),
            search_of_row=tuple(d["search_of_row"][i, :n] for i, n in enumerate(rows)),
            history_row_starts=tuple(
                row[: h + 1] for row in d["history_row_starts"][: len(bucket.rows)]
            ),
        )

    def fill(
        self,
        number: int,
        group: SearchGroup,
        histories: PackedHistories,
        bucket: RoundsBucket,
        shared: SharedBucket,
        rule_rows: list[int],
    ) -> None:
        """Issue the copies of a group and its padding. rule_rows: the row of `alive` of each search."""
        s, put = bucket.num_searches, self._buffers.put
        put("history_of", group.history_of_S.astype(np.int64), s, 0, mirror=number)
        lengths = histories.kv_lens_H.astype(np.int64)[group.history_of_S]
        put("history_len", lengths, s + 1, 0, mirror=number)
        put("rule_row", np.asarray(rule_rows, dtype=np.int32), s, 0, mirror=number)
        slot_starts = group.slot_starts()
        put("slot_start", slot_starts, s + 1, int(slot_starts[-1]), mirror=number)
        for level in range(-1, group.num_levels):
            starts = group.row_starts(level)
            rows = np.repeat(np.arange(group.num_searches, dtype=np.int32), np.diff(starts))
            num_rows = s if level < 0 else bucket.rows[level]
            put("starts", starts, s + 1, int(starts[-1]), mirror=number, row=level + 1)
            put("search_of_row", rows, num_rows, s, mirror=number, row=level + 1)
        for level, widths in enumerate(group.widths_SL.T):
            of_history = np.bincount(group.history_of_S, widths, histories.num_histories)
            ends = np.concatenate([[0], np.cumsum(of_history)]).astype(np.int32)
            size, padding = shared.num_histories + 1, int(ends[-1])
            put("history_row_starts", ends, size, padding, mirror=number, row=level)
