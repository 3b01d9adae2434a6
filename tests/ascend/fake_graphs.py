"""Graphs of the fake `torch.npu`, after torch_npu 2.13's npu/graphs.py: capture, replay, update of host arguments.

With `auto_dispatch_capture` torch_npu puts an external event before every fused attention call of a capture. The graph
waits there until `update` has given the call its arguments anew and recorded the event, once for every replay.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RuleBroken = torch.AcceleratorError

_core = torch.ops.xgr_fake_npu
_pool_ids = itertools.count(1)


class _Capturing:
    """The graph whose capture is under way; there is one at most."""

    graph: NPUGraph | None = None


def graph_pool_handle() -> tuple[int, int]:
    return (0, next(_pool_ids))


def is_current_stream_capturing() -> bool:
    return bool(_core.is_capturing())


class ExternalEvent:
    """An event that work outside of a graph records and the graph waits for; `reset` makes it wait again."""

    def __init__(self) -> None:
        self._id: int = _core.new_event(False)
        self.is_recorded = False

    def __del__(self) -> None:
        _core.free_event(self._id)

    def record(self, stream: torch.Stream | None = None) -> None:
        if is_current_stream_capturing():
            raise RuleBroken("RuleBroken: an external event recorded inside the capture that waits")
        _core.record_event(self._id, _id_of(stream))
        self.is_recorded = True

    def wait(self, stream: torch.Stream | None = None) -> None:
        if is_current_stream_capturing() and _Capturing.graph is not None:
            _Capturing.graph.external_events.append((self, "wait"))
        else:
            self._wait_now(_id_of(stream))

    def reset(self, stream: torch.Stream | None = None) -> None:
        if is_current_stream_capturing() and _Capturing.graph is not None:
            _Capturing.graph.external_events.append((self, "reset"))
        else:
            self.is_recorded = False

    def _wait_now(self, stream: int) -> None:
        if not self.is_recorded:
            raise RuleBroken("RuleBroken: a wait for an external event that nobody has recorded")
        _core.wait_event(stream, self._id)


def _id_of(stream: torch.Stream | None) -> int:
    return int(_core.get_stream()) if stream is None else stream.stream_id


class NPUGraph:
    """Captured work. `calls` names the ops, for tests."""

    def __init__(self) -> None:
        self._id: int = _core.new_graph()
        self._pool = graph_pool_handle()
        self.auto_dispatch_capture = False
        self.external_events: list[tuple[ExternalEvent, str]] = []

    def __del__(self) -> None:
        _core.free_graph(self._id)

    @property
    def calls(self) -> list[str]:
        return list(_core.calls_of(self._id))

    @property
    def graph_dispatch_mode(self) -> SimpleNamespace:
        """As in torch_npu: its records are the calls that `update` reaches, once the capture has ended."""
        return SimpleNamespace(graph_dispatch_records=range(_core.num_updatable(self._id)))

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._pool = pool or self._pool
        _core.begin_capture(self._id, self._pool[1], capture_error_mode, self.auto_dispatch_capture)
        self.external_events = []
        _Capturing.graph = self

    def capture_end(self) -> None:
        _Capturing.graph = None
        _core.end_capture(self._id, False)

    def _capture_abort(self) -> None:
        """After an error in the captured block, which is the one to be seen."""
        _Capturing.graph = None
        _core.end_capture(self._id, True)

    def replay(self) -> None:
        for event, what in self.external_events:
            if what == "wait":
                event._wait_now(_core.get_stream())
            else:
                event.is_recorded = False
        _core.replay(self._id)

    def reset(self) -> None:
        _core.reset(self._id)
        self.external_events = []

    def pool(self) -> Any:
        return self._pool

    def update(self, cpu_update_input: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Give the recorded attention calls host arguments anew: one dict for all of them, or one each.

        A key reaches the calls that were captured with that argument. torch_npu passes over any other key in silence,
        also over one that no op knows, and the arguments of the capture stay: here that is an error.
        """
        if not self.auto_dispatch_capture:
            raise RuntimeError("update needs a capture with auto_dispatch_capture=True")
        num_calls = _core.num_updatable(self._id)
        inputs = list(cpu_update_input)
        if len(inputs) == 1:
            inputs *= num_calls
        if len(inputs) != num_calls:
            raise RuntimeError(f"{num_calls} calls can be updated, got {len(inputs)} dicts")
        _core.begin_update(self._id)
        missed = {key for values in inputs for key in values}
        for place, values in enumerate(inputs):
            for key, value in values.items():
                if _core.update(self._id, place, key, list(value)):
                    missed.discard(key)
        if missed:
            raise RuleBroken(f"RuleBroken: update of {sorted(missed)}, which no captured op takes")


class graph:  # noqa: N801 - torch's name
    """Captures the work of a block into a graph, on a stream of its own where none is given."""

    default_capture_stream: Any = None

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Any = None,
        stream: Any = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        self._npu: Any = torch.get_device_module("npu")
        if stream is None:
            if graph.default_capture_stream is None:
                graph.default_capture_stream = self._npu.Stream()
            stream = graph.default_capture_stream
        self._graph, self._pool, self._mode = npu_graph, pool, capture_error_mode
        self._stream_context = self._npu.stream(stream)
        npu_graph.auto_dispatch_capture = auto_dispatch_capture

    def __enter__(self) -> None:
        self._npu.synchronize()
        self._npu.empty_cache()
        self._stream_context.__enter__()
        try:
            self._graph.capture_begin(self._pool, self._mode)
        except BaseException as error:
            self._stream_context.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            if kind is None:
                self._graph.capture_end()
            else:
                self._graph._capture_abort()
        finally:
            self._stream_context.__exit__(None, None, None)
