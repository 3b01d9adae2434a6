"""A captured graph of the fake NPU does its work again, with the memory it met and the host arguments it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.ascend import fake_npu

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


def captured(fn: Callable[[], Any], **options: Any) -> tuple[fake_npu.NPUGraph, Any]:
    """A graph of fn, and what fn returned while it was captured."""
    graph = fake_npu.NPUGraph()
    with fake_npu.graph(graph, stream=fake_npu.current_stream(), **options):
        result = fn()
    return graph, result


def layer(x: Tensor, w: Tensor, cache: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Something of everything: views, results, writes, lists, a sort and an out argument."""
    hidden = torch.nn.functional.linear(x, w)
    cache.index_copy_(0, places, hidden)
    cache[:, 0].add_(1)
    first, second = cache.view(2, -1, 4).unbind(0)
    joined = torch.cat([first, second.softmax(-1)], dim=1)
    best = torch.topk(joined, 3).indices
    total = torch.empty(joined.shape[0], device=x.device)
    torch.sum(joined, 1, out=total)
    return torch.where(total > 0, total, -total), best


def test_replay_is_eager_work_done_again() -> None:
    host = [torch.randn(2, 5), torch.randn(4, 5), torch.randn(6, 4), torch.tensor([1, 4])]
    there = [tensor.to(NPU) for tensor in host]
    graph, (total, best) = captured(lambda: layer(*there))
    for _ in range(3):
        graph.replay()
        expected_total, expected_best = layer(*host)
        torch.testing.assert_close(total.cpu(), expected_total)
        assert torch.equal(best.cpu(), expected_best)
        torch.testing.assert_close(there[2].cpu(), host[2])
        for tensor in (host[0], there[0]):
            tensor.mul_(-1.5)
        for tensor in (host[3], there[3]):
            tensor.add_(1).remainder_(6)


def test_a_capture_executes_nothing() -> None:
    a = torch.zeros(3, device=NPU)
    graph, b = captured(lambda: a.add_(1).clone())
    assert a.tolist() == [0, 0, 0]
    assert b.isnan().all().item()
    graph.replay()
    graph.replay()
    assert a.tolist() == b.tolist() == [2, 2, 2]


def test_host_arguments_stay_those_of_the_capture() -> None:
    a, factor, number = torch.ones(3, device=NPU), 2.0, torch.tensor(3.0)
    graph, b = captured(lambda: a * factor + number)
    factor = 5.0
    number.fill_(7)
    graph.replay()
    assert b.tolist() == [5, 5, 5]


def test_a_replay_writes_where_the_capture_wrote() -> None:
    a = torch.ones(3, device=NPU)
    graph, b = captured(lambda: a + 1)
    address = b.data_ptr()
    graph.replay()
    view = b[1:]
    a.fill_(4)
    graph.replay()
    assert view.tolist() == [5, 5]
    assert b.data_ptr() == address


def test_intermediate_memory_lives_with_the_graph() -> None:
    a = torch.ones(100, device=NPU)
    used, reserved = fake_npu.memory_allocated(), fake_npu.memory_reserved()
    graph, b = captured(lambda: (a + 1) * (a + 2) - a)
    assert fake_npu.memory_allocated() - used == 400
    assert 800 <= fake_npu.memory_reserved() - reserved <= 1600
    for _ in range(2):
        junk = [torch.full((100,), 9.0, device=NPU) for _ in range(20)]
        graph.replay()
        assert b.tolist() == [5] * 100
        del junk
    del graph, b
    assert fake_npu.memory_allocated() == used
    assert fake_npu.memory_reserved() == reserved


def test_graphs_of_one_pool_share_what_is_free() -> None:
    a = torch.ones(100, device=NPU)
    reserved = fake_npu.memory_reserved()
    one, b = captured(lambda: ((a + 1) * 2) - 1)
    after_one = fake_npu.memory_reserved() - reserved
    two, c = captured(lambda: ((a + 1) * 3) - 1, pool=one.pool())
    assert fake_npu.memory_reserved() - reserved < 2 * after_one
    for graph in (one, two, one):
        graph.replay()
    assert (b.tolist(), c.tolist()) == ([3] * 100, [5] * 100)


