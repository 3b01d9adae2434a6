"""The runtime's NPU device under the fake's rules: each of its precautions, and what raises where it is taken away."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.ascend import fake_npu
from tests.ascend.fake_npu import RuleBroken
from xgr_runtime.hal.ascend import AscendDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.fake_npu

Tensor = torch.Tensor
LOCKED_S = 0.2  # how long a thread that must wait is watched
TIMEOUT_S = 60.0


@pytest.fixture
def device() -> AscendDevice:
    fake_npu.synchronize()
    return AscendDevice()


def on(device: AscendDevice, *values: float) -> Tensor:
    return torch.tensor(values, device=device.torch_device)


def test_a_batch_of_copies_and_work(device: AscendDevice) -> None:
    a, out = on(device, 0, 0), device.pinned_empty((2,), torch.float32)
    source = device.pinned_empty((2,), torch.float32).fill_(3)
    with device.segment("inputs"):
        device.copy(a, source)
    with device.segment("work"):
        b = a * 2
        device.copy(out, b)
    event = device.record_event()
    assert out.isnan().all()
    event.wait()
    assert out.tolist() == [6, 6]


def test_segments_follow_the_default_stream(
    device: AscendDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = on(device, 1, 2).add_(1)
    with device.segment("work"):
        b = a * 2
    device.synchronize()
    assert b.tolist() == [4, 6]
    monkeypatch.setattr(AscendDevice, "_follow_default_stream", lambda self, stream: None)
    a.zero_()
    with device.segment("work"), pytest.raises(RuleBroken, match="has written it"):
        a * 2
    with pytest.raises(RuleBroken, match="has written it"):
        device.copy(a, device.pinned_empty((2,), torch.float32).fill_(0))


@pytest.fixture
def attended(device: AscendDevice) -> Iterator[tuple[Any, Callable[[], list[float]]]]:
    """A captured graph of one attention over five equal keys with values 0..4, and how to read its result."""
    q = torch.zeros(1, 1, 16, device=device.torch_device).half()
    k = torch.zeros(1, 5, 16, device=device.torch_device).half()
    v = torch.arange(5.0, device=device.torch_device)[None, :, None].expand(1, 5, 16).half()
    out = torch.zeros(1, 1, 16, device=device.torch_device).half()
    v = v.contiguous()

    def work() -> None:
        out.copy_(
            torch.ops.npu.npu_fused_infer_attention_score(
                q, k, v, num_heads=1, input_layout="BSH", actual_seq_lengths_kv=[5]
            )[0]
        )

    graph = device.capture("attention", work)
    graph.inputs = q, k, v  # type: ignore[attr-defined]

    def read() -> list[float]:
        device.synchronize()
        return [float(x) for x in out[0, 0, :1].tolist()]

    yield graph, read
    device.synchronize()  # before its memory goes


def replay(device: AscendDevice, graph: Any, *kv_lens: int) -> None:
    with device.segment("replay"):
        graph.replay(kv_lens)


def test_a_replay_is_told_its_lengths(
    device: AscendDevice, attended: tuple[Any, Callable[[], list[float]]]
) -> None:
    graph, read = attended
    for length, mean in ((1, 0.0), (5, 2.0), (3, 1.0)):
        replay(device, graph, length)
        assert read() == [mean]
    for length in (1, 5):  # nobody waits between
        replay(device, graph, length)
    assert read() == [2.0]


def test_an_update_waits_for_the_replay_before(
    device: AscendDevice, attended: tuple[Any, Callable[[], list[float]]]
) -> None:
    graph, _ = attended
    replay(device, graph, 2)
    graph._last_end = None
    with pytest.raises(RuleBroken, match="whose last replay the host has not waited for"):
        replay(device, graph, 2)


def started(
    fn: Callable[[], object], errors: list[BaseException], most_s: float
) -> threading.Thread:
    """A thread that runs fn beside a capture; given time to do harm before this returns, so much at most."""

    def work() -> None:
        try:
            fn()
        except Exception as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(most_s)
    return thread


INTRUDERS: dict[str, Callable[[AscendDevice, Tensor], object]] = {
    "copy": lambda device, a: device.copy(a, torch.zeros(2).pin_memory()),
    "shared load": lambda device, a: loaded(device),
    "event": lambda device, a: device.record_event().wait(),
    "pinned memory": lambda device, a: device.pinned_empty((2,), torch.float32),
}


def loaded(device: AscendDevice) -> Tensor:
    with device.sharing():
        return torch.ones(3).to(device.torch_device)


def captured_beside(
    device: AscendDevice, fn: Callable[[], object], most_s: float = TIMEOUT_S
) -> tuple[Any, list[BaseException]]:
    """A graph, and the errors of the thread that ran fn meanwhile. most_s: until the capture goes on, whatever fn waits for."""
    errors: list[BaseException] = []
    threads: list[threading.Thread] = []
    a = on(device, 1, 2)

    def work() -> None:
        a.add_(1)
        if fake_npu.is_current_stream_capturing():
            threads.append(started(fn, errors, most_s))

    try:
        graph = device.capture("beside", work)
    finally:
        for thread in threads:
            thread.join()
    assert len(threads) == 1
    with device.segment("replay"):
        graph.replay()
    device.synchronize()
    assert a.tolist() == [3, 4]  # once before the capture, once in the replay
    return graph, errors


@pytest.mark.parametrize("name", INTRUDERS)
def test_other_threads_wait_for_a_capture(device: AscendDevice, name: str) -> None:
    target = on(device, 0, 0)
    _, errors = captured_beside(device, lambda: INTRUDERS[name](device, target), LOCKED_S)
    assert errors == []
    device.synchronize()


@pytest.mark.parametrize("name", ["copy", "shared load"])
def test_without_the_lock_they_break_it(
    device: AscendDevice, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target = on(device, 0, 0)
    monkeypatch.setattr(device, "_lock", contextlib.nullcontext())
    with pytest.raises(RuleBroken, match=r"the capture is broken: .* by another thread"):
        captured_beside(device, lambda: INTRUDERS[name](device, target))


def test_an_event_waited_for_without_the_lock_breaks_it(
    device: AscendDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = device.record_event()
    monkeypatch.setattr(AscendDevice, "is_running_thread", lambda self: True)
    with pytest.raises(RuleBroken, match=r"the capture is broken: .* by another thread"):
        captured_beside(device, event.wait)


def test_a_timer_in_a_capture(device: AscendDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    timer, a = device.timer(), on(device, 1, 2)

    def work() -> None:
        timer.record(0)
        a.add_(1)

    device.capture("timed", work)

    class Blind(AscendDevice):
        """Does not know that it captures."""

        is_capturing = property(lambda self: False, lambda self, value: None)

    blind = Blind()
    timer = blind.timer()
    with pytest.raises(RuleBroken, match="a timing event during capture"):
        blind.capture("timed", work)


def test_memory_in_bytes(device: AscendDevice) -> None:
    before = device.memory()
    kept = torch.zeros(1000, device=device.torch_device)
    after = device.memory()
    assert after.used_bytes - before.used_bytes == kept.nbytes
    assert after.peak_bytes >= after.used_bytes
    assert after.total_bytes == 64 << 30
