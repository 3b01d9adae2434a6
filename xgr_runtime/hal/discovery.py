"""Opening a device by name. Asking for one that is absent is an error; only `auto` moves on, and says why."""

from dataclasses import dataclass

from xgr_runtime.errors import DeviceError
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.cuda import CudaDevice, why_no_cuda
from xgr_runtime.hal.device import Device

DEVICE_CHOICES = ("auto", "npu", "cuda", "cpu")


@dataclass(frozen=True)
class OpenedDevice:
    """A device and, for `auto`, why the preferred ones were passed over."""

    device: Device
    passed_over: tuple[tuple[str, str], ...] = ()


def why_no_npu() -> str | None:
    """Why no Ascend NPU can be opened."""
    return "this version has no Ascend device yet"


def open_device(choice: str) -> OpenedDevice:
    """Open 'npu', 'cuda' or 'cpu', or with 'auto' the first of them that is there.

    A named device that is absent is a DeviceError, never a fallback.
    """
    if choice not in DEVICE_CHOICES:
        raise DeviceError(f"device must be one of {', '.join(DEVICE_CHOICES)}, got {choice!r}")
    reasons = {"npu": why_no_npu, "cuda": why_no_cuda}
    if choice in reasons:
        reason = reasons[choice]()
        if reason is not None:
            raise DeviceError(
                f"device {choice!r} was asked for but is not usable here: {reason}; use --device auto or cpu"
            )
    if choice == "cuda":
        return OpenedDevice(CudaDevice())
    if choice == "cpu":
        return OpenedDevice(CpuDevice())
    passed_over = tuple(
        (kind, reason) for kind, check in reasons.items() if (reason := check()) is not None
    )
    if all(kind != "cuda" for kind, _ in passed_over):
        return OpenedDevice(CudaDevice(), passed_over)
    return OpenedDevice(CpuDevice(), passed_over)
