"""Captured segments: replaying a plan equals running it, each graph is made once, stale ones go."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from tests.helpers import strict_device
from tests.helpers.strict_device import StrictDevice, StrictGraph
from xgr_runtime.hal.cpu import CpuDevice, CpuTimer
from xgr_runtime.xschedule.graph_runner import GraphRunner, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Work:
    """Segments that change their state in place: running one twice is not running it once."""

    def __init__(self) -> None:
        self.state = torch.zeros(2)

    def plan(self, slot_index: int = 0, num_rounds: int = 3) -> list[Segment]:
        def reset() -> None:
            self.state.zero_()

        def step() -> None:
            self.state.mul_(3.0).add_(1.0)

        def segment(name: str, run: Callable[[], None]) -> Segment:
            key = (name, slot_index)
            return Segment(name, key, run, CpuTimer(), (0, 1), slot_index=slot_index)

        segments = [segment("reset", reset)]
        return segments + [segment(f"round {i}", step) for i in range(num_rounds)]


@pytest.mark.parametrize("device", [CpuDevice(), StrictDevice()], ids=["eager", "captured"])
def test_a_plan_runs_each_segment_once_in_order(device: CpuDevice | StrictDevice) -> None:
    work, runner = Work(), GraphRunner(device)
    for num_rounds, expected in ((3, 13.0), (3, 13.0), (4, 40.0), (1, 1.0)):
        runner.run(work.plan(num_rounds=num_rounds))
        assert work.state.tolist() == [expected] * 2
    assert runner.num_captures == (5 if device.is_capturing_supported else 0)


def test_graphs_are_kept_by_key_and_the_least_recently_used_goes() -> None:
    work, runner = Work(), GraphRunner(StrictDevice(), max_graphs=4)
    runner.run(work.plan(0, 1))
    runner.run(work.plan(1, 1))
    runner.run(work.plan(0, 1))
    assert runner.num_captures == 4
    runner.run(work.plan(2, 1))
    assert runner.num_captures == 6
    runner.run(work.plan(0, 1))
    assert runner.num_captures == 6, "the one used last is still there"
    runner.run(work.plan(1, 1))
    assert runner.num_captures == 8


def test_a_plan_longer_than_the_store_still_runs() -> None:
    work, runner = Work(), GraphRunner(StrictDevice(), max_graphs=2)
    for _ in range(2):
        runner.run(work.plan(num_rounds=4))
        assert work.state.tolist() == [40.0] * 2


def test_stale_graphs_are_dropped_while_others_run() -> None:
    """Another thread loads catalogues, and drops graphs, all the time."""
    work, runner = Work(), GraphRunner(StrictDevice())
    stop = threading.Event()

    def drop() -> None:
        while not stop.is_set():
            runner.drop_slot(1)

    thread = threading.Thread(target=drop)
    thread.start()
    for turn in range(120):
        runner.run(work.plan(turn % 3, 3))
        assert work.state.tolist() == [13.0] * 2
    stop.set()
    thread.join()
    num_captures = runner.num_captures
    runner.run(work.plan(0, 3))
    runner.run(work.plan(2, 3))
    assert runner.num_captures == num_captures, "graphs of other slots were not touched"
    runner.drop_slot(0)
    runner.run(work.plan(0, 3))
    assert runner.num_captures == num_captures + 4


class Told(StrictGraph):
    """Remembers what its replays were told."""

    told: ClassVar[list[tuple[int, ...]]] = []

    def replay(self, kv_lens: Sequence[int] = ()) -> None:
        self.told.append(tuple(kv_lens))
        super().replay(kv_lens)


def test_a_replay_is_told_the_lengths_of_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_device, "StrictGraph", Told)
    monkeypatch.setattr(Told, "told", [])
    runner = GraphRunner(StrictDevice())
    for lengths in ((3, 5), (4, 0)):
        runner.run([Segment("round", "key", lambda: None, CpuTimer(), (0, 1), lengths)])
    assert Told.told == [(3, 5), (4, 0)]
    assert runner.num_captures == 1


def test_an_eager_segment_is_never_captured_and_none_is_where_graphs_are_off() -> None:
    work, device = Work(), StrictDevice()
    runner = GraphRunner(device)
    eager = [dataclasses.replace(segment, is_eager=True) for segment in work.plan(num_rounds=2)]
    runner.run([*eager[:2], work.plan(num_rounds=2)[2]])
    assert work.state.tolist() == [4.0] * 2
    assert runner.num_captures == 1
    off = GraphRunner(device, is_allowed=False)
    off.run(work.plan(num_rounds=3))
    assert work.state.tolist() == [13.0] * 2
    assert off.num_captures == 0
    assert len(device.graphs) == 1


def test_the_borders_of_a_segment_are_timed_outside_of_its_graph() -> None:
    device = StrictDevice()
    segment = Segment("round", "key", lambda: None, device.timer(), (3, 6))
    for _ in range(2):
        (timer,) = GraphRunner(device).run([segment])
        assert timer.seconds(3, 6) >= 0
        assert math.isnan(timer.seconds(3, 4))


def test_a_timer_and_the_points_of_it_come_together() -> None:
    for alone in ({"timer": CpuTimer()}, {"points": (0, 1)}):
        with pytest.raises(ValueError, match="round: a timer and its points belong together"):
            Segment("round", "key", lambda: None, **alone)
    assert GraphRunner(CpuDevice()).run([Segment("round", "key", lambda: None)]) == []


def test_a_device_that_holds_no_graph_runs_op_by_op() -> None:
    work, device = Work(), StrictDevice()
    runner = GraphRunner(device, 0)
    runner.run(work.plan(num_rounds=3))
    assert work.state.tolist() == [13.0] * 2
    assert (runner.num_captures, device.graphs) == (0, [])
