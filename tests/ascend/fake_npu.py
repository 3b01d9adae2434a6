"""`torch.npu` of the fake device: what torch_npu 2.13 offers under these names and the runtime uses, with rules that raise.

Our reading of torch_npu's Python sources (npu/graphs.py, npu/streams.py). What breaks a rule raises `RuleBroken`, in
words that begin with "RuleBroken:"; the rules themselves are in csrc/.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

IS_FAKE = True
SOC_NAME = "Ascend910B2"

RuleBroken = torch.AcceleratorError  # which nothing on a CPU raises otherwise

_core = torch.ops.xgr_fake_npu
_DEVICE_TYPE = 20  # PrivateUse1 in torch's numbering


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def _index_of(place: Any) -> int:
    """The index that a device, a string, an int or None names; there is only 0."""
    if place is None:
        return 0
    index = place if isinstance(place, int) else (torch.device(place).index or 0)
    if index > 0:
        raise RuntimeError(f"there is one device, npu:0, not {place}")
    return 0


def set_device(device: Any) -> None:
    _index_of(device)


class device:  # noqa: N801 - torch's name
    """Selects a device for a block; there is one."""

    def __init__(self, device: Any) -> None:
        self.idx = _index_of(device)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def get_device_name(device_name: Any = None) -> str:
    _index_of(device_name)
    return SOC_NAME


def get_device_properties(device_name: Any = None) -> SimpleNamespace:
    _index_of(device_name)
    return SimpleNamespace(name=SOC_NAME, total_memory=_memory()[4])


def _memory() -> list[int]:
    """Bytes: used, peak used, reserved, peak reserved, limit."""
    return list(_core.memory_numbers())


def memory_allocated(device: Any = None) -> int:
    _index_of(device)
    return _memory()[0]


def max_memory_allocated(device: Any = None) -> int:
    _index_of(device)
    return _memory()[1]


def memory_reserved(device: Any = None) -> int:
    _index_of(device)
    return _memory()[2]


def max_memory_reserved(device: Any = None) -> int:
    _index_of(device)
    return _memory()[3]


def reset_peak_memory_stats(device: Any = None) -> None:
    _index_of(device)
    _core.reset_peak()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    _, _, reserved, _, limit = _memory()
    return limit - reserved, limit


def empty_cache() -> None:
    pass  # freed memory is given back at once


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # the CPU's kernels draw from it


def manual_seed_all(seed: int) -> None:
    pass  # torch.manual_seed has seeded the CPU's generator


def _is_in_bad_fork() -> bool:
    return False


def synchronize(device: Any = None) -> None:
    _index_of(device)
    _core.wait_for(-1)  # every stream


class Stream(torch.Stream):
    """A stream of work; `stream_id` 0 is the default one."""

    def __new__(cls, device: Any = None, priority: int = 0, stream_id: int | None = None) -> Stream:
        number = _core.new_stream() if stream_id is None else stream_id
        return super().__new__(
            cls, stream_id=number, device_index=_index_of(device), device_type=_DEVICE_TYPE
        )

    @property
    def npu_stream(self) -> int:
        return self.stream_id

    def synchronize(self) -> None:
        _core.wait_for(self.stream_id)

    def query(self) -> bool:
        _core.query_stream(self.stream_id)
        return True

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:  # type: ignore[override]
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.wait_event(stream.record_event())


def default_stream(device: Any = None) -> Stream:
    return Stream(device, stream_id=0)


def current_stream(device: Any = None) -> Stream:
    return Stream(device, stream_id=_core.get_stream())


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _core.set_stream(stream.stream_id)


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Work of this thread goes to `stream` within the block."""
    if stream is None:
        yield
        return
    before = _core.set_stream(stream.stream_id)
    try:
        yield
    finally:
        _core.set_stream(before)


def _id_of(stream: Stream | None) -> int:
    return _core.get_stream() if stream is None else stream.stream_id


class Event:
    """A point in the work of a stream."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._id = _core.new_event(enable_timing)

    def __del__(self) -> None:
        _core.free_event(self._id)

    def record(self, stream: Stream | None = None) -> None:
        _core.record_event(self._id, _id_of(stream))

    def wait(self, stream: Stream | None = None) -> None:
        _core.wait_event(_id_of(stream), self._id)

    def query(self) -> bool:
        _core.query_event(self._id)
        return True

    def synchronize(self) -> None:
        _core.wait_for_event(self._id)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to the other."""
        return float(_core.seconds_between(self._id, end_event._id)) * 1e3


from tests.ascend.fake_graphs import (  # noqa: E402 - it uses what is above
    ExternalEvent,
    NPUGraph,
    graph,
    graph_pool_handle,
    is_current_stream_capturing,
)

__all__ = [
    "ExternalEvent",
    "NPUGraph",
    "graph",
    "graph_pool_handle",
    "is_current_stream_capturing",
]
