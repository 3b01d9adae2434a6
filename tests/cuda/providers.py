"""Every provider of a GPU with the cases of its op that it takes, those that a test can afford."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from xgr_runtime.conformance.comparison import convert
from xgr_runtime.conformance.op_cases import GENERATORS
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec, all_ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xgr_runtime.conformance.op_case import Args, OpCase
    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Impl, Op

DTYPES = (torch.bfloat16, torch.float32)
SLOW_CASES = ("512",)  # many rows, and no path of their own
MOST_CASES = 6  # each compiles kernels of its own


def every_provider() -> list[Any]:
    """Parameters (op, provider's Impl) of a test; without Triton, or anywhere but on a GPU, there may be none."""
    load_providers("cuda")
    return [
        pytest.param(op, found, id=f"{name}-{found.provider}")
        for name, op in all_ops().items()
        for found in op.impls
        if found.device_kind == "cuda"
    ]


def cases_of(
    op: Op[..., Any], found: Impl[..., Any], dtype: torch.dtype, device: Device
) -> list[OpCase]:
    """Some of the cases that the provider takes on this device, from the first to the last."""
    taken = []
    for case in GENERATORS[op.name](dtype):
        spec = OpSpec("cuda", dtype, device.capability, case.dims)
        if found.accepts(spec) is None and not any(part in case.label for part in SLOW_CASES):
            taken.append(case)
    places = {place * (len(taken) - 1) // (MOST_CASES - 1) for place in range(MOST_CASES)}
    return [taken[place] for place in sorted(places)] if taken else []


def assert_none_is_missing(
    op: Op[..., Any], found: Impl[..., Any], dtypes: Sequence[torch.dtype], device: Device
) -> None:
    """A provider without a case has to refuse the dtypes on this device altogether."""
    specs = [OpSpec("cuda", dtype, device.capability) for dtype in dtypes]
    taken = [str(spec.dtype) for spec in specs if found.accepts(spec) is None]
    assert not taken, f"no case of {op.name} for {found.provider}, which takes {', '.join(taken)}"


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor inside an argument, in a fixed order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    convert(value, note)
    return found


def specified(op: Op[..., Any], case: OpCase, args: Args, result: Any) -> dict[str, torch.Tensor]:
    """What the contract defines of a call, read without the host, so that a graph can hold it."""
    if op.name != "reorder_unshared_kv":
        return case.view(args, result)
    return {"kv_rows": args["kv_rows"][:, :-1], "slot_out_N": args["slot_out_N"]}
