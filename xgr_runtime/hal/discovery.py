"""Opening a device by name. Asking for one that is absent is an error; only `auto` moves on, and says why.

A new kind of device is one entry of `DEVICE_KINDS`, in the order of `auto`, and its name in `RuntimeConfig.device`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from xgr_runtime.errors import DeviceError
from xgr_runtime.hal.ascend import AscendDevice
from xgr_runtime.hal.ascend_probe import ascend_versions, why_no_npu
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.cuda import CudaDevice, why_no_cuda
from xgr_runtime.hal.device import Device


@dataclass(frozen=True)
class OpenedDevice:
    """A device and, for `auto`, why the preferred ones were passed over."""

    device: Device
    passed_over: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class DeviceKind:
    """why_absent: why none can be opened on this machine, or None. open: only called where that is None.

    versions: of what the vendor installs beside pip's packages, by name; "" for what is not found.
    """

    why_absent: Callable[[], str | None]
    open: Callable[[], Device]
    versions: Callable[[], dict[str, str]] = dict


DEVICE_KINDS: dict[str, DeviceKind] = {
    "npu": DeviceKind(lambda: why_no_npu(), AscendDevice, ascend_versions),
    "cuda": DeviceKind(lambda: why_no_cuda(), CudaDevice),
    "cpu": DeviceKind(lambda: None, CpuDevice),
}
DEVICE_CHOICES = ("auto", *DEVICE_KINDS)


def open_device(choice: str) -> OpenedDevice:
    """Open a device by its kind, or with 'auto' the first kind of the table that is there.

    A named device that is absent is a DeviceError, never a fallback.
    """
    if choice not in DEVICE_CHOICES:
        raise DeviceError(f"device must be one of {', '.join(DEVICE_CHOICES)}, got {choice!r}")
    passed_over = list[tuple[str, str]]()
    for name, kind in DEVICE_KINDS.items():
        if choice not in ("auto", name):
            continue
        reason = kind.why_absent()
        if reason is None:
            try:
                return OpenedDevice(kind.open(), tuple(passed_over))
            except DeviceError as error:
                reason = str(error)
        passed_over.append((name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise DeviceError(
        f"device {choice!r} was asked for but is not usable here: {reasons}; use --device auto or cpu"
    )
