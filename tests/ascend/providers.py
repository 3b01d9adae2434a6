"""Providers of an Ascend NPU called on the CPU, and copies of what they are called with.

Their aten ops run as they are and the vendor's are imitated (`vendor_ops`), so this shows what they compute, not that an
NPU has a kernel for each of their ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xgr_ops.ascend.activation
import xgr_ops.ascend.beam
import xgr_ops.ascend.cache
import xgr_ops.ascend.head
import xgr_ops.ascend.norm
import xgr_ops.ascend.rope

from tests.ascend import vendor_ops
from xgr_runtime.conformance.comparison import CPU, clone_to, convert
from xgr_runtime.hal.registry import Impl, Op, all_ops

if TYPE_CHECKING:
    import torch

vendor_ops.define()
MODULES = tuple(
    module.__name__
    for module in (
        xgr_ops.ascend.activation,
        xgr_ops.ascend.beam,
        xgr_ops.ascend.cache,
        xgr_ops.ascend.head,
        xgr_ops.ascend.norm,
        xgr_ops.ascend.rope,
    )
)
Provider = tuple[Op[..., Any], Impl[..., Any]]


def providers() -> dict[str, Provider]:
    """By name of the op: what the modules above register."""
    return {
        name: (op, found)
        for name, op in all_ops().items()
        for found in op.impls
        if found.device_kind == "npu" and found.fn.__module__ in MODULES
    }


def copied(arguments: Any) -> Any:
    """The same arguments in memory of their own, strides included."""
    return convert(arguments, clone_to(CPU))


def fill(buffers: Any, arguments: Any) -> None:
    """Copy arguments of the same shapes into buffers; views that repeat one row stay as they are."""
    for target, source in zip(tensors_of(buffers), tensors_of(arguments), strict=True):
        if 0 not in target.stride():
            target.copy_(source)


def tensors_of(arguments: Any) -> list[torch.Tensor]:
    """Every tensor inside arguments, in a fixed order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    convert(arguments, note)
    return found
