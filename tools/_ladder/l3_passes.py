"""The two passes: whole engines built on the Ascend device, and `Worker.run` over every plan of `l3_world`.

fake: under FakeTensorMode, with the vendor's schemas and shape rules; each result of a provider is compared with what the op's
reference gives for the same arguments. border: torch_npu's C++ runs down to the stubs, on memory that no kernel fills.
Both run the same device code, captures and updates of graphs included.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from tools._ladder import l3_world
from tools._ladder.l3_recorder import BorderRecorder, FakeRecorder, signature
from xgr_runtime.hal.ascend import AscendDevice
from xgr_runtime.hal.bound import BoundOps, bind_ops
from xgr_runtime.hal.registry import PARTS, all_ops
from xgr_runtime.models.registry import load_model
from xgr_runtime.xschedule.engine_parts import build_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tools._ladder.l3_sources import Watched
    from xgr_runtime.hal.device import Device, Graph, Lane
    from xgr_runtime.xschedule.engine_parts import EngineParts

Pair = tuple[str, str]
CAPTURED, EAGER = "captured", "eagerly"
_API = "xgr_runtime.hal.ascend.npu"
_BIND = "xgr_runtime.xschedule.model_runner.bind_ops"
_IS_FINITE = "xgr_runtime.models.weights._is_finite"


class WatchedAscendDevice(AscendDevice):
    """segments: the names of those that ran, captured or eagerly. Tells the recorder which one is being captured."""

    def __init__(self, recorder: FakeRecorder | BorderRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.segments: set[Pair] = set()

    @contextmanager
    def segment(self, name: str, lane: Lane = "compute") -> Iterator[None]:
        if (name, CAPTURED) not in self.segments:
            self.segments.add((name, EAGER))
        with super().segment(name, lane):
            yield

    def capture(self, name: str, fn: Callable[[], None]) -> Graph:
        self.segments.add((name, CAPTURED))
        self._recorder.num_graphs += 1
        return super().capture(name, fn)


class FakeAscendDevice(WatchedAscendDevice):
    """The device in the fake pass. Pinned memory is real: the engine reads and writes it through numpy."""

    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with unset_fake_temporarily():
            return super().pinned_empty(shape, dtype)


@dataclass
class Providers:
    """Wraps bound ops: notes who ran, and in the fake pass compares each result with the reference's.

    planted: functions in place of a provider's, for what has to be found.
    """

    recorder: FakeRecorder | BorderRecorder
    planted: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    executed: set[Pair] = field(default_factory=set)
    num_compared: int = 0
    _seen: set[Any] = field(default_factory=set)

    def bind(self, *args: Any, **kwargs: Any) -> BoundOps:
        """`bind_ops`, with every function wrapped; a fused op that runs by its parts calls the wrapped ones."""
        bound = bind_ops(*args, **kwargs)
        wrapped = {
            binding.op_name: self._wrapped(
                binding.op_name,
                binding.provider,
                self.planted.get(binding.op_name, binding.fn),
            )
            for binding in bound.bindings
            if binding.provider != PARTS
        }
        by_name = SimpleNamespace(**wrapped)  # one for all: a part may run by parts itself
        for binding in bound.bindings:
            run_by_parts = all_ops()[binding.op_name].run_by_parts
            if binding.provider == PARTS and run_by_parts is not None:
                wrapped[binding.op_name] = functools.partial(run_by_parts, by_name)
                setattr(by_name, binding.op_name, wrapped[binding.op_name])
        return BoundOps(bindings=bound.bindings, **wrapped)

    def _wrapped(self, op_name: str, provider: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.executed.add((op_name, provider))
            result = fn(*args, **kwargs)
            if isinstance(self.recorder, FakeRecorder):
                self._compare(op_name, provider, args, kwargs, result)
            return result

        return call

    def _compare(self, op_name: str, provider: str, args: Any, kwargs: Any, result: Any) -> None:
        asked = (op_name, provider, signature(args), signature(kwargs))
        if asked in self._seen:
            return
        self._seen.add(asked)
        self.num_compared += 1
        with self.recorder.paused():
            expected = all_ops()[op_name].reference(*args, **kwargs)
        who = f"{op_name} by {provider}"
        if signature(expected) != signature(result):
            self.recorder.failures.append(
                f"{who}: returned {signature(result)}, the reference {signature(expected)}"
            )
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_contiguous():
                self.recorder.failures.append(f"{who}: a result is not contiguous")


@dataclass
class Run:
    """One engine to run. api: the vendor's module, as watched."""

    folder: Path
    setting: l3_world.Setting
    api: Watched
    plans: Sequence[l3_world.Plan] = l3_world.PLANS
    planted: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    allow_reference: bool = False
    segments: set[Pair] = field(default_factory=set)
    num_batches: int = 0

    def fake(self, recorder: FakeRecorder) -> Providers:
        """Every plan on one engine of fake tensors."""
        providers = Providers(recorder, self.planted)
        with patch(_API, lambda: self.api):
            device = FakeAscendDevice(recorder)
            with FakeTensorMode(allow_non_fake_inputs=True), recorder:
                self._run(device, providers)
        self.segments |= device.segments
        return providers

    def border(self, recorder: BorderRecorder) -> Providers:
        """Every plan on one engine over the stubs."""
        providers = Providers(recorder, self.planted)
        with patch(_API, lambda: self.api), recorder:
            device = WatchedAscendDevice(recorder)
            self._run(device, providers)
        self.segments |= device.segments
        return providers

    def _run(self, device: AscendDevice, providers: Providers) -> None:
        with engine_parts(self, device, providers) as parts:
            for plan in self.plans:
                batch = l3_world.make_batch(parts, plan, self.setting.page_size)
                output = parts.worker.run(batch)
                self.num_batches += 1
                for group, out in zip(batch.groups, output.groups, strict=True):
                    assert out.scores_LN.shape[0] == group.num_levels, plan.name
            device.memory()


@contextmanager
def engine_parts(run: Run, device: Device, providers: Providers) -> Iterator[EngineParts]:
    """An engine's parts with all catalogues loaded, its ops wrapped. Loading is not recorded."""
    config = l3_world.make_config(run.folder, run.setting, allow_reference=run.allow_reference)
    with ExitStack() as stack:
        stack.enter_context(patch(_BIND, providers.bind))
        # Weights on a device without values can be neither checked for NaN nor compared.
        unchecked = patch(_IS_FINITE, _says_yes), patch("torch.equal", _says_yes)
        with providers.recorder.paused(), unchecked[0], unchecked[1]:
            dtype = getattr(torch, config.model.dtype)
            model = load_model(config.model.path, device.torch_device, dtype)
            parts = build_parts(config, device, model, "1")
            for name, path in config.catalogs.items():
                parts.catalogs.activate(name, parts.catalogs.load(name, path, None))
        yield parts


def _says_yes(*_tensors: torch.Tensor) -> bool:
    return True
