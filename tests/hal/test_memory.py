"""Allocations by name: zeroed memory, and errors that say what it was for; what is no lack of memory stays what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from xgr_runtime.errors import DeviceError, DeviceLost, OpUnavailable
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.memory import allocate, allocate_pinned, room_for

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = torch.device("cpu")


class FullHost(CpuDevice):
    def pinned_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("no pinned memory")


def test_memory_is_zeroed() -> None:
    for got in (
        allocate((3, 5), torch.int32, CPU, what="a", lower="b"),
        allocate_pinned(CpuDevice(), (3, 5), torch.int32, what="a", lower="b"),
    ):
        assert torch.equal(got, torch.zeros(3, 5, dtype=torch.int32))


def test_no_room_names_bytes_purpose_and_option() -> None:
    with pytest.raises(
        DeviceError, match=f"^cpu has no room for {3 << 60} bytes of beams; lower rows$"
    ):
        allocate((3, 1 << 58), torch.float32, CPU, what="beams", lower="rows")
    with pytest.raises(
        DeviceError, match=r"^the host has no room for 24 bytes of beams; lower rows$"
    ):
        allocate_pinned(FullHost(), (3, 2), torch.float32, what="beams", lower="rows")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_kind_of_no_memory(error: Exception) -> None:
    with (
        pytest.raises(DeviceError, match=r"^here has no room for beams; lower rows$") as caught,
        room_for("beams", "rows", "here"),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        OpUnavailable("no provider"),
        DeviceError("the device is lost"),
        ValueError("a wrong shape"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_lack_of_memory_passes(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, room_for("beams", "rows", "here"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("code", "kind"), [(507035, DeviceLost), (161002, OpUnavailable), (207001, DeviceError)]
)
def test_an_npu_that_fails_is_not_full(code: int, kind: type[Exception]) -> None:
    """torch_npu raises RuntimeError for all of them; the fill of a new buffer is a kernel, too."""
    error = RuntimeError(
        f"f:a.cpp:1 NPU function error: call aclnnInplaceZero failed, error code is {code}\n"
        "[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR00100 PTA call acl api failed."
    )
    with pytest.raises(kind) as caught, room_for("beams", "rows", "here", kind="npu"):
        raise error
    assert type(caught.value) is kind
    assert ("no room for beams" in str(caught.value)) == (kind is DeviceError)
    assert caught.value.__cause__ is error
