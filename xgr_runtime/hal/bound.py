"""Ops bound for one bucket: a namespace of plain callables, so that the hot path dispatches nothing."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from xgr_runtime.errors import OpUnavailable
from xgr_runtime.hal.device import Device
from xgr_runtime.hal.registry import Binding, OpSpec, all_ops, resolve


class BoundOps(SimpleNamespace):
    """One attribute per op, e.g. `ops.rms_norm(x_NM, weight_M, eps)`; `bindings` says who provides each."""

    bindings: tuple[Binding[..., Any], ...]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"no op {name!r} is bound; bound: {', '.join(b.op_name for b in self.bindings)}"
        )


def bind_ops(
    device: Device, dtype: torch.dtype, dims: Mapping[str, int], *, allow_reference: bool
) -> BoundOps:
    """Resolve every declared op for this device, dtype and sizes. Raises OpUnavailable naming each op without a provider."""
    spec = OpSpec(device_kind=device.kind, dtype=dtype, capability=device.capability, dims=dims)
    bindings, missing = list[Binding[..., Any]](), list[str]()
    for op in all_ops().values():
        try:
            bindings.append(resolve(op, spec, allow_reference=allow_reference))
        except OpUnavailable as error:
            missing.append(str(error))
    if missing:
        raise OpUnavailable("\n".join(missing))
    return BoundOps(
        bindings=tuple(bindings), **{binding.op_name: binding.fn for binding in bindings}
    )