def test_a_graph_of_graphs_results() -> None:
    a = torch.ones(3, device=NPU)
    one, b = captured(lambda: a + 1)
    two, c = captured(lambda: b * 10, pool=one.pool())
    for value in (1.0, 2.0):
        a.fill_(value)
        one.replay()
        two.replay()
        assert c.tolist() == [10 * (value + 1)] * 3


def test_work_under_inference_mode_and_out_of_it() -> None:
    with torch.inference_mode():
        a = torch.zeros(3, device=NPU)
        graph, b = captured(lambda: a.add_(1).clone().mul_(2))
    graph.replay()
    assert b.tolist() == [2, 2, 2]
    c = torch.zeros(3, device=NPU)
    graph, d = captured(lambda: c.add_(1).clone().mul_(2))
    with torch.inference_mode():
        graph.replay()
    assert d.tolist() == [2, 2, 2]


def attend(q: Tensor, k: Tensor, lengths: list[int] | None) -> Tensor:
    """The vendor's attention over a batch of histories [B, T, 16]; lengths on the host."""
    result: Tensor = torch.ops.npu.npu_fused_infer_attention_score(
        q, k, k, num_heads=1, input_layout="BSH", scale=1.0, actual_seq_lengths_kv=lengths
    )[0]
    return result


def expected_attention(q: Tensor, k: Tensor, lengths: list[int]) -> Tensor:
    rows = []
    for one, keys, length in zip(q.double(), k.double(), lengths, strict=True):
        weights = (one @ keys[:length].t()).softmax(-1)
        rows.append(weights @ keys[:length])
    return torch.stack(rows).float()


def test_update_gives_the_lengths_of_each_replay() -> None:
    q, k = torch.randn(2, 1, 16).half(), torch.randn(2, 5, 16).half()
    there, keys = q.to(NPU), k.to(NPU)
    graph, (out, full) = captured(
        lambda: (attend(there, keys, [5, 5]), attend(there, keys, None)),
        auto_dispatch_capture=True,
        capture_error_mode="thread_local",
    )
    for lengths in ([1, 4], [5, 2]):
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        graph.replay()
        expected = expected_attention(q, k, lengths)
        torch.testing.assert_close(out.cpu().float(), expected, rtol=1e-2, atol=1e-2)
        # What was captured without the argument is not given it.
        expected = expected_attention(q, k, [5, 5])
        torch.testing.assert_close(full.cpu().float(), expected, rtol=1e-2, atol=1e-2)


def test_update_with_a_dict_for_each_call() -> None:
    q, k = torch.randn(1, 1, 16).half().to(NPU), torch.randn(1, 5, 16).half().to(NPU)
    graph, (one, two) = captured(
        lambda: (attend(q, k, [1]), attend(q, k, [1])), auto_dispatch_capture=True
    )
    graph.update([{"actual_seq_lengths_kv": [2]}, {"actual_seq_lengths_kv": [3]}])
    graph.replay()
    for out, length in ((one, 2), (two, 3)):
        expected = expected_attention(q.cpu(), k.cpu(), [length])
        torch.testing.assert_close(out.cpu().float(), expected, rtol=1e-2, atol=1e-2)


def test_lengths_are_baked_without_update() -> None:
    q, k = torch.randn(1, 1, 16).half().to(NPU), torch.randn(1, 5, 16).half().to(NPU)
    lengths = [3]
    graph, out = captured(lambda: attend(q, k, lengths))
    lengths[0] = 5
    graph.replay()
    expected = expected_attention(q.cpu(), k.cpu(), [3])
    torch.testing.assert_close(out.cpu().float(), expected, rtol=1e-2, atol=1e-2)


def test_an_external_event_holds_a_graph() -> None:
    a = torch.zeros(3, device=NPU)
    gate = fake_npu.ExternalEvent()

    def work() -> None:
        gate.wait()
        gate.reset()
        a.add_(1)

    graph, _ = captured(work)
    gate.record()
    graph.replay()
    assert a.tolist() == [1, 1, 1]
    with pytest.raises(fake_npu.RuleBroken, match="nobody has recorded"):
        graph.replay()
    gate.record()
    graph.replay()
    assert a.tolist() == [2, 2, 2]
