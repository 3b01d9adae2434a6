"""The static inputs of a batch: allocated once, filled from pinned memory, seen by segments as views of one address.

Padding: tokens go to the null page, histories have length 0, rows belong to search number S (one past the last),
which is the bucket's number of searches.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from xgr_runtime.hal.device import Device
from xgr_runtime.xschedule.batch import Batch
from xgr_runtime.xschedule.buckets import Bucket
from xgr_runtime.xschedule.capacities import Capacities


@dataclass(frozen=True)
class BatchInputs:
    """Views of the buffers cut to a bucket. Level 0 of `starts` and `search_of_row` is the root, then each round."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    kv_slots_T: torch.Tensor
    last_row_H: torch.Tensor
    q_start_H1: torch.Tensor
    kv_lens_H: torch.Tensor
    page_table_HP: torch.Tensor
    history_of_S: torch.Tensor
    history_len_S1: torch.Tensor
    rule_row_S: torch.Tensor
    slot_start_S1: torch.Tensor
    starts: tuple[torch.Tensor, ...]
    search_of_row: tuple[torch.Tensor, ...]
    history_row_starts: tuple[torch.Tensor, ...]


class InputBuffers:
    """Device tensors and their pinned host mirrors, by name."""

    def __init__(self, capacities: Capacities, device: Device) -> None:
        c = self._capacities = capacities
        self._device = device
        levels = c.num_levels
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "token_ids": ((c.num_tokens,), torch.int64),
            "positions": ((c.num_tokens,), torch.int64),
            "kv_slots": ((c.num_tokens,), torch.int64),
            "last_row": ((c.num_histories,), torch.int64),
            "q_start": ((c.num_histories + 1,), torch.int32),
            "kv_lens": ((c.num_histories,), torch.int32),
            "page_table": ((c.num_histories, c.num_pages_per_history), torch.int32),
            "history_of": ((c.num_searches,), torch.int64),
            "history_len": ((c.num_searches + 1,), torch.int64),
            "rule_row": ((c.num_searches,), torch.int32),
            "slot_start": ((c.num_searches + 1,), torch.int32),
            "starts": ((levels + 1, c.num_searches + 1), torch.int32),
            "search_of_row": ((levels + 1, c.num_rows), torch.int32),
            "history_row_starts": ((levels, c.num_histories + 1), torch.int32),
        }
        self._device_tensors = {
            name: torch.zeros(shape, dtype=dtype, device=device.torch_device)
            for name, (shape, dtype) in shapes.items()
        }
        self._host = {
            name: device.pinned_empty(shape, dtype).zero_()
            for name, (shape, dtype) in shapes.items()
        }
        self._arrays: dict[str, npt.NDArray[np.generic]] = {
            name: t.numpy() for name, t in self._host.items()
        }

    def view(self, bucket: Bucket) -> BatchInputs:
        """The buffers cut to `bucket`; equal buckets see equal addresses."""
        t, h, s = bucket.num_tokens, bucket.num_histories, bucket.num_searches
        d = self._device_tensors
        rows = (s, *bucket.rows)
        return BatchInputs(
            token_ids_T=d["token_ids"][:t],
            positions_T=d["positions"][:t],
            kv_slots_T=d["kv_slots"][:t],
            last_row_H=d["last_row"][:h],
            q_start_H1=d["q_start"][: h + 1],
            kv_lens_H=d["kv_lens"][:h],
            page_table_HP=d["page_table"][:h, : bucket.num_pages],
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

    def fill(self, batch: Batch, bucket: Bucket, rule_rows: list[int]) -> None:
        """Write a batch and its padding into the pinned mirrors and issue the copies to the device."""
        s, h = bucket.num_searches, bucket.num_histories
        lengths = batch.kv_lens_H.astype(np.int64)
        self._put("token_ids", batch.token_ids_T, bucket.num_tokens, 0)
        self._put("positions", batch.positions_T, bucket.num_tokens, 0)
        self._put("kv_slots", batch.kv_slots_T, bucket.num_tokens, 0)
        self._put("last_row", batch.q_start_H1[1:].astype(np.int64) - 1, h, 0)
        self._put("q_start", batch.q_start_H1, h + 1, int(batch.q_start_H1[-1]))
        self._put("kv_lens", batch.kv_lens_H, h, 0)
        self._put_page_table(batch, bucket)
        self._put("history_of", batch.history_of_S.astype(np.int64), s, 0)
        self._put("history_len", lengths[batch.history_of_S], s + 1, 0)
        self._put("rule_row", np.asarray(rule_rows, dtype=np.int32), s, 0)
        slot_starts = batch.slot_starts()
        self._put("slot_start", slot_starts, s + 1, int(slot_starts[-1]))
        for level in range(-1, batch.num_levels):
            self._put_rows(batch, bucket, level)

    def _put_rows(self, batch: Batch, bucket: Bucket, level: int) -> None:
        s = bucket.num_searches
        starts = batch.row_starts(level)
        rows = np.repeat(np.arange(batch.num_searches, dtype=np.int32), np.diff(starts))
        num_rows = s if level < 0 else bucket.rows[level]
        self._put("starts", starts, s + 1, int(starts[-1]), row=level + 1)
        self._put("search_of_row", rows, num_rows, s, row=level + 1)
        if level < 0:
            return
        of_history = np.zeros(batch.num_histories + 1, dtype=np.int64)
        np.add.at(of_history, batch.history_of_S.astype(np.int64) + 1, batch.widths_SL[:, level])
        ends = np.cumsum(of_history).astype(np.int32)
        self._put("history_row_starts", ends, bucket.num_histories + 1, int(ends[-1]), row=level)

    def _put_page_table(self, batch: Batch, bucket: Bucket) -> None:
        num_rows, num_pages = batch.page_table_HP.shape
        host = self._arrays["page_table"]
        host[: bucket.num_histories, : bucket.num_pages] = 0
        host[:num_rows, :num_pages] = batch.page_table_HP
        self._device.copy(self._device_tensors["page_table"], self._host["page_table"])

    def _put(
        self,
        name: str,
        values: npt.NDArray[np.generic],
        size: int,
        padding: int,
        row: int | None = None,
    ) -> None:
        array, host, target = self._arrays[name], self._host[name], self._device_tensors[name]
        if row is not None:
            array, host, target = array[row], host[row], target[row]
        array[: len(values)] = values
        array[len(values) : size] = padding
        self._device.copy(target[:size], host[:size])
