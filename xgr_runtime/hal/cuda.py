"""An NVIDIA GPU as a device. Every lane is a side stream, as capture needs of `compute`; graphs share one memory pool.

Memory is allocated and filled wherever it is made, hence on torch's default stream, with which a side stream is not ordered:
on a busy GPU the zeros of a new buffer would arrive after the first copy into it. So a side stream waits for the default
one whenever a segment or a lane is entered, and before a copy outside of both. (Host memory of a copy is the caller's to
keep.)

What runs beside `compute` is short and somebody waits for it, so those streams have priority over the kernels of a batch.

Catalogues are loaded from other threads while batches run. A copy or event that another thread issues during a capture would be
recorded into the graph's stream or break it, so captures exclude both.
"""

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from xgr_runtime.hal.cuda_graphs import CudaCaptures
from xgr_runtime.hal.device import LANES, Event, Graph, Kernel, Lane, MemoryInfo, Timer


def why_no_cuda() -> str | None:
    """None when a CUDA device can be opened, else the reason."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device or driver"
    return None


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """What the stream is given next waits for this."""
        stream.wait_event(self._event)


class _CudaTimer:
    """One timing event per point, made when the point is first recorded and reused after that.

    The events are external ones: recorded during a capture they become nodes of the graph, so that the rounds inside one
    graph are timed one by one; recorded outside they are ordinary events.
    """

    def __init__(self, device: "CudaDevice") -> None:
        self._device = device
        self._events: dict[int, torch.cuda.Event] = {}

    def record(self, point: int) -> None:
        event = self._events.get(point)
        if event is None:
            event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
            self._events[point] = event
        event.record(self._device.current_stream())

    def seconds(self, start: int, end: int) -> float:
        if start not in self._events or end not in self._events:
            return math.nan
        return float(self._events[start].elapsed_time(self._events[end])) / 1e3


class _Entered:
    """Inside, the thread's stream is that of a lane. A batch enters some, so this is a few calls and no generator.

    In the lane that the thread is in already there is nothing to do.
    """

    __slots__ = ("_before", "_device", "_is_there", "_outer", "_own", "_stream")

    def __init__(self, device: "CudaDevice", stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream

    def __enter__(self) -> None:
        self._is_there = self._device.inside() is self._stream
        if self._is_there:
            return
        # The thread's current device may be another one: setting a stream makes its device the current one.
        self._outer = self._own = torch.cuda.current_stream()
        if self._outer.device_index != self._stream.device_index:
            self._own = torch.cuda.current_stream(self._device.torch_device)
        self._before = self._device.inside()
        self._device.enter(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._is_there:
            return
        self._device.leave(self._before)
        torch.cuda.set_stream(self._own)
        if self._outer is not self._own:
            torch.cuda.set_stream(self._outer)


class CudaDevice:
    """The process's current CUDA device."""

    kind = "cuda"
    is_capturing_supported = True
    is_graph_per_round = False
    is_prefill_captured = True
    max_graphs = 256
    is_counting_shared_pages = False

    def __init__(self) -> None:
        # 16-bit products are summed in fp32 throughout; torch lets the library add the parts of long sums in 16 bits.
        products = torch.backends.cuda.matmul
        products.allow_bf16_reduced_precision_reduction = False
        products.allow_fp16_reduced_precision_reduction = False
        index = torch.cuda.current_device()
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        major, minor = torch.cuda.get_device_capability(index)
        self.capability = f"sm_{major}{minor}"
        self._streams: dict[Lane, torch.cuda.Stream] = {
            lane: torch.cuda.Stream(self.torch_device, priority=0 if lane == "compute" else -1)  # type: ignore[no-untyped-call]
            for lane in LANES
        }
        self._stream = self._streams["compute"]
        self._default = torch.cuda.default_stream(self.torch_device)
        self._lock = threading.Lock()
        self._open = threading.local()  # the stream of the lane or segment that this thread is in
        self._captures = CudaCaptures(self.torch_device, self._stream, self._lock)

    @property
    def is_compiling(self) -> bool:
        return self._captures.is_compiling

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def current_stream(self) -> torch.cuda.Stream:
        """The stream of this thread's current lane."""
        return self.inside() or self._stream

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        return _Entered(self, self._streams[lane])

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.inside() is not None:
            with self._lock:
                target.copy_(source, non_blocking=True)
            return
        with _Entered(self, self._stream), self._lock:
            target.copy_(source, non_blocking=True)

    def record_event(self) -> _CudaEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with self._lock:
            event.record(self.current_stream())
        return _CudaEvent(event)

    def follow(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent), event
        with self._lock:
            event.hold(self.current_stream())

    def timer(self) -> Timer:
        return _CudaTimer(self)

    def segment(self, name: str, lane: Lane = "compute") -> AbstractContextManager[None]:
        return self.on(lane)

    def inside(self) -> torch.cuda.Stream | None:
        """The stream of the lane or segment that this thread is in."""
        return getattr(self._open, "stream", None)

    def capture(self, name: str, fn: Callable[[], None]) -> Graph:
        return self._captures.capture(name, fn)

    def missing_kernels(self, name: str, fn: Callable[[], None]) -> Sequence[Kernel]:
        return self._captures.missing_kernels(name, fn)

    def repeated_copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """A graph of it: torch's own copy out of pinned memory costs the host more than a replay."""

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        return self._captures.capture("copy", copy).replay

    def enter(self, stream: torch.cuda.Stream) -> None:
        """What this thread issues from now on belongs to that stream of a lane."""
        with self._lock:
            self._follow_default_stream(stream)
        self._open.stream = stream
        torch.cuda.set_stream(stream)

    def leave(self, before: torch.cuda.Stream | None) -> None:
        """The thread is in the lane again that it was in before, if any; which stream that means, the caller sets."""
        self._open.stream = before

    def _follow_default_stream(self, stream: torch.cuda.Stream) -> None:
        """Order what comes on a side stream behind what the default stream has been given; mostly that is done long since."""
        if not self._default.query():
            stream.wait_stream(self._default)

    def sharing(self) -> AbstractContextManager[None]:
        return nullcontext()  # a capture here minds its own thread alone

    def memory(self) -> MemoryInfo:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return MemoryInfo(
            used_bytes=torch.cuda.memory_allocated(self.torch_device),
            peak_bytes=torch.cuda.max_memory_reserved(self.torch_device),
            total_bytes=total,
            taken_bytes=total - free,
        )

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
