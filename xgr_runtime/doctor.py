"""What this machine can run: versions, devices with the reason for each absent one, providers with every refusal."""

import importlib.metadata
import platform
from dataclasses import asdict, dataclass

import torch

from xgr_runtime.errors import DeviceError
from xgr_runtime.hal.discovery import DEVICE_KINDS
from xgr_runtime.hal.registry import OpSpec, all_ops, explain

PACKAGES = (
    *("torch", "torch-npu", "triton", "triton-ascend"),
    *("numpy", "grpcio", "protobuf", "safetensors"),
)
NOT_INSTALLED = "not installed"
NOT_FOUND = "not found"


@dataclass(frozen=True)
class DeviceReport:
    """One kind of device. reason: why it cannot be opened, "" when it can."""

    kind: str
    is_usable: bool
    name: str
    capability: str
    total_bytes: int
    reason: str


@dataclass(frozen=True)
class OpReport:
    """Which provider an op would bind on a device in one dtype; provider "" means none. refusals: "provider: reason"."""

    op: str
    device: str
    dtype: str
    provider: str
    refusals: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Everything `xgr doctor` prints. packages: of pip; libraries: what vendors of the devices install beside it."""

    python: str
    platform: str
    packages: dict[str, str]
    libraries: dict[str, str]
    devices: tuple[DeviceReport, ...]
    ops: tuple[OpReport, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)


def examine(
    *, allow_reference: bool, device: str | None = None, dtype: torch.dtype = torch.float32
) -> Report:
    """Look at this machine. Ops are reported for each usable device; the CPU is always one.

    device: look at that kind only. Raises DeviceError where there is no such kind.
    """
    if device is not None and device not in DEVICE_KINDS:
        raise DeviceError(f"device must be one of {', '.join(DEVICE_KINDS)}, got {device!r}")
    kinds = tuple(DEVICE_KINDS) if device is None else (device,)
    devices = tuple(_examine_device(kind) for kind in kinds)
    ops = tuple(
        report
        for found in devices
        if found.is_usable
        for report in _examine_ops(found, dtype, allow_reference=allow_reference)
    )
    return Report(
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: _version(name) for name in PACKAGES},
        libraries={
            name: version or NOT_FOUND
            for kind in kinds
            for name, version in DEVICE_KINDS[kind].versions().items()
        },
        devices=devices,
        ops=ops,
    )


def _examine_device(kind: str) -> DeviceReport:
    reason = DEVICE_KINDS[kind].why_absent()
    if reason is not None:
        return DeviceReport(kind, False, "", "", 0, reason)
    try:
        device = DEVICE_KINDS[kind].open()
    except DeviceError as error:
        return DeviceReport(kind, False, "", "", 0, str(error))
    return DeviceReport(kind, True, device.name, device.capability, device.memory().total_bytes, "")


def _examine_ops(
    device: DeviceReport, dtype: torch.dtype, *, allow_reference: bool
) -> list[OpReport]:
    spec = OpSpec(device_kind=device.kind, dtype=dtype, capability=device.capability)
    reports = []
    for op in all_ops().values():
        binding, refusals = explain(op, spec, allow_reference=allow_reference)
        provider = binding.provider if binding else ""
        reasons = tuple(f"{r.provider}: {r.reason}" for r in refusals)
        reports.append(
            OpReport(op.name, device.kind, str(dtype).removeprefix("torch."), provider, reasons)
        )
    return reports


def _version(package: str) -> str:
    if package == "torch":
        return str(
            torch.__version__
        )  # names the build (+cpu, +cu130), which the package's metadata may not
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED
