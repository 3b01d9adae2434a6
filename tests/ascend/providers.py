"""Providers of an Ascend NPU called on the CPU, and copies of what they are called with.

Their aten ops run as they are and the vendor's are imitated (`vendor_ops`, `vendor_attention`), so this shows what they
compute, not that an NPU has a kernel for each of their ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.ascend import vendor_attention, vendor_ops
from xgr_runtime.conformance.comparison import CPU, clone_to, convert
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import Impl, Op, all_ops

if TYPE_CHECKING:
    import torch

vendor_ops.define()
vendor_attention.define()
load_providers("npu")

Key = tuple[str, str]
Provider = tuple[Op[..., Any], Impl[..., Any]]
# Its kernels need Triton and an accelerator; other tests compile and run them.
TRITON = "triton"


def providers() -> dict[Key, Provider]:
    """By name of the op and of the provider: whatever is registered for the NPU and runs on a CPU."""
    return {
        (name, found.provider): (op, found)
        for name, op in all_ops().items()
        for found in op.impls
        if found.device_kind == "npu" and found.provider != TRITON
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
