"""Opening devices: an absent one is an error, `auto` says what it passed over."""

from __future__ import annotations

import dataclasses
import typing
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from xgr_runtime.config import RuntimeConfig
from xgr_runtime.errors import DeviceError
from xgr_runtime.hal import ascend, discovery
from xgr_runtime.hal.discovery import DEVICE_CHOICES, DEVICE_KINDS, open_device

if TYPE_CHECKING:
    from xgr_runtime.hal.device import Device


def double(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x).mul_(2.0)


def absent(reason: str) -> str | None:
    return reason


def test_an_absent_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "why_no_cuda", lambda: absent("no driver"))
    with pytest.raises(
        DeviceError, match=r"'cuda' was asked for .* no driver; use --device auto or cpu"
    ):
        open_device("cuda")


def test_npu_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "why_no_npu", lambda: absent("no card"))
    with pytest.raises(
        DeviceError, match="'npu' was asked for but is not usable here: npu: no card"
    ):
        open_device("npu")


def test_the_configuration_knows_every_kind() -> None:
    assert typing.get_args(typing.get_type_hints(RuntimeConfig)["device"]) == DEVICE_CHOICES


@pytest.mark.parametrize("name", ["gpu", "", "CPU", "cuda:0"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(
        DeviceError, match=f"device must be one of {', '.join(DEVICE_CHOICES)}, got"
    ):
        open_device(name)


def test_auto_moves_on_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "why_no_npu", lambda: absent("no card"))
    monkeypatch.setattr(discovery, "why_no_cuda", lambda: absent("no driver"))
    opened = open_device("auto")
    assert opened.device.kind == "cpu"
    kinds = [kind for kind, _ in opened.passed_over]
    assert kinds == list(DEVICE_KINDS)[: len(kinds)]
    assert [kind for kind in kinds if kind in ("npu", "cuda")] == ["npu", "cuda"]
    reasons = dict(opened.passed_over)
    assert (reasons["npu"], reasons["cuda"]) == ("no card", "no driver")
    assert all(reasons.values())


def test_what_is_there_and_does_not_open_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Device:
        raise DeviceError("the NPU cannot be opened: AssertionError: no streams left")

    kind = dataclasses.replace(DEVICE_KINDS["npu"], why_absent=lambda: None, open=broken)
    monkeypatch.setitem(DEVICE_KINDS, "npu", kind)
    monkeypatch.setattr(discovery, "why_no_cuda", lambda: absent("no driver"))
    opened = open_device("auto")
    assert opened.device.kind == "cpu"
    assert "no streams left" in dict(opened.passed_over)["npu"]
    with pytest.raises(DeviceError, match=r"'npu' was asked for .* no streams left; use --device"):
        open_device("npu")


@pytest.mark.parametrize(
    "error", [AssertionError("odd"), AttributeError("no Stream"), SystemExit(0)]
)
def test_whatever_a_broken_torch_npu_raises_means_no_device(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail() -> int:
        raise error

    broken = SimpleNamespace(current_device=fail)
    monkeypatch.setattr(ascend, "npu", lambda: broken)
    with pytest.raises(DeviceError, match=f"cannot be opened: {type(error).__name__}"):
        ascend.AscendDevice()


def test_a_named_device_passes_nothing_over() -> None:
    opened = open_device("cpu")
    assert opened.device.kind == "cpu"
    assert opened.passed_over == ()


def test_the_device_of_this_run(device: Device) -> None:
    """The protocol on whatever the tests run on: copies both ways, events, a graph on fixed addresses, memory."""
    assert device.name
    assert device.torch_device.type == device.kind
    host = device.pinned_empty((4,), torch.float32)
    host.copy_(torch.arange(4.0))
    x = torch.zeros(4, device=device.torch_device)
    device.synchronize()
    device.copy(x, host)
    y = torch.zeros(4, device=device.torch_device)
    device.synchronize()
    graph = device.capture("double", lambda: double(x, y))
    host.fill_(5.0)
    device.copy(x, host)
    with device.segment("double"):
        graph.replay()
    device.copy(host, y)
    event = device.record_event()
    event.wait()
    assert event.is_done()
    assert host.tolist() == [10.0] * 4
    memory = device.memory()
    assert memory.peak_bytes >= 0
    assert memory.used_bytes >= 0


def test_a_repeated_copy_takes_what_is_there_each_time(device: Device) -> None:
    host = device.pinned_empty((4,), torch.float32)
    x = torch.zeros(4, device=device.torch_device)
    device.synchronize()
    send = device.repeated_copy(x, host)
    for value in (1.0, 2.0):
        host.fill_(value)
        with device.segment("inputs"):
            send()
        device.record_event().wait()
        assert x.tolist() == [value] * 4
