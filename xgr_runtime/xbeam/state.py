"""All tensors of a running group of searches, in one contiguous block: one copy brings the whole outcome to the host.

Groups and batches run one after the other on one state. What one has left is kept: copied on the device, so that the next
one may begin, and from there to pinned memory on the lane `results`. Both places are the group's own until its batch has
ended; each batch in flight has an *entry* of them.

Shape table (N = row capacity, L levels, S = search capacity):
  block     int32 [3 L N + S + 1 + 4]   scores | nodes | parents of every level, then status_S1, then two int64 counters
  codes     int32 [L, N]                code chosen at each level (device only)
  root      int32 [4 S]                 scores | nodes | parents | codes of one parent row per search, all 0: behind the block in
                                        the same memory, so that one fill clears status, counters and these
  slots     int32 [2, N]                unshared KV slot of each row, before and after a reorder; round 0's are inputs
The row ranges (`start_S1`) and the search of each row are inputs of the batch, not state.
"""

from dataclasses import dataclass

import torch

from xgr_runtime.hal.device import Device
from xgr_runtime.hal.memory import allocate, allocate_pinned
from xgr_runtime.hal.ops.beam import BeamRows

_WHAT = "beams"
_OPTIONS = "scheduler.max_batch_rows or scheduler.max_batch_histories"


@dataclass(frozen=True)
class BeamOutcome:
    """Host views of a group's block after its batch. scores fp32 [L, N], nodes and parents int32 [L, N]."""

    scores_LN: torch.Tensor
    nodes_LN: torch.Tensor
    parents_LN: torch.Tensor
    status_S1: torch.Tensor
    counters: torch.Tensor


@dataclass(frozen=True)
class _Kept:
    """The outcome of a group of a batch in flight, on the device and on the host."""

    block: torch.Tensor
    pinned: torch.Tensor
    outcome: BeamOutcome


class BeamState:
    """Reused from group to group; nothing is allocated between rounds. num_batches: how many are in flight at once."""

    def __init__(
        self,
        num_levels: int,
        row_capacity: int,
        search_capacity: int,
        device: Device,
        num_batches: int = 1,
    ) -> None:
        self.num_levels, self.row_capacity, self.search_capacity = (
            num_levels,
            row_capacity,
            search_capacity,
        )
        rows = 3 * num_levels * row_capacity
        size = rows + search_capacity + 1
        self._counters_at = size + size % 2
        block_size, root_size = self._counters_at + 4, 4 * search_capacity
        memory = _allocate((block_size + root_size,), torch.int32, device)
        self._block, root = memory[:block_size], memory[block_size:]
        self._cleared = memory[rows:]
        self._device = device
        self._kept: list[list[_Kept]] = [[] for _ in range(num_batches)]
        for entry in range(num_batches):
            self.reserve(entry, 1)
        self._views = self._split(self._block)
        self.codes_LN = _allocate((num_levels, row_capacity), torch.int32, device)
        self.root_scores_S = root[:search_capacity].view(torch.float32)
        self.root_ints_S = root[search_capacity:].view(3, search_capacity)
        self.slots_2N = _allocate((2, row_capacity), torch.int32, device)

    @property
    def status_S1(self) -> torch.Tensor:  # noqa: N802 - the suffix is its shape
        """int32 [search capacity + 1]: 0, or 1 + the round whose normaliser read NaN or +inf."""
        return self._views.status_S1

    @property
    def counters(self) -> torch.Tensor:
        """int64 [2]: live parent rows, rows skipped by early termination."""
        return self._views.counters

    def reserve(self, entry: int, num_groups: int) -> None:
        """Have places for the outcomes of that many groups in an entry; not inside a segment."""
        shape, dtype = self._block.shape, self._block.dtype
        while len(self._kept[entry]) < num_groups:
            pinned = allocate_pinned(self._device, shape, dtype, what=_WHAT, lower=_OPTIONS)
            kept = _Kept(_allocate(shape, dtype, self._device), pinned, self._split(pinned))
            self._kept[entry].append(kept)

    def reset(self) -> None:
        """Make the root rows and the counters ready; part of the first segment."""
        self._cleared.zero_()

    def clear(self) -> None:
        """Leave rows that any catalogue has, node 0 and code 0: those of a batch before may be beyond this one's."""
        self._block.zero_()
        self.codes_LN.zero_()

    def root(
        self, num_searches: int, start_S1: torch.Tensor, search_of_row_N: torch.Tensor
    ) -> BeamRows:
        """The parent rows of round 0."""
        node, parent, code = (row[:num_searches] for row in self.root_ints_S)
        return BeamRows(
            self.root_scores_S[:num_searches], node, parent, code, start_S1, search_of_row_N
        )

    def rows(
        self, level: int, num_rows: int, start_S1: torch.Tensor, search_of_row_N: torch.Tensor
    ) -> BeamRows:
        """The rows that round `level` writes, cut to the bucket's `num_rows`."""
        return BeamRows(
            self._views.scores_LN[level, :num_rows],
            self._views.nodes_LN[level, :num_rows],
            self._views.parents_LN[level, :num_rows],
            self.codes_LN[level, :num_rows],
            start_S1,
            search_of_row_N,
        )

    def keep(self, entry: int, number: int) -> None:
        """Keep the outcome of a batch's group number `number`: from here on the next group or batch may run."""
        self._device.copy(self._kept[entry][number].block, self._block)

    def copy_to_host(self, entry: int, number: int) -> BeamOutcome:
        """Issue the one copy of an outcome that was kept; the views are valid once the device has done it."""
        kept = self._kept[entry][number]
        self._device.copy(kept.pinned, kept.block)
        return kept.outcome

    def _split(self, block: torch.Tensor) -> BeamOutcome:
        shape = (self.num_levels, self.row_capacity)
        part = self.num_levels * self.row_capacity
        status_end = 3 * part + self.search_capacity + 1
        return BeamOutcome(
            scores_LN=block[:part].view(torch.float32).view(shape),
            nodes_LN=block[part : 2 * part].view(shape),
            parents_LN=block[2 * part : 3 * part].view(shape),
            status_S1=block[3 * part : status_end],
            counters=block[self._counters_at : self._counters_at + 4].view(torch.int64),
        )


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> torch.Tensor:
    return allocate(shape, dtype, device.torch_device, what=_WHAT, lower=_OPTIONS)
