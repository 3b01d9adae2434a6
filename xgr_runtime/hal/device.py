"""What the runtime asks of a device: streams, events, copies, memory, and graphs. Nothing about ops.

The contract is the strictest device's: inside a captured segment shapes are static, addresses are fixed, nothing is
read by the host and nothing synchronises. CPU and CUDA fit under it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes in use by this process, the peak since start, and the device's total (0 where it is not known)."""

    used_bytes: int
    peak_bytes: int
    total_bytes: int


class Event(Protocol):
    """A point in a device's work."""

    def is_done(self) -> bool: ...
    def wait(self) -> None: ...


class Timer(Protocol):
    """Numbered points in a device's work, and the time between them.

    Recording waits for nothing and is legal inside a captured segment: every replay then records its points anew.
    """

    def record(self, point: int) -> None:
        """Mark the work issued so far on the current stream."""
        ...

    def seconds(self, start: int, end: int) -> float:
        """From one point's last recording to another's; only once the device has done that work. NaN where one was never
        recorded: a device that cannot time inside graphs leaves those points out.
        """
        ...


class Graph(Protocol):
    """A captured segment."""

    def replay(self, kv_lens: Sequence[int] = ()) -> None:
        """Repeat it on the same addresses.

        kv_lens: the lengths of the batch's histories as the host knows them. A kernel that took them from the host at capture
        (`shared_attention` of an Ascend NPU) is given these; every other number of the host is that of the capture.
        """
        ...


class Device(Protocol):
    """One device of one process."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def capability(self) -> str: ...
    @property
    def torch_device(self) -> torch.device: ...
    @property
    def is_capturing_supported(self) -> bool: ...
    @property
    def is_graph_per_round(self) -> bool: ...
    @property
    def is_prefill_captured(self) -> bool:
        """False where a prefill's kernels take the lengths of new tokens from the host, which no replay can change."""
        ...

    @property
    def max_graphs(self) -> int:
        """How many graphs may exist at once."""
        ...

    @property
    def is_counting_shared_pages(self) -> bool:
        """True where a kernel wants as many pages to exist as the histories of a batch name, shared ones each time, and one for
        each padding history."""
        ...

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that copies to and from the device without staging."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device, ordered on the current stream, without waiting."""
        ...

    def record_event(self) -> Event:
        """An event after all work issued so far on the current stream."""
        ...

    def timer(self) -> Timer:
        """A timer without points; it may outlive a batch and be recorded again."""
        ...

    def segment(self, name: str) -> AbstractContextManager[None]:
        """Brackets a segment of a batch; a device may check its rules there."""
        ...

    def capture(self, name: str, fn: Callable[[], None]) -> Graph:
        """Record `fn`, which only touches tensors that outlive the graph. May run it on the way: results are for replays."""
        ...

    def sharing(self) -> AbstractContextManager[None]:
        """Brackets work of a thread beside the one that runs batches: where that would break a capture, neither runs while
        the other does. For short work; a `copy` needs no bracket.
        """
        ...

    def memory(self) -> MemoryInfo: ...
    def synchronize(self) -> None: ...
