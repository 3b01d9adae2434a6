"""What the runtime asks of a device: streams, events, copies, memory, and graphs. Nothing about ops.

The contract is the strictest device's: inside a captured segment shapes are static, addresses are fixed, nothing is
read by the host and nothing synchronises. CPU and CUDA fit under it.

Work is issued to lanes: in a lane it is done in order, lanes run beside each other, and what one lane does after another is
said with events. There are as few as keep a device busy, because an NPU has few streams: `compute` runs every segment;
`inputs` brings what a batch reads while the batch before it runs; `results` takes outcomes back; `loads` fills catalogues,
which take long, so that neither of the others waits behind them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Lane = Literal["compute", "inputs", "results", "loads"]
LANES: tuple[Lane, ...] = ("compute", "inputs", "results", "loads")


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes in use by this process, the peak since start, and the device's total (0 where it is not known).

    taken_bytes: of the whole device, by whomever and for whatever, as its driver counts; 0 where it does not.
    """

    used_bytes: int
    peak_bytes: int
    total_bytes: int
    taken_bytes: int = 0


class Event(Protocol):
    """A point in a device's work."""

    def is_done(self) -> bool: ...
    def wait(self) -> None: ...


class Timer(Protocol):
    """Numbered points in a device's work, and the time between them.

    Recording waits for nothing and is legal inside a captured segment: every replay then records its points anew.
    """

    def record(self, point: int) -> None:
        """Mark the work issued so far on the current lane."""
        ...

    def seconds(self, start: int, end: int) -> float:
        """From one point's last recording to another's; only once the device has done that work. NaN where one was never
        recorded: a device that cannot time inside graphs leaves those points out.
        """
        ...


class Kernel(Protocol):
    """A program of the device that is compiled when it is first started. Equal ones are the same."""

    @property
    def name(self) -> str:
        """For people; kernels of one name differ in sizes and types."""
        ...

    def make_ready(self) -> None:
        """Compile and load it, from any thread and beside others. Raises what its first start would."""
        ...

    def __hash__(self) -> int: ...


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

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        """Inside, this thread's copies, events, points of timers and ops belong to that lane. Outside of it they are `compute`'s."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device, or on the device, ordered on the current lane, without waiting."""
        ...

    def repeated_copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Issues, each time it is called inside the lane `compute`, the copy between those two, as cheaply for the host as can be.

        It may be a captured graph: made between batches. source: pinned, where it is the host's.
        """
        ...

    def record_event(self) -> Event:
        """An event after all work issued so far on the current lane."""
        ...

    def follow(self, event: Event) -> None:
        """What this thread issues next on its current lane comes after the event, one of this device. The host does not wait."""
        ...

    def timer(self) -> Timer:
        """A timer without points; it may outlive a batch and be recorded again."""
        ...

    def segment(self, name: str, lane: Lane = "compute") -> AbstractContextManager[None]:
        """Brackets a segment of a batch, on its lane as by `on`; a device may check its rules there."""
        ...

    def capture(self, name: str, fn: Callable[[], None]) -> Graph:
        """Record `fn`, which only touches tensors that outlive the graph. May run it on the way: results are for replays."""
        ...

    @property
    def is_compiling(self) -> bool:
        """Whether ops compile kernels at their first start, and `missing_kernels` can tell which."""
        ...

    def missing_kernels(self, name: str, fn: Callable[[], None]) -> Sequence[Kernel]:
        """The kernels that `fn`, a segment as `capture` takes it, would have to have compiled first. It runs nothing on the device.

        Only where `is_compiling`.
        """
        ...

    def sharing(self) -> AbstractContextManager[None]:
        """Brackets work of a thread beside the one that runs batches: where that would break a capture, neither runs while
        the other does. For short work; a `copy` needs no bracket.
        """
        ...

    def memory(self) -> MemoryInfo: ...
    def synchronize(self) -> None:
        """Wait for all lanes."""
        ...
