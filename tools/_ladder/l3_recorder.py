"""What the engine asks of torch on the device: a dispatch mode that sees every op before torch_npu does.

Two modes for two passes over the same batches. `FakeRecorder` stands above a FakeTensorMode: tensors of the device have shapes
and no memory, every call goes through the vendor's schema and shape rule. `BorderRecorder` lets every call run in torch_npu's own
C++ down to the stubs of CANN, and notes what it asked for there: which kernels, copies and waits.

Ops on tensors of the host alone run as always and are not recorded. In the fake pass that is a decision: the engine reads and
writes its pinned memory through numpy, so that memory is real.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools._ladder.l3_border import BorderCall, BorderLog

KIND = "npu"
BETWEEN = "between the ops of a captured segment"
Signature = tuple[Any, ...]


@dataclass
class Recorded:
    """Calls of one pass: op -> the signatures of its arguments -> the signature of what came back."""

    results: dict[str, dict[Signature, Signature]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    num_calls: int = 0

    def names(self, namespace: str) -> set[str]:
        """Ops of a namespace, overloads included: "npu::npu_rms_norm", "aten::add.Tensor"."""
        return {name for name in self.results if name.startswith(f"{namespace}::")}


def signature(value: Any) -> Any:
    """Shapes and dtypes in place of tensors, and whatever else was passed."""
    if isinstance(value, torch.Tensor):
        return (value.device.type, str(value.dtype).removeprefix("torch."), tuple(value.shape))
    if isinstance(value, list | tuple):
        return tuple(map(signature, value))
    if isinstance(value, dict):
        return tuple((name, signature(value[name])) for name in sorted(value))
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def is_on_device(args: Any, kwargs: Any) -> bool:
    """Whether a call has to do with the device: a tensor there, or one to be made there."""
    for leaf in tree_leaves((args, kwargs)):
        place = leaf.device if isinstance(leaf, torch.Tensor) else leaf
        if isinstance(place, torch.device) and place.type == KIND:
            return True
    return False


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded = Recorded()
        self.failures: list[str] = []
        self.num_graphs = 0
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing meanwhile."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.recorded.num_calls += 1
        asked = (signature(args), signature(kwargs))
        self.recorded.results[func.name()][asked] = signature(tree_leaves(result))


class FakeRecorder(_Recorder):  # type: ignore[no-untyped-call]
    """Above a FakeTensorMode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_on_device(args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if not self._is_paused:
                asked = f"{signature(args)} {signature(kwargs)}"
                self.failures.append(f"{func.name()}({asked}): {type(error).__name__}: {error}")
            raise
        if not self._is_paused:
            self._note(func, args, kwargs, result)
        return result


class BorderRecorder(_Recorder):  # type: ignore[no-untyped-call]
    """Above nothing: torch_npu runs.

    calls: op -> what it asked the stubs for, and whether under capture. num_waits: ops in which the host waited for the device.
    kernels_of_graph: by the graph's number.
    """

    def __init__(self, log: BorderLog) -> None:
        super().__init__()
        self._log = log
        self.calls: dict[str, set[BorderCall]] = defaultdict(set)
        self.num_waits = 0
        self.kernels_of_graph: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or not is_on_device(args, kwargs):
            return func(*args, **kwargs)
        # What came without an op is the device's own; inside a capture there should be nothing of it.
        self.calls[BETWEEN].update(call for call in self._log.take() if call.is_capturing)
        try:
            result = func(*args, **kwargs)
        finally:
            made = self._log.take()
            self.calls[func.name()].update(made)
            self.num_waits += any(call.is_wait for call in made)
            in_graph = sum(call.is_kernel and call.is_capturing for call in made)
            self.kernels_of_graph[self.num_graphs] += in_graph
        self._note(func, args, kwargs, result)
        return result
