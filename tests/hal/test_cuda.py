"""What only a GPU can get wrong: work on several streams."""

from __future__ import annotations

import threading
import time
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from tests.helpers.catalogs import contiguous_tokens, random_catalog
from tests.helpers.engines import write_catalog
from xgr_runtime.config import CacheConfig
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.slot import CatalogSlot, plan_slot

if TYPE_CHECKING:
    from pathlib import Path

    from xgr_runtime.hal.device import Device

pytestmark = pytest.mark.device("cuda")
TOKENS = contiguous_tokens([8, 8, 8], 2)
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


def test_an_event_beside_a_capture_waits_for_its_end(device: Device) -> None:
    """Recorded into the capture it would break the graph, and waiting for it would never be allowed."""
    x = torch.zeros(4, device=device.torch_device)
    is_capturing = threading.Event()
    errors: list[BaseException] = []

    def add_one() -> None:
        x.add_(1)
        if torch.cuda.is_current_stream_capturing() and not is_capturing.is_set():
            is_capturing.set()
            time.sleep(0.2)

    def wait_beside() -> None:
        try:
            assert is_capturing.wait(30)
            device.record_event().wait()
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    beside = threading.Thread(target=wait_beside)
    beside.start()
    graph = device.capture("add", add_one)
    beside.join(30)
    assert not errors
    x.zero_()
    with device.segment("add"):
        graph.replay()
    device.record_event().wait()
    assert x.tolist() == [1.0] * 4


def test_a_kernel_that_was_never_started_is_found_and_then_captured(device: Device) -> None:
    """By a search that runs nothing; and by the capture itself, where nobody searched."""
    assert device.is_compiling
    layers, rules = (
        import_module("xgr_ops.triton.layers"),
        import_module("xgr_ops.cuda.launch_rules").RULES,
    )
    place = device.torch_device
    x = torch.randn(3, 24, device=place, generator=torch.Generator(place).manual_seed(0))
    out, odd = torch.zeros(3, 24, device=place), torch.zeros(3, 24, device=place)

    def norm(size: int, target: torch.Tensor) -> None:
        weight = torch.ones(size, device=place)
        target[:, :size].copy_(layers.launch_rms_norm(x[:, :size], weight, 1e-6, rules))

    (kernel,) = device.missing_kernels("norm", partial(norm, 24, out))
    device.synchronize()
    assert not out.any()
    kernel.make_ready()
    assert not device.missing_kernels("norm", partial(norm, 24, out))
    for size, target in ((24, out), (23, odd)):
        graph = device.capture("norm", partial(norm, size, target))
        with device.segment("norm"):
            graph.replay()
        device.synchronize()
        expected = torch.nn.functional.rms_norm(x[:, :size], (size,), eps=1e-6)
        torch.testing.assert_close(target[:, :size], expected)


def test_every_thread_captures_products(device: Device) -> None:
    """The product library has a handle a thread, which cannot be made during a capture."""
    x = torch.eye(16, device=device.torch_device)
    out, errors = torch.zeros_like(x), list[BaseException]()

    def double() -> None:
        torch.mm(x, x + x, out=out)

    def capture() -> None:
        try:
            graph = device.capture("double", double)
            with device.segment("double"):
                graph.replay()
            device.synchronize()
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    for _ in range(2):
        out.zero_()
        torch.cuda.synchronize()
        beside = threading.Thread(target=capture)
        beside.start()
        beside.join(60)
        assert not errors
        assert torch.equal(out, 2 * torch.eye(16, device=device.torch_device))
    capture()
    assert not errors


def test_captures_follow_those_that_were_thrown_away(device: Device) -> None:
    """Also where a tensor that was made in one of them lives on, as a library's workspace does."""
    x = torch.ones(4, device=device.torch_device)
    made = []

    def keep() -> None:
        made.append(x + 1)

    def add_one() -> None:
        x.add_(1)

    for _ in range(3):
        assert not device.missing_kernels("keep", keep)
    graph = device.capture("add", add_one)
    device.synchronize()
    x.zero_()
    with device.segment("add"):
        graph.replay()
    device.synchronize()
    assert len(made) == 3
    assert x.tolist() == [1.0] * 4


def test_a_capture_that_failed_leaves_room_for_the_next(device: Device) -> None:
    """Waiting for the device inside a capture makes the driver end it, with torch's allocator still in the middle of it."""
    x = torch.ones(4, device=device.torch_device)
    stream = torch.cuda.current_stream()

    def wait() -> None:
        assert x[x > 0].shape  # the host has to know how many

    def add_one() -> None:
        x.add_(1)

    for _ in range(2):
        with pytest.raises(RuntimeError, match="captur"):
            device.capture("wait", wait)
    assert torch.cuda.current_stream() == stream
    graph = device.capture("add", add_one)
    device.synchronize()
    x.zero_()
    with device.segment("add"):
        graph.replay()
    device.synchronize()
    assert x.tolist() == [1.0] * 4


def test_a_loaded_slot_can_be_freed_at_once(device: Device, tmp_path: Path) -> None:
    """What takes its memory next is not written into by copies of the load that are still to come."""
    catalog = Catalog.open(write_catalog(tmp_path / "items.xgr", random_catalog(3, 300, TOKENS)))
    catalog.verify()
    slot = CatalogSlot(plan_slot(catalog, CacheConfig()), device, 2, 1)
    sizes = [level.alive_RE.shape for level in slot.levels]
    torch.cuda.synchronize()
    with device.on("loads"):
        keep_busy()  # so that the copies are still to come when the load has asked for them
        busy = device.record_event()
    slot.load(catalog)
    assert busy.is_done()
    slot.free()
    later = [torch.zeros(shape, dtype=torch.bool, device=device.torch_device) for shape in sizes]
    torch.cuda.synchronize()
    assert not any(zeros.any() for zeros in later)
