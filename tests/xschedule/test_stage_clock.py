"""Stage times: a delay put into one stage shows up in that stage, in no other, and the stages fit into the batch."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.engines import make_engine, record_batches, request_of
from tests.helpers.product import watch_batches
from tests.helpers.strict_device import RuleBroken, StrictDevice
from tests.xschedule.running import history
from xgr_runtime.config import OpsConfig
from xgr_runtime.hal import cpu
from xgr_runtime.hal.cpu import CpuDevice, CpuTimer
from xgr_runtime.types import Search
from xgr_runtime.xschedule.stage_clock import RoundMarks, StageClock
from xgr_runtime.xschedule.totals import BatchHistograms

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.helpers.engines import Oracle
    from xgr_runtime import Engine, RuntimeConfig
    from xgr_runtime.hal.device import Device
    from xgr_runtime.xschedule.batch import Batch, BatchOutput

DEVICES: dict[str, Callable[[], Device]] = {
    "cpu": CpuDevice,
    "one graph of all rounds": StrictDevice,
    "one graph per round": lambda: StrictDevice(is_graph_per_round=True),
}
NUM_LEVELS = 3


@dataclass
class Clock:
    """What the timers of the host read: nothing takes any time but what is delayed, by a second each."""

    now_s: float = 0.0

    def delayed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.now_s += 1.0
            return fn(*args, **kwargs)

        return call


def delay_select(engine: Engine, clock: Clock) -> None:
    for ops in engine.runner._bound.values():
        ops.select_beams = clock.delayed(ops.select_beams)


def delay_context(engine: Engine, clock: Clock) -> None:
    model: Any = engine.runner._model
    model.context = clock.delayed(model.context)


def delay_step(engine: Engine, clock: Clock) -> None:
    model: Any = engine.runner._model
    model.step = clock.delayed(model.step)


def delay_inputs(engine: Engine, clock: Clock) -> None:
    inputs: Any = engine.runner.inputs
    inputs.send_first = clock.delayed(inputs.send_first)


def delay_outcome(engine: Engine, clock: Clock) -> None:
    state: Any = engine.runner.state
    state.copy_to_host = clock.delayed(state.copy_to_host)


# what is delayed, and how often in (inputs, prefill, each round, the selection in each round, outcome)
DELAYS: dict[str, tuple[Callable[[Engine, Clock], None], list[int]]] = {
    "inputs": (delay_inputs, [1, 0, 0, 0, 0, 0, 0, 0, 0]),
    "context": (delay_context, [0, 1, 0, 0, 0, 0, 0, 0, 0]),
    "step": (delay_step, [0, 0, 0, 1, 1, 0, 0, 0, 0]),
    "select": (delay_select, [0, 0, 1, 1, 1, 1, 1, 1, 0]),
    "outcome": (delay_outcome, [0, 0, 0, 0, 0, 0, 0, 0, 1]),
}


def flat(ran: tuple[Batch, BatchOutput]) -> list[float]:
    times = ran[1].times
    (rounds,), (selects,) = times.rounds_s, times.selects_s
    known = [seconds for seconds in (*rounds, *selects) if seconds is not None]
    assert len(known) == len(rounds) + len(selects)
    return [times.to_device_s, times.prefill_s, *known, times.to_host_s]


@pytest.mark.parametrize(
    ("place", "stage"),
    [("cpu", stage) for stage in DELAYS]
    + [("one graph of all rounds", "select"), ("one graph per round", "step")],
)
def test_a_delay_is_seen_in_its_stage_alone(
    config: RuntimeConfig,
    oracle: Oracle,
    place: str,
    stage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delay, counts = DELAYS[stage]
    clock = Clock()
    monkeypatch.setattr(cpu, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    with make_engine(allowing_reference(config), DEVICES[place]()) as engine:
        recording = record_batches(engine)

        def three() -> list[list[float]]:
            recording.batches.clear()
            for index in range(3):
                search = Search(beam_width=8)
                engine.recommend([request_of(str(index), history(oracle), search)])
            return list(map(flat, recording.batches))

        before = three()
        delay(engine, clock)
        after = three()
    assert before == [[0] * len(counts)] * 3
    assert after == [counts] * 3


def test_stages_are_disjoint_and_within_the_batch(
    config: RuntimeConfig, oracle: Oracle, device: Device
) -> None:
    """On whatever device the tests run: nothing is counted twice, every stage is there, a selection is part of its round."""
    with make_engine(allowing_reference(config), device) as engine:
        starts_s, walls_s, outputs = list[float](), list[float](), list[Any]()

        def end(_: object, output: object) -> None:
            outputs.append(output)
            walls_s.append(time.perf_counter() - starts_s[-1])

        watch_batches(engine, lambda _: starts_s.append(time.perf_counter()), end)
        for index in range(6):
            engine.recommend([request_of(str(index), history(oracle), Search(beam_width=8))])
    assert len(outputs) == 6
    for output, wall_s in zip(outputs, walls_s, strict=True):
        times = pickle.loads(pickle.dumps(output)).times
        assert times == output.times
        (rounds,), (selects,) = times.rounds_s, times.selects_s
        assert len(rounds) == len(selects) == NUM_LEVELS
        parts = [times.to_device_s, times.prefill_s, *rounds, times.to_host_s]
        assert min(parts) > 0
        assert sum(parts) <= times.span_s <= wall_s
        for whole, part in zip(rounds, selects, strict=True):
            # an NPU cannot time inside of its graphs
            assert part is None if device.kind == "npu" else 0 < (part or 0) < whole
    # A graph that is replayed times itself anew.
    assert len({output.times.prefill_s for output in outputs}) > 1
    by_round = zip(*(output.times.rounds_s[0] for output in outputs), strict=True)
    assert all(len(set(seconds)) > 1 for seconds in by_round)


class SteppedTimer(CpuTimer):
    """A point is the time that the device shows."""

    def __init__(self, device: SteppedDevice) -> None:
        super().__init__()
        self._device = device

    def record(self, point: int) -> None:
        self._times_s[point] = self._device.now_s
        self._device.num_points += 1


class SteppedDevice(CpuDevice):
    """Its time passes where a test says so, and it counts the points that are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.num_points = 0.0, 0

    def timer(self) -> SteppedTimer:
        return SteppedTimer(self)


