"""Host memory that copies to the device are issued from, taken piece by piece, and free again when the device has it.

A piece of pinned memory may not be written anew before its copy is done. Pieces are taken and become free in order, so a
ring is enough: nobody waits as long as what is under way fits into it. Where it does not, `take` waits for the oldest copies.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from xgr_runtime.hal.device import Device, Event
from xgr_runtime.hal.memory import allocate_pinned

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Piece:
    """uint8 memory as the device copies it and as the host writes it."""

    tensor: torch.Tensor
    array: npt.NDArray[Any]


class PinnedRing:
    """Belongs to one thread. what, lower: as in `allocate_pinned`."""

    def __init__(self, device: Device, num_bytes: int, *, what: str, lower: str) -> None:
        self._device = device
        self._size = _aligned(num_bytes)
        self._block = allocate_pinned(device, (self._size,), torch.uint8, what=what, lower=lower)
        self._array = self._block.numpy()
        # Bytes since the start: taken, covered by an event, and free again.
        self._head = self._marked = self._tail = 0
        self._under_way: deque[tuple[int, Event]] = deque()

    def take(self, num_bytes: int) -> Piece:
        """The next piece. The copies out of every piece before it must have been issued."""
        size = _aligned(num_bytes)
        assert size <= self._size, (num_bytes, self._size)
        start = self._head
        if start % self._size + size > self._size:  # a piece has no gap
            start += self._size - start % self._size
        while start + size > self._tail + self._size:
            self._free_oldest(start)
        self._head = start + size
        place = slice(start % self._size, start % self._size + num_bytes)
        return Piece(self._block[place], self._array[place])

    def issued(self) -> None:
        """All copies out of what was taken are issued on the current lane."""
        if self._head > self._marked:
            self._under_way.append((self._head, self._device.record_event()))
            self._marked = self._head

    def _free_oldest(self, next_start: int) -> None:
        if not self._under_way:
            self.issued()
        if not self._under_way:
            self._tail = next_start
            return
        end, event = self._under_way[0]
        event.wait()
        self._under_way.popleft()
        self._tail = end


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
