"""The CPU as a device: everything is synchronous, a graph is a call."""

import math
import platform
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from xgr_runtime.hal.device import Event, Graph, Kernel, Lane, MemoryInfo, Timer


class _DoneEvent:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class CpuTimer:
    """Nothing runs behind the caller's back, so a point is the time of the call."""

    def __init__(self) -> None:
        self._times_s: dict[int, float] = {}

    def record(self, point: int) -> None:
        self._times_s[point] = time.perf_counter()

    def seconds(self, start: int, end: int) -> float:
        return self._times_s.get(end, math.nan) - self._times_s.get(start, math.nan)


class _EagerGraph:
    def __init__(self, fn: Callable[[], None]) -> None:
        self._fn = fn

    def replay(self, kv_lens: Sequence[int] = ()) -> None:
        self._fn()


class CpuDevice:
    """The host processor."""

    kind = "cpu"
    capability = ""
    is_capturing_supported = False
    is_graph_per_round = False
    is_prefill_captured = False
    max_graphs = 0
    is_counting_shared_pages = False
    is_compiling = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.name = platform.processor() or platform.machine()

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def repeated_copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        return partial(self.copy, target, source)

    def record_event(self) -> _DoneEvent:
        return _DoneEvent()

    def follow(self, event: Event) -> None:
        return None

    def timer(self) -> Timer:
        return CpuTimer()

    @contextmanager
    def segment(self, name: str, lane: Lane = "compute") -> Iterator[None]:
        yield

    def capture(self, name: str, fn: Callable[[], None]) -> Graph:
        return _EagerGraph(fn)

    def missing_kernels(self, name: str, fn: Callable[[], None]) -> Sequence[Kernel]:
        return ()

    def sharing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def memory(self) -> MemoryInfo:
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return MemoryInfo(_resident_bytes() or peak_bytes, peak_bytes, total_bytes=0)

    def synchronize(self) -> None:
        return None


def _resident_bytes() -> int:
    """Resident bytes of this process, 0 where the kernel does not say."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * resource.getpagesize()