def test_a_batch_that_failed_leaves_no_times_behind() -> None:
    device = SteppedDevice()
    clock = StageClock(device)
    with pytest.raises(ZeroDivisionError), clock.copying(is_to_host=False):
        _ = 1 // 0
    with clock.copying(is_to_host=False):
        device.now_s += 1
    clock.start()
    with clock.copying(is_to_host=True):
        device.now_s += 2
    times = clock.read()
    assert times.to_device_s == times.prefill_s == 0.0
    assert times.to_host_s == 2
    assert times.rounds_s == times.selects_s == ()


def test_a_prefill_that_follows_its_copy_begins_where_that_ends() -> None:
    """One point fewer, and no time between them that is nobody's."""
    device = SteppedDevice()
    clock = StageClock(device)
    for is_next in (False, True):
        device.num_points = 0
        clock.start()
        with clock.copying(is_to_host=False):
            device.now_s += 1
        device.now_s += 2
        with clock.prefill(is_next=is_next):
            device.now_s += 4
        with clock.copying(is_to_host=True):
            device.now_s += 8
        times = clock.read()
        assert device.num_points == 6 - is_next
        assert times.to_device_s == 1
        assert times.prefill_s == 4 + 2 * is_next
        assert times.to_host_s == 8
        assert times.span_s == 15


def test_groups_of_other_depths_have_their_own_times() -> None:
    clock = StageClock(CpuDevice())
    clock.start()
    for num_levels in (2, 4):
        timer = CpuTimer()
        marks = RoundMarks(timer)
        first, last = marks.points(range(num_levels))
        timer.record(first)
        for level in range(num_levels):
            if level:
                marks.between(level)
            marks.before_select(level)
            marks.after_select(level)
        timer.record(last)
        with clock.rounds(num_levels) as timers:
            timers.append(timer)
    times = clock.read()
    assert [len(group) for group in times.rounds_s] == [2, 4]
    assert [len(group) for group in times.selects_s] == [2, 4]


def test_a_point_that_was_never_recorded_gives_no_time() -> None:
    """What a device leaves out that cannot time inside its graphs."""
    clock, timer = StageClock(CpuDevice()), CpuTimer()
    clock.start()
    for point in RoundMarks(timer).points(range(1)):
        timer.record(point)
    with clock.rounds(1) as timers:
        timers.append(timer)
    times = clock.read()
    assert (times.rounds_s[0][0] or 0.0) >= 0
    assert times.selects_s == ((None,),)
    totals = BatchHistograms()
    totals.add_times(times)
    assert totals.round_s[0].num_values == 1
    assert 0 not in totals.select_s


def test_a_time_is_not_asked_for_inside_a_segment() -> None:
    device = StrictDevice()
    timer = device.timer()
    with device.segment("rounds"):
        timer.record(0)
        timer.record(1)
        with pytest.raises(RuleBroken, match="asks a timer"):
            timer.seconds(0, 1)
    assert timer.seconds(0, 1) >= 0


def allowing_reference(config: RuntimeConfig) -> RuntimeConfig:
    """The strict device has no providers of its own."""
    return replace(config, ops=OpsConfig(allow_reference=True))
