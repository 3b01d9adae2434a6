"""What an NPU would not survive raises on the fake one: rules of captures, of replays, and of other threads meanwhile."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.ascend import fake_npu
from tests.ascend.fake_npu import RuleBroken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.fake_npu

NPU = "npu:0"
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def side() -> Iterator[fake_npu.Stream]:
    """A side stream, on which the test runs."""
    with fake_npu.stream(stream := fake_npu.Stream()):
        yield stream


def capture(fn: Callable[[], Any], **options: Any) -> fake_npu.NPUGraph:
    graph = fake_npu.NPUGraph()
    with fake_npu.graph(graph, stream=fake_npu.current_stream(), **options):
        fn()
    return graph


class Scene:
    """What the broken captures below work with, made before them."""

    def __init__(self) -> None:
        self.a = torch.ones(4, device=NPU)
        self.places = torch.tensor([0, 2], device=NPU)
        self.host, self.pinned = torch.ones(4), torch.ones(4).pin_memory()
        self.event, self.timing = fake_npu.Event(), fake_npu.Event(enable_timing=True)
        self.event.record()
        self.ended = fake_npu.Event(enable_timing=True), fake_npu.Event(enable_timing=True)
        for event in self.ended:
            event.record()
        self.other = fake_npu.Stream()
        self.graph = capture(lambda: self.a + 1, auto_dispatch_capture=True)
        fake_npu.synchronize()


def on_stream(stream: fake_npu.Stream, fn: Callable[[], Any]) -> None:
    with fake_npu.stream(stream):
        fn()


IN_CAPTURE: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "the device waited for": (lambda s: fake_npu.synchronize(), "synchronisation of the device"),
    "a stream waited for": (lambda s: fake_npu.current_stream().synchronize(), "of a stream"),
    "another stream waited for": (lambda s: s.other.synchronize(), "of a stream"),
    "torch's own wait for a stream": (
        lambda s: torch.accelerator.current_stream().synchronize(),
        "of a stream",
    ),
    "torch's own wait": (lambda s: torch.accelerator.synchronize(), "of the device"),
    "an event waited for": (lambda s: s.event.synchronize(), "synchronisation with an event"),
    "an event asked": (lambda s: s.event.query(), "a question to an event"),
    "elapsed time": (
        lambda s: s.ended[0].elapsed_time(s.ended[1]),
        "a question for elapsed time",
    ),
    "a stream asked": (lambda s: fake_npu.current_stream().query(), "a question to a stream"),
    "item": (lambda s: s.a[0].item(), "a read of a value by the host"),
    "bool": (lambda s: bool(s.a[0] > 0), "a read of a value by the host"),
    "tolist": (lambda s: s.a.tolist(), "a copy between host and device"),
    "cpu": (lambda s: s.a.cpu(), "a copy between host and device"),
    "equal": (lambda s: torch.equal(s.a, s.a), "aten::equal, which reads a value on the host"),
    "a copy from the host": (lambda s: s.a.copy_(s.host), "a copy between host and device"),
    "a late copy from the host": (
        lambda s: s.a.copy_(s.pinned, non_blocking=True),
        "a copy between host and device",
    ),
    "a late copy to the host": (
        lambda s: s.pinned.copy_(s.a, non_blocking=True),
        "a copy between host and device",
    ),
    "a tensor of numbers": (lambda s: torch.tensor([1, 2], device=NPU), "between host and device"),
    "places on the host": (lambda s: s.a[torch.tensor([0, 1])], "between host and device"),
    "places of a write on the host": (
        lambda s: s.a.index_put_((torch.tensor([0, 1]),), s.a[:2] * 2),
        "a copy from host memory",
    ),
    "pinned memory": (lambda s: torch.empty(3, pin_memory=True), "pinned host memory"),
    "nonzero": (lambda s: s.a.nonzero(), "whose shape depends on data"),
    "unique": (lambda s: torch.unique(s.a), "whose shape depends on data"),
    "a mask": (lambda s: s.a[s.a > 0], "whose shape depends on data"),
    "a write through a mask": (
        lambda s: s.a.__setitem__(s.a > 0, s.a * 2),
        "shape depends on data",
    ),
    "repeats": (lambda s: s.a[:2].repeat_interleave(s.places), "reads a length"),
    "more memory for an old tensor": (lambda s: s.a.resize_(99), "new memory to an existing"),
    "the default stream": (
        lambda s: on_stream(fake_npu.default_stream(), lambda: s.a + 1),
        "on the default stream during capture",
    ),
    "another stream": (lambda s: on_stream(s.other, lambda: s.a + 1), r"on stream \d+ during"),
    "memory on another stream": (
        lambda s: on_stream(s.other, lambda: torch.empty(3, device=NPU)),
        r"an allocation on stream \d+ during capture",
    ),
    "another capture": (lambda s: fake_npu.NPUGraph().capture_begin(), "another capture"),
    "a replay": (lambda s: s.graph.replay(), "a replay during capture"),
    "an update": (lambda s: s.graph.update([{}]), "an update during capture"),
    "a timing event": (lambda s: s.timing.record(), "a timing event during capture"),
    "an event from outside": (lambda s: s.event.wait(), "an event from outside of the capture"),
    "a stream followed": (
        lambda s: fake_npu.current_stream().wait_stream(fake_npu.default_stream()),
        "an event on the default stream during capture",
    ),
}


@pytest.mark.parametrize("name", IN_CAPTURE)
def test_in_a_capture(name: str) -> None:
    fn, words = IN_CAPTURE[name]
    scene = Scene()
    with pytest.raises(RuleBroken, match=f"^RuleBroken: .*(?:{words})"):
        capture(lambda: fn(scene))
    # The device is whole again, and the same call is legal.
    assert scene.a.tolist() == [1, 1, 1, 1]
    scene.other.wait_stream(fake_npu.current_stream())
    fake_npu.default_stream().wait_stream(fake_npu.current_stream())
    if name != "another capture":
        fn(scene)
    fake_npu.synchronize()


def test_an_error_that_is_swallowed_still_breaks_the_capture() -> None:
    a = torch.ones(3, device=NPU)

    def swallow() -> None:
        with pytest.raises(RuleBroken):
            a.sum().item()
        a.add_(1)

    with pytest.raises(RuleBroken, match="the capture is broken: a read of a value by the host"):
        capture(swallow)
    assert a.tolist() == [1, 1, 1]


def test_another_error_in_a_capture_is_passed_on() -> None:
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 / 0)
    assert not fake_npu.is_current_stream_capturing()
    capture(lambda: torch.zeros(3, device=NPU)).replay()


def test_a_capture_on_the_default_stream() -> None:
    with fake_npu.stream(fake_npu.default_stream()):
        with pytest.raises(RuleBroken, match="a capture on the default stream"):
            capture(lambda: None)
        assert fake_npu.current_stream() == fake_npu.default_stream()


def test_a_capture_knows_itself(side: fake_npu.Stream) -> None:
    seen = []
    capture(lambda: seen.append(fake_npu.is_current_stream_capturing()))
    assert seen == [True]
    assert not fake_npu.is_current_stream_capturing()


def test_events_inside_a_capture_are_the_graphs(side: fake_npu.Stream) -> None:
    event = fake_npu.Event()

    def work() -> None:
        event.record()
        event.wait()

    capture(work).replay()
    for use in (event.synchronize, event.query, event.wait):
        with pytest.raises(RuleBroken, match="recorded in a capture"):
            use()


def in_thread(fn: Callable[[], Any]) -> BaseException | None:
    """The error of fn in another thread."""
    errors: list[BaseException | None] = []

    def work() -> None:
        try:
            fn()
            errors.append(None)
        except Exception as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return errors[0]


BREAKING: dict[str, Callable[[Scene], Any]] = {
    "a copy from the host": lambda s: s.a.copy_(s.host),
    "a late copy": lambda s: on_stream(s.other, lambda: s.a.copy_(s.pinned, non_blocking=True)),
    "a copy to the host": lambda s: s.a.cpu(),
    "item": lambda s: s.a[0].item(),
    "the device waited for": lambda s: fake_npu.synchronize(),
    "a stream waited for": lambda s: s.other.synchronize(),
    "an event waited for": lambda s: s.event.synchronize(),
    "another capture": lambda s: on_stream(s.other, lambda: capture(lambda: None)),
    "a replay": lambda s: on_stream(s.other, s.graph.replay),
}
HARMLESS: dict[str, Callable[[Scene], Any]] = {
    "work on another stream": lambda s: on_stream(s.other, lambda: s.a + 1),
    "an event asked": lambda s: s.event.query(),
    "an event recorded": lambda s: s.event.record(s.other),
    "pinned memory": lambda s: torch.empty(3, pin_memory=True),
    "memory": lambda s: on_stream(s.other, lambda: torch.empty(3, device=NPU)),
}


@pytest.mark.parametrize("name", BREAKING)
def test_another_thread_breaks_a_capture(name: str) -> None:
    scene, errors = Scene(), []
    with pytest.raises(RuleBroken, match=r"the capture is broken: .*by another thread"):
        capture(
            lambda: errors.append(in_thread(lambda: BREAKING[name](scene))),
            capture_error_mode="thread_local",
        )
    assert isinstance(errors[0], RuleBroken)
    assert "while another thread captures" in str(errors[0])


@pytest.mark.parametrize("name", HARMLESS)
def test_another_thread_may_work_beside_a_capture(name: str) -> None:
    scene, errors = Scene(), []
    capture(
        lambda: errors.append(in_thread(lambda: HARMLESS[name](scene))),
        capture_error_mode="thread_local",
    ).replay()
    assert errors == [None]
    fake_npu.synchronize()


@pytest.mark.parametrize("name", ["an event asked", "pinned memory", "memory"])
def test_a_global_capture_allows_other_threads_less(name: str) -> None:
    scene = Scene()
    with pytest.raises(RuleBroken, match=r"the capture is broken: .*by another thread"):
        capture(lambda: in_thread(lambda: HARMLESS[name](scene)))


ON_THE_STREAM: dict[str, Callable[[Scene, fake_npu.Stream], Any]] = {
    "work": lambda s, side: on_stream(side, lambda: s.a + 1),
    "an event": lambda s, side: s.event.record(side),
    "a wait": lambda s, side: side.wait_event(s.event),
}


@pytest.mark.parametrize("name", ON_THE_STREAM)
def test_another_thread_on_the_capturing_stream(name: str, side: fake_npu.Stream) -> None:
    scene = Scene()
    with pytest.raises(RuleBroken, match="on the capturing stream by another thread"):
        capture(
            lambda: in_thread(lambda: ON_THE_STREAM[name](scene, side)),
            capture_error_mode="thread_local",
        )


def test_replays_that_cannot_be(side: fake_npu.Stream) -> None:
    graph = fake_npu.NPUGraph()
    with pytest.raises(RuleBroken, match="holds no capture, or was reset"):
        graph.replay()
    graph = capture(lambda: torch.zeros(3, device=NPU))
    with (
        fake_npu.stream(fake_npu.default_stream()),
        pytest.raises(RuleBroken, match="replay on the default stream"),
    ):
        graph.replay()
    with pytest.raises(RuleBroken, match="a capture into a graph that holds one"):
        graph.capture_begin()
    graph.reset()
    with pytest.raises(RuleBroken, match="holds no capture, or was reset"):
        graph.replay()
    graph.capture_begin()
    graph.capture_end()
    graph.replay()


def test_memory_that_was_freed_since() -> None:
    made = {"a": torch.ones(3, device=NPU)}
    b = torch.ones(3, device=NPU)
    graph = capture(lambda: b.copy_(made["a"][1]))
    graph.replay()
    del made["a"]
    with pytest.raises(RuleBroken, match="memory which was freed since its capture"):
        graph.replay()


def test_memory_of_another_graph_that_was_freed_since() -> None:
    b, made = torch.ones(3, device=NPU), dict[str, Tensor]()
    one = capture(lambda: made.update(c=b + 1))
    two = capture(lambda: made["c"] + 1, pool=one.pool())
    one.replay()
    two.replay()
    made.clear()
    one.replay()  # what it allocated itself stays
    with pytest.raises(RuleBroken, match="memory which was freed since its capture"):
        two.replay()


def test_graphs_of_one_pool_do_not_overlap() -> None:
    one = capture(lambda: torch.zeros(3, device=NPU))
    two = capture(lambda: torch.zeros(3, device=NPU), pool=one.pool())
    other = fake_npu.Stream()
    one.replay()
    with fake_npu.stream(other):
        with pytest.raises(RuleBroken, match="a graph of the same pool may still run"):
            two.replay()
        fake_npu.synchronize()
        two.replay()


@pytest.fixture
def attending() -> tuple[fake_npu.NPUGraph, Tensor]:
    q, k = torch.ones(1, 1, 16, device=NPU).half(), torch.ones(1, 5, 16, device=NPU).half()
    graph = capture(
        lambda: torch.ops.npu.npu_fused_infer_attention_score(
            q, k, k, num_heads=1, input_layout="BSH", actual_seq_lengths_kv=[3]
        ),
        auto_dispatch_capture=True,
    )
    graph.inputs = q, k  # type: ignore[attr-defined]
    return graph, q


LENGTHS = {"actual_seq_lengths_kv": [2]}


def test_replay_without_update(attending: tuple[fake_npu.NPUGraph, Tensor]) -> None:
    graph, _ = attending
    with pytest.raises(RuleBroken, match="replay without update"):
        graph.replay()
    graph.update([LENGTHS])
    graph.replay()
    with pytest.raises(RuleBroken, match="replay without update"):
        graph.replay()


WAITS: dict[str, Callable[[fake_npu.Event], Any]] = {
    "event": lambda event: event.synchronize(),
    "asked event": lambda event: event.query(),
    "stream": lambda event: fake_npu.current_stream().synchronize(),
    "device": lambda event: fake_npu.synchronize(),
    "copy": lambda event: torch.ones(2, device=NPU).cpu(),
    "item": lambda event: torch.ones(2, device=NPU)[0].item(),
    "equal": lambda event: torch.equal(*[torch.ones(2, device=NPU)] * 2),
    "torch": lambda event: torch.accelerator.current_stream().synchronize(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_update_waits_for_the_replay(
    attending: tuple[fake_npu.NPUGraph, Tensor], wait: str
) -> None:
    graph, _ = attending
    before, after = fake_npu.Event(), fake_npu.Event()
    graph.update([LENGTHS])
    before.record()
    graph.replay()
    after.record()
    before.synchronize()
    with pytest.raises(RuleBroken, match="whose last replay the host has not waited for"):
        graph.update([LENGTHS])
    WAITS[wait](after)
    graph.update([LENGTHS])
    graph.replay()


def test_updates_that_reach_nothing(attending: tuple[fake_npu.NPUGraph, Tensor]) -> None:
    graph, _ = attending
    with pytest.raises(RuleBroken, match=r"'actual_seq_length_kv'.*no captured op takes"):
        graph.update([{"actual_seq_length_kv": [2]}])
    with pytest.raises(RuntimeError, match="1 calls can be updated, got 2 dicts"):
        graph.update([LENGTHS, LENGTHS])
    with pytest.raises(RuntimeError, match="auto_dispatch_capture=True"):
        capture(lambda: None).update([LENGTHS])
    empty = capture(lambda: None, auto_dispatch_capture=True)
    empty.update([LENGTHS])
    empty.reset()
    with pytest.raises(RuleBroken, match="update of a graph that holds no capture, or was reset"):
        empty.update([LENGTHS])


def test_a_shape_that_turns_out_to_depend_on_data() -> None:
    library = torch.library.Library("npu", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("xgr_test_as_many(Tensor count) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("xgr_test_as_many", lambda count: torch.ones(int(count)), "CPU")  # type: ignore[no-untyped-call]
    count = torch.full((1,), 3, device=NPU)
    graph = capture(lambda: torch.ops.npu.xgr_test_as_many(count))
    graph.replay()
    count.fill_(4)
    with pytest.raises(RuleBroken, match="xgr_test_as_many: another shape at replay"):
        graph.replay()


def test_a_capture_ends_where_it_began(side: fake_npu.Stream) -> None:
    graph = fake_npu.NPUGraph()
    with pytest.raises(RuleBroken, match="the end of a capture that is not under way"):
        graph.capture_end()
    graph.capture_begin()
    with (
        fake_npu.stream(fake_npu.Stream()),
        pytest.raises(RuleBroken, match="on another stream than its own"),
    ):
        graph.capture_end()
    error = in_thread(lambda: on_stream(side, graph.capture_end))
    assert "the end of a capture by another thread" in str(error)
    graph.capture_end()
    graph.replay()
