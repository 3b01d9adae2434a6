"""An Ascend NPU as a device, through torch_npu's `torch.npu`. Not run on hardware; see ops/ascend/README.md.

Written for torch_npu 2.13 and the rules of its graphs (aclgraph): static addresses and shapes, a private memory pool, a side
stream, nothing read by the host while one is captured. What differs from a GPU:

- Fused attention takes the lengths of histories from the host, and a graph keeps those of its capture. torch_npu can tell a graph
  new ones before a replay (`NPUGraph.update`); such a graph waits for an event that the update records, so each replay has its
  update, and an update waits for the replay before it. The lengths of new tokens decide shapes as well: a prefill runs eagerly.
- Every round is a graph of its own, since the number of a beam's own tokens is fixed in it. Graphs use up streams of the device,
  of which there are few: hence far fewer graphs than on a GPU.
- Events inside a graph take no time, so the timer leaves them out.
- A synchronous copy or a wait in any other thread can break a capture: all of them and captures exclude each other.

- Two batches in flight overlap where they replay graphs of their own; where the second replays one that fused attention is in,
  its host waits for the first one's replay of that graph, as above.

Like on a GPU, memory is allocated and filled on the default stream, which the lanes' side streams follow (see `hal.cuda`).
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from xgr_runtime.errors import DeviceError
from xgr_runtime.hal.ascend_errors import explain_npu_error, first_line
from xgr_runtime.hal.collection import no_collection
from xgr_runtime.hal.device import LANES, Event, Graph, Kernel, Lane, MemoryInfo, Timer

_POLL_S = 1e-4


def npu() -> Any:
    """`torch.npu`, which exists once torch_npu is loaded; without type information."""
    return torch.npu  # type: ignore[attr-defined]


def lengths_from_host(kv_lens: Sequence[int]) -> list[int]:
    """Histories' lengths as fused attention is given them, at capture and at replay alike.

    A history without tokens is given one, of whatever its first page holds: what the kernel does with none is not documented.
    The caller leaves such rows out of its result.
    """
    return [max(1, length) for length in kv_lens]


class _AscendEvent:
    """Waited for by the thread that runs batches without more ado, as it cannot be capturing; by others between captures."""

    def __init__(self, device: "AscendDevice", event: Any) -> None:
        self._device, self._event = device, event

    def is_done(self) -> bool:
        with self._device.sharing():
            return bool(self._event.query())

    def wait(self) -> None:
        if self._device.is_running_thread():
            self._event.synchronize()
            return
        while not self.is_done():
            time.sleep(_POLL_S)

    def hold(self, stream: Any) -> None:
        """What the stream is given next waits for this."""
        stream.wait_event(self._event)


class _AscendTimer:
    """One timing event per point, made when the point is first recorded. What is recorded during a capture is left out."""

    def __init__(self, device: "AscendDevice") -> None:
        self._device = device
        self._events: dict[int, Any] = {}

    def record(self, point: int) -> None:
        if self._device.is_capturing:
            return
        if point not in self._events:
            self._events[point] = npu().Event(enable_timing=True)
        self._events[point].record(self._device.current_stream())

    def seconds(self, start: int, end: int) -> float:
        if start not in self._events or end not in self._events:
            return math.nan
        return float(self._events[start].elapsed_time(self._events[end])) / 1e3


class _AscendGraph:
    """A captured segment and, where it holds fused attention, the end of its last replay, which an update must not overtake."""

    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph, self._stream = graph, stream
        self._is_told = bool(graph.graph_dispatch_mode.graph_dispatch_records)
        self._last_end: Any = None

    def replay(self, kv_lens: Sequence[int] = ()) -> None:
        if not self._is_told:
            self._graph.replay()
            return
        if self._last_end is not None:
            self._last_end.synchronize()
        lengths = lengths_from_host(kv_lens)
        self._graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        self._graph.replay()
        self._last_end = npu().Event()
        self._last_end.record(self._stream)


class AscendDevice:
    """The process's current NPU."""

    kind = "npu"
    is_capturing_supported = True
    is_graph_per_round = True
    is_prefill_captured = False
    max_graphs = 96
    is_counting_shared_pages = True  # fused attention over page tables
    is_compiling = (
        False  # stock kernels come compiled, and nothing says which of the others are missing
    )

    def __init__(self) -> None:
        try:
            index = npu().current_device()
            self.name = str(npu().get_device_name(index))
            self._streams: dict[Lane, Any] = {lane: npu().Stream() for lane in LANES}
            self._stream = self._streams["compute"]
            self._default_stream = npu().default_stream()
            self.torch_device = torch.device("npu", index)
        # A half-working torch_npu raises whatever it meets; all of it means that there is no device to be had.
        except (Exception, SystemExit) as error:
            raise explain_npu_error(error) or DeviceError(
                f"the NPU cannot be opened: {type(error).__name__}: {first_line(str(error))}"
            ) from error
        self.capability = self.name
        self.is_capturing = False
        self._lock = threading.RLock()
        self._open = (
            threading.local()
        )  # whether this thread runs segments; the stream of the lane or segment it is in
        self._pool: Any = None  # torch_npu gives an opaque handle

    def is_running_thread(self) -> bool:
        """Whether the caller is a thread that runs segments: then it is not capturing, as it would be busy."""
        return getattr(self._open, "has_run", False)

    def current_stream(self) -> Any:
        """The stream of this thread's current lane."""
        return self._inside() or self._stream

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        return self._entered(self._streams[lane])

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self._lock:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Out of memory that is not pinned torch_npu waits for the whole stream: such a source is staged."""
        with self._lock:
            if source.device.type == "cpu" and not source.is_pinned():
                source = source.pin_memory()  # its allocator keeps it until it was copied
            if self._inside() is not None:
                target.copy_(source, non_blocking=True)
                return
            self._follow_default_stream(self._stream)
            with npu().stream(self._stream):
                target.copy_(source, non_blocking=True)

    def repeated_copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        return partial(self.copy, target, source)

    def record_event(self) -> _AscendEvent:
        event = npu().Event()
        with self._lock:
            event.record(self.current_stream())
        return _AscendEvent(self, event)

    def follow(self, event: Event) -> None:
        assert isinstance(event, _AscendEvent), event
        with self._lock:
            event.hold(self.current_stream())

    def timer(self) -> Timer:
        return _AscendTimer(self)

    @contextmanager
    def segment(self, name: str, lane: Lane = "compute") -> Iterator[None]:
        self._open.has_run = True
        with npu().device(self.torch_device), self._entered(self._streams[lane]):
            yield

    def _inside(self) -> Any:
        return getattr(self._open, "stream", None)

    @contextmanager
    def _entered(self, stream: Any) -> Iterator[None]:
        before = self._inside()
        with self._lock:
            self._follow_default_stream(stream)
        self._open.stream = stream
        try:
            with npu().stream(stream):
                yield
        finally:
            self._open.stream = before

    def capture(self, name: str, fn: Callable[[], None]) -> Graph:
        """Runs `fn` once before: kernels are built and workspaces sized then, which a capture may not do."""
        self._open.has_run = True
        graph = npu().NPUGraph()
        with self._lock, npu().device(self.torch_device), no_collection():
            self._default_stream.synchronize()
            self.is_capturing = True
            try:
                with npu().stream(self._stream):
                    fn()
                self._stream.synchronize()
                with npu().graph(
                    graph,
                    pool=self._pool,
                    stream=self._stream,
                    auto_dispatch_capture=True,
                    capture_error_mode="thread_local",
                ):
                    fn()
            finally:
                self.is_capturing = False
        self._pool = self._pool or graph.pool()
        return _AscendGraph(graph, self._stream)

    def missing_kernels(self, name: str, fn: Callable[[], None]) -> Sequence[Kernel]:
        return ()

    def sharing(self) -> AbstractContextManager[None]:
        return self._sharing()

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        with self._lock:
            yield

    def _follow_default_stream(self, stream: Any) -> None:
        """Order what comes on a side stream behind what the default stream has been given."""
        stream.wait_stream(self._default_stream)

    def memory(self) -> MemoryInfo:
        index = self.torch_device.index
        with self._lock:  # asking the driver for what is free is a synchronous call
            free, total = npu().mem_get_info(index)
            return MemoryInfo(
                used_bytes=int(npu().memory_allocated(index)),
                peak_bytes=int(npu().max_memory_reserved(index)),
                total_bytes=int(npu().get_device_properties(index).total_memory),
                taken_bytes=int(total - free),
            )

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
