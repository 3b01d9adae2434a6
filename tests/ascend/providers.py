"""Providers of an Ascend NPU called on the CPU: what they are called with, and how their results are compared.

Their aten ops run as they are and the vendor's are imitated (`vendor_ops`), so this shows what they compute, not that an
NPU has a kernel for each of their ops.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import xgr_ops.ascend.activation
import xgr_ops.ascend.beam
import xgr_ops.ascend.cache
import xgr_ops.ascend.head
import xgr_ops.ascend.norm
import xgr_ops.ascend.rope

from tests.ascend import vendor_ops
from xgr_runtime.hal.registry import Impl, Op, all_ops
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ops.inputs import OpCase

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


def convert(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same arguments with every tensor changed, also inside dataclasses."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: convert(getattr(value, f.name), change) for f in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **fields)
    if isinstance(value, dict):
        return {name: convert(element, change) for name, element in value.items()}
    return value


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides."""
    if 0 in tensor.stride():
        return tensor[:1].clone().expand_as(tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in which half precision is fp32, for the reference."""
    return own_copy(tensor).float() if tensor.is_floating_point() else own_copy(tensor)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor inside arguments, in a fixed order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    convert(value, note)
    return found


def run(fn: Callable[..., Any], case: OpCase, args: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the contract specifies of a call; arguments that it may not write to are afterwards what they were."""
    untouched = {name: arg for name, arg in args.items() if name not in case.mutates}
    before = [tensor.clone() for tensor in tensors_of(untouched)]
    result = fn(**args)
    for old, new in zip(before, tensors_of(untouched), strict=True):
        assert torch.equal(old.contiguous().view(torch.uint8), new.contiguous().view(torch.uint8))
    return case.view(args, result)


def assert_close(
    got: torch.Tensor, expected: torch.Tensor, case: OpCase, dtype: torch.dtype
) -> None:
    """Within the tolerance of the dtype, or bit by bit where the case is exact."""
    assert got.shape == expected.shape, case.label
    tolerance = TOLERANCES[dtype]
    rtol, atol = (0.0, 0.0) if case.is_exact else (tolerance.rtol, tolerance.atol)
    torch.testing.assert_close(
        got.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True, msg=case.label
    )
