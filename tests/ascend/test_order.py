"""Streams of the fake NPU run beside each other: what nothing orders, and what the host has not waited for, raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.ascend import fake_npu
from tests.ascend.fake_npu import RuleBroken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.fake_npu

NPU = "npu:0"


@pytest.fixture
def one() -> fake_npu.Stream:
    return fake_npu.Stream()


@pytest.fixture
def two() -> fake_npu.Stream:
    return fake_npu.Stream()


@pytest.fixture
def unordered() -> Iterator[None]:
    """Without the rules about order."""
    torch.ops.xgr_fake_npu.set_flag("order", False)
    yield
    torch.ops.xgr_fake_npu.set_flag("order", True)


def through_an_event(one: fake_npu.Stream, two: fake_npu.Stream) -> None:
    two.wait_event(one.record_event())


def through_a_third(one: fake_npu.Stream, two: fake_npu.Stream) -> None:
    third = fake_npu.Stream()
    third.wait_stream(one)
    two.wait_stream(third)


ORDERED: dict[str, Callable[[fake_npu.Stream, fake_npu.Stream], object]] = {
    "stream": lambda one, two: two.wait_stream(one),
    "event": through_an_event,
    "third stream": through_a_third,
    "host waits": lambda one, two: one.synchronize(),
    "host waits for all": lambda one, two: fake_npu.synchronize(),
    "host asks": lambda one, two: one.query(),
}


@pytest.mark.parametrize("how", ORDERED)
def test_a_read_behind_a_write(how: str, one: fake_npu.Stream, two: fake_npu.Stream) -> None:
    early = one.record_event()
    with fake_npu.stream(one):
        a = torch.ones(3, device=NPU)
    two.wait_event(early)
    with fake_npu.stream(two):
        with pytest.raises(RuleBroken, match=r"uses memory before stream \d+ has written it"):
            a + 1
        with pytest.raises(RuleBroken, match="has written it"):
            a[1:].cpu()
        with pytest.raises(RuleBroken, match="has written it"):
            a[1].item()
        ORDERED[how](one, two)
        assert (a + 1).tolist() == [2, 2, 2]


@pytest.mark.parametrize("how", ORDERED)
def test_a_write_behind_a_read(how: str, one: fake_npu.Stream, two: fake_npu.Stream) -> None:
    a = torch.ones(3, device=NPU)
    fake_npu.synchronize()
    with fake_npu.stream(one):
        b = a + 1
    with fake_npu.stream(two):
        assert (a * 2).tolist() == [2, 2, 2]  # both may read
        with pytest.raises(RuleBroken, match=r"writes memory before stream \d+ has read it"):
            a.zero_()
        ORDERED[how](one, two)
        a.zero_()
    fake_npu.synchronize()
    assert b.tolist() == [2, 2, 2]


def test_a_replay_is_work_of_its_stream(one: fake_npu.Stream, two: fake_npu.Stream) -> None:
    a = torch.ones(3, device=NPU)
    fake_npu.synchronize()
    graph = fake_npu.NPUGraph()
    with fake_npu.graph(graph, stream=one):
        b = a.add_(1) * 2
    with fake_npu.stream(two):
        a.fill_(5)
    with fake_npu.stream(one):
        with pytest.raises(RuleBroken, match=r"a replay on .* has written it"):
            graph.replay()
        one.wait_stream(two)
        graph.replay()
    for written in (a, b):
        with pytest.raises(RuleBroken, match="has written it"):
            written.sum()
    fake_npu.default_stream().wait_stream(one)
    assert (a.tolist(), b.tolist()) == ([6] * 3, [12] * 3)


def use_and_free(one: fake_npu.Stream, two: fake_npu.Stream, end: str) -> None:
    """Memory of one stream is read on another and freed."""
    with fake_npu.stream(one):
        a = torch.ones(3, device=NPU)
    two.wait_stream(one)
    with fake_npu.stream(two):
        a + 1
    if end == "recorded":
        a.record_stream(two)
    elif end:
        ORDERED[end](two, one)


def test_memory_is_not_freed_under_another_streams_work(
    one: fake_npu.Stream, two: fake_npu.Stream
) -> None:
    for end in (*ORDERED, "recorded"):
        use_and_free(one, two, end)
        torch.ones(3, device=NPU)
    use_and_free(one, two, "")
    with pytest.raises(RuleBroken, match=r"was freed while stream \d+ may still read it"):
        torch.ones(3, device=NPU)
    torch.ones(3, device=NPU)
    use_and_free(one, two, "")
    with pytest.raises(RuleBroken, match="may still read it"):
        fake_npu.synchronize()
    use_and_free(one, two, "")
    with pytest.raises(RuleBroken, match="may still read it"):
        torch.ops.xgr_fake_npu.raise_accusation()
    fake_npu.synchronize()


def test_the_rule_can_be_off(unordered: None, one: fake_npu.Stream) -> None:
    with fake_npu.stream(one):
        a = torch.ones(3, device=NPU)
    assert (a + 1).tolist() == [2, 2, 2]


def test_a_late_copy_to_the_host_arrives_when_waited_for(one: fake_npu.Stream) -> None:
    host = torch.zeros(3, pin_memory=True)
    with fake_npu.stream(one):
        a = torch.ones(3, device=NPU)
        host.copy_(a, non_blocking=True)
        a.fill_(7)
    assert host.isnan().all()
    fake_npu.default_stream().synchronize()
    assert host.isnan().all()
    one.synchronize()
    assert host.tolist() == [1, 1, 1]


def test_an_event_before_a_copy_says_nothing_about_it() -> None:
    host, a = torch.zeros(3, pin_memory=True), torch.ones(3, device=NPU)
    before, after = fake_npu.Event(), fake_npu.Event()
    before.record()
    host.copy_(a, non_blocking=True)
    after.record()
    before.synchronize()
    assert host.isnan().all()
    assert after.query()
    assert host.tolist() == [1, 1, 1]


def test_a_copy_to_pageable_memory_waits() -> None:
    host = torch.zeros(3)
    host.copy_(torch.ones(3, device=NPU), non_blocking=True)
    assert host.tolist() == [1, 1, 1]


def test_host_memory_of_a_copy_is_kept_until_waited_for() -> None:
    host, a = torch.ones(3, pin_memory=True), torch.zeros(3, device=NPU)
    a.copy_(host, non_blocking=True)
    fake_npu.synchronize()
    host.fill_(2)
    a.copy_(host, non_blocking=True)
    host.fill_(3)
    with pytest.raises(RuleBroken, match="host memory was changed before the copy"):
        fake_npu.synchronize()
    fake_npu.synchronize()


def test_a_copy_back_and_forth_on_one_stream() -> None:
    host, a = torch.zeros(3, pin_memory=True), torch.ones(3, device=NPU)
    b = torch.zeros(3, device=NPU)
    host.copy_(a, non_blocking=True)
    b.copy_(host, non_blocking=True)
    assert b.tolist() == [1, 1, 1]


def test_elapsed_time_is_asked_after_a_wait() -> None:
    start, end = fake_npu.Event(enable_timing=True), fake_npu.Event(enable_timing=True)
    start.record()
    torch.ones(3, device=NPU)
    end.record()
    with pytest.raises(RuleBroken, match="before the host has waited"):
        start.elapsed_time(end)
    end.synchronize()
    assert 0 <= start.elapsed_time(end) < 1e3
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        start.elapsed_time(fake_npu.Event())
