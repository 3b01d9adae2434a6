"""Every rule of the strict device raises on a stub that breaks it, and right segments pass."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.helpers.strict_device import RuleBroken, StrictDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.hal.device import Device

ONE = torch.ones(())
ROW = torch.arange(6.0)
MASK = ROW > 2
COUNTS = torch.tensor([1, 2, 0, 1, 1, 1])

HOST_READS: dict[str, Callable[[], object]] = {
    "item": lambda: ONE.item(),
    "tolist": lambda: ROW.tolist(),
    "numpy": lambda: ROW.numpy(),
    "cpu": lambda: ROW.cpu(),
    "bool": lambda: bool(ONE),
    "int": lambda: int(ONE),
    "float": lambda: float(ONE),
    "complex": lambda: complex(ONE),
    "index": lambda: [1, 2][torch.zeros((), dtype=torch.int64)],
    "slice": lambda: ROW[: torch.tensor(3)],
    "if": lambda: 1 if ONE > 0 else 0,
    "while": lambda: [0 for _ in range(torch.tensor(3))],
    "in": lambda: 1.0 in ROW,
    "equal": lambda: torch.equal(ROW, ROW),
    "equal as a method": lambda: ROW.equal(ROW),
    "allclose": lambda: torch.allclose(ROW, ROW),
    "is_nonzero": lambda: ONE.is_nonzero(),
    "array": lambda: np.asarray(ROW),
    "print": lambda: repr(ROW),
    "format": lambda: f"{ONE}",
}
DATA_DEPENDENT: dict[str, Callable[[], object]] = {
    "nonzero": lambda: ROW.nonzero(),
    "where": lambda: torch.where(MASK),
    "argwhere": lambda: torch.argwhere(MASK),
    "masked_select": lambda: ROW.masked_select(MASK),
    "mask": lambda: ROW[MASK],
    "mask written": lambda: ROW.clone().__setitem__(MASK, torch.ones(3)),
    "byte mask": lambda: torch.ops.aten.index(ROW, [MASK.to(torch.uint8)]),
    "unique": lambda: torch.unique(ROW),
    "unique_consecutive": lambda: torch.unique_consecutive(ROW),
    "repeat_interleave": lambda: ROW.repeat_interleave(COUNTS),
    "repeat_interleave of counts": lambda: torch.repeat_interleave(COUNTS),
    "bincount": lambda: COUNTS.bincount(),
}
HOST_COPIES: dict[str, Callable[[], object]] = {
    "tensor": lambda: torch.tensor([1, 2]),
    "as_tensor": lambda: torch.as_tensor([1, 2]),
    "from_numpy": lambda: torch.from_numpy(np.zeros(2)),
}


@pytest.fixture
def strict() -> StrictDevice:
    return StrictDevice()


def run_in_segment(device: StrictDevice, fn: Callable[[], object], name: str = "rounds") -> None:
    with device.segment(name):
        fn()


def test_it_is_a_device(strict: StrictDevice) -> None:
    device: Device = strict
    assert device.kind == "strict"
    assert device.torch_device.type == "cpu"


@pytest.mark.parametrize("name", sorted(HOST_READS))
def test_host_reads_raise(strict: StrictDevice, name: str) -> None:
    HOST_READS[name]()
    with pytest.raises(RuleBroken, match="host"):
        run_in_segment(strict, HOST_READS[name])
    HOST_READS[name]()


@pytest.mark.parametrize("name", sorted(DATA_DEPENDENT))
def test_shapes_that_depend_on_data_raise(strict: StrictDevice, name: str) -> None:
    DATA_DEPENDENT[name]()
    with pytest.raises(RuleBroken, match=r"depends on data|reads a length"):
        run_in_segment(strict, DATA_DEPENDENT[name])


@pytest.mark.parametrize("name", sorted(HOST_COPIES))
def test_host_sources_raise(strict: StrictDevice, name: str) -> None:
    with pytest.raises(RuleBroken, match="copies from the host"):
        run_in_segment(strict, HOST_COPIES[name])
    run_in_segment(strict, HOST_COPIES[name], name="inputs")


def test_reads_raise_where_inputs_are_copied_too(strict: StrictDevice) -> None:
    with pytest.raises(RuleBroken, match="tolist"):
        run_in_segment(strict, lambda: ROW.tolist(), name="inputs")


def test_synchronisation_raises(strict: StrictDevice) -> None:
    event = strict.record_event()
    event.wait()
    strict.synchronize()
    for fn in (strict.synchronize, event.wait, event.is_done):
        with pytest.raises(RuleBroken, match="synchronises"):
            run_in_segment(strict, fn)
    run_in_segment(strict, strict.record_event)


def test_copies_raise(strict: StrictDevice) -> None:
    host, device = strict.pinned_empty((3,), torch.float32), torch.zeros(3)
    strict.copy(device, host)
    run_in_segment(strict, lambda: strict.copy(device, host), name="inputs")
    with pytest.raises(RuleBroken, match="copies between host and device"):
        run_in_segment(strict, lambda: strict.copy(device, host))
    with pytest.raises(RuleBroken, match="touches host memory"):
        run_in_segment(strict, lambda: device.copy_(host[:3]))
    with pytest.raises(RuleBroken, match="allocates host memory"):
        run_in_segment(strict, lambda: strict.pinned_empty((1,), torch.int32))


def test_a_graph_sees_a_changed_input_address(strict: StrictDevice) -> None:
    buffers = {"x": torch.ones(4), "y": torch.zeros(4)}
    graph = strict.capture("rounds", lambda: buffers["y"].copy_(buffers["x"] * 2))
    buffers["x"].fill_(3.0)
    graph.replay()
    assert buffers["y"].tolist() == [6.0] * 4
    buffers["x"] = torch.ones(4)
    with pytest.raises(RuleBroken, match="changed input address"):
        graph.replay()


def test_a_graph_sees_a_changed_offset_into_the_same_buffer(strict: StrictDevice) -> None:
    buffer, views = torch.arange(8.0), {"x": slice(0, 4)}
    graph = strict.capture("rounds", lambda: buffer[views["x"]].mul(2.0))
    views["x"] = slice(4, 8)
    with pytest.raises(RuleBroken, match="op 0"):
        graph.replay()


def test_a_graph_sees_memory_that_a_replay_keeps(strict: StrictDevice) -> None:
    kept: list[torch.Tensor] = []

    def leak() -> None:
        if not kept:
            kept.append(torch.zeros(4))
        kept[0].add_(1.0)

    graph = strict.capture("rounds", leak)
    with pytest.raises(RuleBroken, match="the host took another path"):
        graph.replay()


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (lambda x: x.add_(2.0), "shape or constant"),
        (lambda x: x[:3].add_(1.0), "op 0"),
        (lambda x: x.mul_(1.0), "the host took another path"),
        (lambda x: None, "ends before aten::add_"),
        (lambda x: x.add_(1.0).add_(1.0), "the captured run had ended"),
    ],
)
def test_a_graph_sees_another_path(
    strict: StrictDevice, second: Callable[[torch.Tensor], object], expected: str
) -> None:
    x = torch.zeros(4)
    paths: list[Callable[[torch.Tensor], object]] = [lambda x: x.add_(1.0)]
    graph = strict.capture("rounds", lambda: paths[-1](x))
    paths.append(second)
    with pytest.raises(RuleBroken, match=expected):
        graph.replay()


def test_right_segments_pass_and_compute(strict: StrictDevice) -> None:
    x, index, out = torch.arange(12.0).view(3, 4), torch.tensor([2, 0]), torch.empty(2, 4)

    def fn() -> None:
        rows = x[index]
        order = torch.sort(rows, dim=1, descending=True, stable=True).indices
        best = rows.gather(1, order).masked_fill(rows > 100, float("-inf"))
        zeros = torch.zeros(2, 4)
        out.copy_(torch.where(best > 5, best, zeros) + torch.arange(4) + torch.full((2, 1), 0.5))
        out.index_copy_(0, index.clamp(max=1), out.clone())

    fn()
    expected = out.clone()
    out.zero_()
    graph = strict.capture("rounds", fn)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    assert graph.num_ops > 8
    assert graph.num_replays == 1
    with strict.segment("rounds"):
        graph.replay()
    assert torch.repeat_interleave(COUNTS, output_size=6).shape == (6,)
    run_in_segment(strict, lambda: ROW.repeat_interleave(COUNTS, output_size=6))


def test_reads_inside_a_graph_raise_at_capture(strict: StrictDevice) -> None:
    with pytest.raises(RuleBroken, match="tolist"):
        strict.capture("rounds", lambda: ROW.tolist())


def test_other_threads_may_read(strict: StrictDevice) -> None:
    values: list[object] = []
    with strict.segment("rounds"):
        reader = threading.Thread(target=lambda: values.append(ROW.tolist()))
        reader.start()
        reader.join()
    assert values == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]


def test_nothing_stays_behind(strict: StrictDevice) -> None:
    before = dict(torch.Tensor.__dict__)
    with pytest.raises(RuleBroken):
        run_in_segment(strict, ROW.nonzero)
    assert dict(torch.Tensor.__dict__) == before
    assert strict.segment_names == ["rounds"]
