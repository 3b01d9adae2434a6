"""A device with the strictest rules, on the CPU's memory: what breaks a rule raises, where an accelerator would stall.

Inside `segment(...)` it refuses reads by the host, shapes that depend on data, and synchronisation; inside a captured
graph also host memory, and at replay every op must meet the addresses, shapes and constants of the first run, because
a real graph would repeat those whatever the host passes. The segment named "inputs" is where a batch's copies are
issued, so copies are legal there.

A dispatch mode sees the ops, yet not `tolist`, `numpy`, `cpu` or `bool(tensor)`, which touch no op or an op too late;
those methods are replaced while a segment is open, and raise only on the thread that opened it.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xgr_runtime.hal.cpu import CpuTimer
from xgr_runtime.hal.device import MemoryInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from xgr_runtime.hal.device import Event, Kernel, Lane

COPY_SEGMENT = "inputs"

READING_METHODS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__complex__",
    "__array__",
    "__contains__",
    "__repr__",
    "__format__",
    "__dlpack__",
)
READING_FUNCTIONS = ("equal", "allclose", "is_nonzero")
# Each copies from host memory; under capture that memory's content would be frozen or the copy refused.
HOST_SOURCES = ("tensor", "as_tensor", "asarray", "from_numpy", "frombuffer")

INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class RuleBroken(AssertionError):
    """A segment did what no captured segment may do."""


class _Current(threading.local):
    """The segment that is open on this thread, and its lane."""

    segment: _OpenSegment | None = None
    lane: Lane = "compute"


_CURRENT = _Current()


class _Recorder:
    """The ops of one run of a graph: the first run records, later ones compare."""

    def __init__(self, recorded: list[Any] | None) -> None:
        self.entries: list[Any] = []
        self._expected = recorded
        self._own_storages: set[int] = set()
        self._outside_storages: set[int] = set()

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        entry = (func.name(), self._signature(args), self._signature(sorted(kwargs.items())))
        place = len(self.entries)
        self.entries.append(entry)
        if self._expected is None:
            return
        if place >= len(self._expected):
            raise RuleBroken(
                f"replay runs {entry[0]} as op {place}, the captured run had ended there"
            )
        if entry != self._expected[place]:
            raise RuleBroken(_difference(place, self._expected[place], entry))

    def after(self, output: Any) -> None:
        for tensor in _tensors(output):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._outside_storages:
                self._own_storages.add(storage)

    def finish(self) -> None:
        if self._expected is not None and len(self.entries) < len(self._expected):
            missing = self._expected[len(self.entries)][0]
            raise RuleBroken(
                f"replay ends before {missing}, op {len(self.entries)} of the captured run"
            )

    def _signature(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape = (tuple(value.shape), tuple(value.stride()), value.dtype)
            storage = value.untyped_storage()._cdata
            if storage in self._own_storages:
                return ("own", *shape)
            self._outside_storages.add(storage)
            return ("outside", value.data_ptr(), *shape)
        if isinstance(value, list | tuple):
            return tuple(self._signature(element) for element in value)
        return repr(value)


def _difference(place: int, expected: Any, got: Any) -> str:
    if expected[0] != got[0]:
        return f"op {place} was {expected[0]} at capture and is {got[0]} at replay: the host took another path"
    one, two = (_leaves(entry) for entry in (expected[1:], got[1:]))
    for old, new in zip(one, two, strict=False):
        if old != new:
            is_address = "outside" in (old[0], new[0]) and old[-3:] == new[-3:]
            what = "a changed input address" if is_address else "a changed shape or constant"
            return f"op {place}, {got[0]}: {what}: {old} at capture, {new} at replay"
    return f"op {place}, {got[0]}: {expected[1:]} at capture, {got[1:]} at replay"


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple) and not (value and value[0] in ("own", "outside")):
        return [leaf for element in value for leaf in _leaves(element)]
    return [value if isinstance(value, tuple) else (value,)]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _tensors(element)


class _OpenSegment(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks every op of a segment."""

    def __init__(self, name: str, host_storages: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.recorder: _Recorder | None = None
        self._host_storages = host_storages

    @property
    def may_copy(self) -> bool:
        return self.name == COPY_SEGMENT and self.recorder is None

    def refuse(self, what: str) -> RuleBroken:
        return RuleBroken(f"segment {self.name!r}: {what}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._check_shapes(func, args, kwargs)
        if not self.may_copy:
            self._check_memory(func, args, kwargs)
        if self.recorder is not None:
            self.recorder.before(func, args, kwargs)
        output = func(*args, **kwargs)
        if self.recorder is not None:
            self.recorder.after(output)
        return output

    def _check_shapes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        name = func.name().split(".")[0]
        if torch.Tag.data_dependent_output in func.tags:
            raise self.refuse(f"{func.name()} reads a value on the host")
        if name in INDEXING:
            masks = [t for t in _tensors(args[1]) if t.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise self.refuse(f"{func.name()} with a mask has a shape that depends on data")
        elif name == "aten::repeat_interleave":
            if kwargs.get("output_size", args[1] if len(args) > 1 else None) is None:
                raise self.refuse(f"{func.name()} without output_size reads a length")
        elif torch.Tag.dynamic_output_shape in func.tags:
            raise self.refuse(f"{func.name()} has a shape that depends on data")

    def _check_memory(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        for tensor in _tensors([*args, *kwargs.values()]):
            if tensor.untyped_storage()._cdata in self._host_storages:
                raise self.refuse(f"{func.name()} touches host memory")


def _guarded(original: Callable[..., Any], what: str, *, is_copy: bool) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        segment = _CURRENT.segment
        if segment is not None and not (is_copy and segment.may_copy):
            raise segment.refuse(f"{what} {'copies from' if is_copy else 'reads on'} the host")
        return original(*args, **kwargs)

    return guarded


class _Patches:
    """Replaces the reading methods while at least one segment is open in the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._patch = pytest.MonkeyPatch()

    def open(self) -> None:
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                for owner, names, is_copy in (
                    (torch.Tensor, READING_METHODS, False),
                    (torch, READING_FUNCTIONS, False),
                    (torch, HOST_SOURCES, True),
                ):
                    for name in names:
                        guarded = _guarded(getattr(owner, name), name, is_copy=is_copy)
                        self._patch.setattr(owner, name, guarded)

    def close(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open == 0:
                self._patch.undo()


_PATCHES = _Patches()


def _refuse_inside(what: str) -> None:
    if _CURRENT.segment is not None:
        raise _CURRENT.segment.refuse(what)


class StrictEvent:
    """Done at once; asking inside a segment is the mistake."""

    def __init__(self, device: StrictDevice) -> None:
        self._device = device

    def is_done(self) -> bool:
        _refuse_inside("asks an event, which synchronises")
        return True

    def wait(self) -> None:
        _refuse_inside("waits for an event, which synchronises")
        self._device.num_waits += 1


class StrictTimer(CpuTimer):
    """Recording is legal anywhere; asking for the time between two points inside a segment is the mistake."""

    def seconds(self, start: int, end: int) -> float:
        _refuse_inside("asks a timer, which synchronises")
        return super().seconds(start, end)


class StrictGraph:
    """A captured function that is run again under comparison with its first run."""

    def __init__(self, device: StrictDevice, name: str, fn: Callable[[], object]) -> None:
        self._device, self._name, self._fn = device, name, fn
        self.num_replays = 0
        self._recorded = device.run_recorded(name, fn, None)

    @property
    def num_ops(self) -> int:
        return len(self._recorded)

    def replay(self, kv_lens: Sequence[int] = ()) -> None:
        self._device.run_recorded(self._name, self._fn, self._recorded)
        self.num_replays += 1


class StrictDevice:
    """See the head of the file. `graphs` and `segment_names` tell a test what ran under the rules.

    copies: lane, whence and whereto of each. num_waits: how often the host waited.
    """

    kind = "strict"
    name = "strict test device"
    capability = ""
    is_capturing_supported = True
    max_graphs = 256
    is_counting_shared_pages = False
    is_compiling = False

    def __init__(
        self, *, is_graph_per_round: bool = False, is_prefill_captured: bool | None = None
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.is_graph_per_round = is_graph_per_round
        # an NPU has neither, a GPU has both
        self.is_prefill_captured = (
            not is_graph_per_round if is_prefill_captured is None else is_prefill_captured
        )
        self.graphs: list[StrictGraph] = []
        self.segment_names: list[str] = []
        self.copies: list[tuple[Lane, str]] = []
        self.num_waits = 0
        self._host_tensors: list[torch.Tensor] = []
        self._host_storages: set[int] = set()

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        _refuse_inside("allocates host memory")
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self._host_tensors.append(tensor)
        self._host_storages.add(tensor.untyped_storage()._cdata)
        return tensor

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if _CURRENT.segment is not None and not _CURRENT.segment.may_copy:
            raise _CURRENT.segment.refuse("copies between host and device")
        self.copies.append((_CURRENT.lane, f"{self._place(source)} to {self._place(target)}"))
        target.copy_(source)

    def repeated_copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        return partial(self.copy, target, source)

    def _place(self, tensor: torch.Tensor) -> str:
        return "host" if tensor.untyped_storage()._cdata in self._host_storages else "device"

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        before, _CURRENT.lane = _CURRENT.lane, lane
        try:
            yield
        finally:
            _CURRENT.lane = before

    def record_event(self) -> StrictEvent:
        return StrictEvent(self)

    def follow(self, event: Event) -> None:
        pass

    def timer(self) -> StrictTimer:
        return StrictTimer()

    @contextmanager
    def segment(self, name: str, lane: Lane = "compute") -> Iterator[None]:
        _refuse_inside(f"opens another segment, {name!r}")
        self.segment_names.append(name)
        segment = _OpenSegment(name, self._host_storages)
        _PATCHES.open()
        _CURRENT.segment = segment
        try:
            with segment, self.on(lane):
                yield
        finally:
            _CURRENT.segment = None
            _PATCHES.close()

    def run_recorded(
        self, name: str, fn: Callable[[], object], recorded: list[Any] | None
    ) -> list[Any]:
        """Run fn with a recorder, inside the open segment or one of its own; returns the ops it ran."""
        if _CURRENT.segment is None:
            with self.segment(name):
                return self.run_recorded(name, fn, recorded)
        segment, recorder = _CURRENT.segment, _Recorder(recorded)
        segment.recorder = recorder
        try:
            fn()
        finally:
            segment.recorder = None
        recorder.finish()
        return recorder.entries

    def capture(self, name: str, fn: Callable[[], object]) -> StrictGraph:
        _refuse_inside(f"captures another graph, {name!r}")
        graph = StrictGraph(self, name, fn)
        self.graphs.append(graph)
        return graph

    def missing_kernels(self, name: str, fn: Callable[[], object]) -> Sequence[Kernel]:
        return ()

    def sharing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def memory(self) -> MemoryInfo:
        return MemoryInfo(used_bytes=0, peak_bytes=0, total_bytes=0)

    def synchronize(self) -> None:
        _refuse_inside("synchronises the device")
        self.num_waits += 1


class OpsOutsideGraphs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of this thread's ops that no captured graph repeats; views, which do nothing, are left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        segment = _CURRENT.segment
        if not func.is_view and (segment is None or segment.recorder is None):
            self.names.add(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))
