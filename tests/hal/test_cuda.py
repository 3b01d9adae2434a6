"""What only a GPU can get wrong: work on several streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from xgr_runtime.hal.device import Device

pytestmark = pytest.mark.device("cuda")
BUSY_CYCLES = 200_000_000  # about a tenth of a second


def keep_busy() -> None:
    """Give the default stream something to do first."""
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]


def pinned(device: Device, values: torch.Tensor) -> torch.Tensor:
    host = device.pinned_empty(values.shape, values.dtype)
    host.copy_(values)
    return host


def test_a_copy_comes_after_the_zeros_of_its_target(device: Device) -> None:
    host = pinned(device, torch.arange(1000.0))
    del_me = torch.empty(1000, device=device.torch_device)
    del del_me  # the next buffer takes its memory: a fresh one would make everything wait
    keep_busy()
    target = torch.zeros(1000, device=device.torch_device)
    device.copy(target, host)
    device.record_event().wait()
    torch.cuda.synchronize()
    assert torch.equal(target.cpu(), torch.arange(1000.0))


def test_a_segment_comes_after_what_the_default_stream_was_given(device: Device) -> None:
    host, back = pinned(device, torch.arange(1000.0)), device.pinned_empty((1000,), torch.float32)
    keep_busy()
    source = torch.full((1000,), 3.0, device=device.torch_device)
    target = torch.zeros(1000, device=device.torch_device)
    with device.segment("inputs"):
        device.copy(target, host)
        target += source
        device.copy(back, target)
    device.record_event().wait()
    assert torch.equal(back, torch.arange(1000.0) + 3)


def test_a_captured_graph_comes_after_what_the_default_stream_was_given(device: Device) -> None:
    x, back = torch.zeros(4, device=device.torch_device), device.pinned_empty((4,), torch.float32)

    def add_one() -> None:
        x.add_(1)

    graph = device.capture("add", add_one)
    keep_busy()
    x.fill_(5.0)
    with device.segment("add"):
        graph.replay()
        device.copy(back, x)
    device.record_event().wait()
    assert back.tolist() == [6.0] * 4
