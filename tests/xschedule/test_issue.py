"""What issuing a batch does: one copy of its inputs, no wait, nothing allocated, whatever its groups and rules are."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pytest
import torch

from tests.helpers.engines import make_engine
from tests.helpers.strict_device import OpsOutsideGraphs, RuleBroken, StrictDevice
from tests.xschedule.test_worker import CASES, assert_same_bits, config, make_batch
from xgr_runtime.hal.pinned_ring import PinnedRing

if TYPE_CHECKING:
    from xgr_runtime import Engine, RuntimeConfig

__all__ = ["config"]  # a fixture


def issue_and_check(engine: Engine, device: StrictDevice, case: str) -> list[tuple[str, str]]:
    """The copies of a batch that has run before, issued anew."""
    batch = make_batch(engine, CASES[case])
    for _ in range(2):  # both entries have room for its groups then
        expected = engine.worker.run(batch)
    num_waits, num_pinned = device.num_waits, len(device._host_tensors)
    device.copies.clear()
    with OpsOutsideGraphs() as ops:
        pending = engine.worker.submit(batch)
    assert device.num_waits == num_waits, "the host waited"
    assert len(device._host_tensors) == num_pinned
    assert ops.names <= {"aten::copy_", "aten::index_fill_"}
    copies = list(device.copies)
    output = pending.wait()
    assert device.num_waits == num_waits + 1
    assert device.copies == copies
    for group, one, two in zip(batch.groups, output.groups, expected.groups, strict=True):
        assert_same_bits(one, two, group)
    return copies  # type: ignore[return-value]


@pytest.mark.parametrize("case", CASES)
def test_a_batch_is_issued_without_a_wait_and_without_memory(
    config: RuntimeConfig, case: str
) -> None:
    device = StrictDevice()
    with closing(make_engine(config, device)) as engine:
        copies = issue_and_check(engine, device, case)
    num_groups = len(CASES[case])
    first = [("compute", "host to device")]
    if num_groups > 1:  # the later groups' inputs wait beside the block
        first = [("inputs", "host to device"), ("compute", "device to device")]
    assert copies[: len(first)] == first
    rest = copies[len(first) :]
    assert rest.count(("results", "device to host")) == num_groups
    # each group's outcome is kept, and each one's inputs but the first are brought to where segments read
    assert rest.count(("compute", "device to device")) == 2 * num_groups - 1
    assert {lane for lane, what in rest if what == "host to device"} <= {"inputs"}


def test_without_rules_the_inputs_are_one_copy_and_the_outcome_another(
    config: RuntimeConfig,
) -> None:
    device = StrictDevice()
    with closing(make_engine(config, device)) as engine:
        plain = [(name, norm, [type(w)(w.history, w.widths) for w in wanted])
                 for name, norm, wanted in CASES["two catalogues"][:1]]  # fmt: skip
        batch = make_batch(engine, plain)
        engine.worker.run(batch)
        device.copies.clear()
        engine.worker.run(batch)
    assert device.copies == [
        ("compute", "host to device"),
        ("compute", "device to device"),
        ("results", "device to host"),
    ]


class WithoutGraphs(StrictDevice):
    """A device whose captures are what somebody suspects."""

    def capture(self, name: str, fn: object) -> NoReturn:
        raise RuntimeError(f"{name} is captured")

    def repeated_copy(self, target: torch.Tensor, source: torch.Tensor) -> NoReturn:
        raise RuntimeError("a copy may be captured")


def test_without_graphs_nothing_is_captured(config: RuntimeConfig) -> None:
    off = replace(config, graphs=False)
    with pytest.raises(RuntimeError, match="captured"):
        make_engine(config, WithoutGraphs())
    with closing(make_engine(off, WithoutGraphs())) as engine:
        for case in CASES:
            engine.worker.run(make_batch(engine, CASES[case]))


def test_more_batches_than_places_is_a_mistake(config: RuntimeConfig) -> None:
    with closing(make_engine(config, StrictDevice())) as engine:
        batch = make_batch(engine, CASES["two catalogues"])
        pending = [engine.worker.submit(batch) for _ in range(2)]
        with pytest.raises(AssertionError, match="has to be waited for"):
            engine.worker.submit(batch)
        for one in pending:
            one.wait()
        engine.worker.run(batch)


def test_a_ring_waits_where_it_is_full_and_not_before() -> None:
    """A quarter each: the fifth piece is the first one's memory, whose copies have to be done."""
    device = StrictDevice()
    ring = PinnedRing(device, 1024, what="rows", lower="nothing")
    target = torch.zeros(8, 256, dtype=torch.uint8)

    def write(number: int) -> None:
        piece = ring.take(256)
        piece.array[:] = number
        device.copy(target[number], piece.tensor)
        ring.issued()

    with device.segment("inputs", "inputs"):
        for number in range(4):
            write(number)
        with pytest.raises(RuleBroken, match="waits for an event"):
            write(4)
    assert device.num_waits == 0
    for number in range(4, 8):
        write(number)
    assert device.num_waits == 4
    assert target[:, 0].tolist() == list(range(8))


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_a_ring_never_meet_what_is_under_way(seed: int) -> None:
    """Random sizes: at any moment the pieces whose copies have not been waited for lie apart."""
    rng = np.random.default_rng(seed)
    device = StrictDevice()
    ring = PinnedRing(device, 4096, what="rows", lower="nothing")
    start = ring._block.data_ptr()
    under_way: list[tuple[int, int]] = []
    for _ in range(200):
        waits, size = device.num_waits, int(rng.choice([1, 63, 64, 65, 700, 2000, 4096]))
        piece = ring.take(size)
        # One event a piece: each wait ends the oldest.
        del under_way[: device.num_waits - waits]
        first = piece.array.ctypes.data - start
        assert 0 <= first <= first + size <= 4096
        assert piece.tensor.data_ptr() - start == first
        assert all(first + size <= begin or end <= first for begin, end in under_way)
        under_way.append((first, first + size))
        ring.issued()
