"""The fake NPU computes what the CPU computes, on memory of its own that is counted and limited."""

from __future__ import annotations

import threading
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
def seeded() -> None:
    torch.manual_seed(7)


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Sets how many bytes the device has beyond those in use."""
    before = fake_npu.mem_get_info()[1]

    def leave(num_bytes: int) -> None:
        torch.ops.xgr_fake_npu.set_limit(fake_npu.memory_reserved() + num_bytes)

    yield leave
    torch.ops.xgr_fake_npu.set_limit(before)


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 8).to(dtype)


def on_npu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(NPU)
    if isinstance(value, list | tuple):
        return type(value)(on_npu(element) for element in value)
    return value


def check_same(got: Any, expected: Any) -> None:
    """Equal bits, shapes, strides and dtypes, and every tensor on the device."""
    if isinstance(expected, Tensor):
        assert str(got.device) == NPU
        assert got.stride() == expected.stride()
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, two in zip(got, expected, strict=True):
            check_same(one, two)
    else:
        assert got == expected


PLACES = torch.tensor([4, 0, 2])
OPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add": (lambda a, b: a + b, (rows(), rows())),
    "add a number": (lambda a: 1.5 - a * 2, (rows(),)),
    "a host number": (lambda a: a * torch.tensor(3.0), (rows(),)),
    "broadcast": (lambda a, b: a + b[:, None], (rows(), torch.randn(6))),
    "matmul": (lambda a, b: a @ b.t(), (rows(), rows())),
    "bmm": (torch.bmm, (torch.randn(2, 3, 4), torch.randn(2, 4, 5))),
    "linear": (torch.nn.functional.linear, (rows(), torch.randn(3, 8), torch.randn(3))),
    "cat": (lambda a, b: torch.cat([a, b], 1), (rows(), rows())),
    "stack": (lambda a, b: torch.stack([a, b]), (rows(), rows())),
    "split": (lambda a: a.split([1, 2, 3]), (rows(),)),
    "unbind": (lambda a: a.unbind(1), (rows(),)),
    "sort": (lambda a: torch.sort(a, dim=1, descending=True, stable=True), (rows(),)),
    "topk": (lambda a: torch.topk(a, 3), (rows(),)),
    "argmax": (lambda a: a.argmax(1), (rows(),)),
    "cumsum": (lambda a: a.cumsum(0), (rows(),)),
    "where": (lambda a, b: torch.where(a > 0, a, b), (rows(), rows())),
    "masked_fill": (lambda a: a.masked_fill(a < 0, float("-inf")), (rows(),)),
    "gather": (lambda a, i: a.gather(0, i), (rows(), torch.randint(6, (2, 8)))),
    "scatter": (lambda a, i, b: a.scatter(0, i, b), (rows(), torch.randint(6, (2, 8)), rows())),
    "index_select": (lambda a, i: a.index_select(0, i), (rows(), PLACES)),
    "index": (lambda a, i: a[i], (rows(), PLACES)),
    "index in two": (lambda a, i: a[:, i][i, 1:], (rows(), PLACES)),
    "mask": (lambda a: a[a > 0], (rows(),)),
    "nonzero": (lambda a: torch.nonzero(a > 0), (rows(),)),
    "embedding": (torch.nn.functional.embedding, (PLACES, rows())),
    "softmax": (lambda a: a.softmax(1), (rows(),)),
    "logsumexp": (lambda a: a.logsumexp(1), (rows(),)),
    "silu": (torch.nn.functional.silu, (rows(),)),
    "pow": (lambda a: a.pow(2).mean(1, keepdim=True).rsqrt(), (rows(),)),
    "to half": (lambda a: a.to(torch.float16), (rows(),)),
    "to int": (lambda a: a.to(torch.int64), (rows(),)),
    "repeat_interleave": (lambda a, i: a.repeat_interleave(i), (torch.arange(3), PLACES)),
    "searchsorted": (torch.searchsorted, (torch.arange(9), PLACES)),
    "bincount": (lambda a: torch.bincount(a, minlength=6), (PLACES,)),
    "clone": (lambda a: a.t().clone(), (rows(),)),
    "contiguous": (lambda a: a.t().contiguous(), (rows(),)),
    "unfold": (lambda a: a.unfold(1, 3, 2), (rows(),)),
    "no rows": (lambda a: a[:0] + 1, (rows(),)),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op(name: str) -> None:
    fn, args = OPS[name]
    check_same(fn(*on_npu(args)), fn(*args))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["add", "matmul", "softmax", "sort", "index_select", "silu"])
def test_an_op_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    fn, args = OPS[name]
    cast = tuple(arg.to(dtype) if arg.is_floating_point() else arg for arg in args)
    check_same(fn(*on_npu(cast)), fn(*cast))


IN_PLACE: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "add_": lambda a, b, i: a.add_(b),
    "mul_ of a view": lambda a, b, i: a[1:3].mul_(2),
    "fill_ of columns": lambda a, b, i: a[:, 2].fill_(5),
    "an item": lambda a, b, i: a.__setitem__((1, 2), 7.0),
    "rows": lambda a, b, i: a.__setitem__(i, b[:3]),
    "index_copy_": lambda a, b, i: a.index_copy_(0, i, b[:3]),
    "index_put_": lambda a, b, i: a.index_put_((i, i), b[0, :3], accumulate=True),
    "index_add_": lambda a, b, i: a.index_add_(0, i, b[:3]),
    "index_fill_": lambda a, b, i: a.index_fill_(0, i, 3),
    "scatter_": lambda a, b, i: a.scatter_(1, i[None], b),
    "masked_fill_": lambda a, b, i: a.masked_fill_(b > 0, 0),
    "copy_": lambda a, b, i: a.copy_(b.t().reshape(6, 8)),
    "copy_ with another dtype": lambda a, b, i: a.copy_(b.to(torch.int32)),
    "zero_": lambda a, b, i: a.t()[2:].zero_(),
    "out of matmul": lambda a, b, i: torch.matmul(b, b.t(), out=a[:, :6]),
    "out of sort": lambda a, b, i: torch.sort(b, out=(a, torch.empty_like(b, dtype=torch.int64))),
    "out of index_select": lambda a, b, i: torch.index_select(b, 0, i, out=a[:3]),
    "foreach": lambda a, b, i: torch._foreach_add_([a[:2], a[2:]], 1),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_work_in_place(name: str) -> None:
    fn, args = IN_PLACE[name], (rows(), rows(), PLACES)
    there = on_npu(args)
    address = there[0].data_ptr()
    result = fn(*there)
    expected = fn(*args)
    assert there[0].data_ptr() == address
    check_same(there[0], args[0])
    if isinstance(expected, Tensor):
        check_same(result, expected)


def test_what_works_in_place_returns_the_same_tensor() -> None:
    a = torch.zeros(3, device=NPU)
    assert a.add_(1) is a
    assert torch.add(a, a, out=a) is a
    assert a.resize_(5) is a


def test_views_share_memory() -> None:
    a = torch.zeros(4, 6, device=NPU)
    for view in (a[1], a.t(), a.view(2, 12), a.view(4, 2, 3), a.expand(2, 4, 6), a.detach()):
        assert view.untyped_storage()._cdata == a.untyped_storage()._cdata
    a[1:, 2:].view(torch.int32)[0, 0] = 1
    assert a.view(torch.int32)[1, 2].item() == 1


def test_an_out_argument_of_another_size_is_resized() -> None:
    before = fake_npu.memory_allocated()
    out = torch.empty(0, device=NPU)
    a = rows().to(NPU)
    assert torch.mm(a, a.t(), out=out) is out
    check_same(out, a.cpu() @ a.cpu().t())
    assert out.untyped_storage().nbytes() == 36 * 4
    assert fake_npu.memory_allocated() - before == (36 + 48) * 4
    out.resize_(100).fill_(1)
    assert out.sum().item() == 100
    del out, a
    assert fake_npu.memory_allocated() == before


def test_factories() -> None:
    check_same(torch.arange(2, 11, 3, device=NPU), torch.arange(2, 11, 3))
    check_same(torch.full((2, 3), 7, device=NPU), torch.full((2, 3), 7))
    check_same(torch.eye(3, device=NPU), torch.eye(3))
    check_same(torch.tensor([[1, 2], [3, 4]], device=NPU), torch.tensor([[1, 2], [3, 4]]))
    check_same(torch.tril_indices(3, 3, device=NPU), torch.tril_indices(3, 3))
    check_same(torch.ones_like(rows(), device=NPU), torch.ones(6, 8))
    torch.manual_seed(3)
    drawn = torch.randn(5, device=NPU)
    torch.manual_seed(3)
    check_same(drawn, torch.randn(5))


def test_new_memory_holds_no_number() -> None:
    assert torch.empty(3, device=NPU).isnan().all().item()


def test_copies_both_ways() -> None:
    a = rows()
    there = a.to(NPU)
    assert str(there.device) == NPU
    assert there.data_ptr() != a.data_ptr()
    assert torch.equal(there.t().cpu(), a.t())
    target = torch.zeros(8, 6)
    target.copy_(there.t())
    assert torch.equal(target, a.t())
    there.copy_(torch.ones(8))
    assert there.sum().item() == 48
    assert there.tolist() == [[1.0] * 8] * 6


def test_pinned_memory() -> None:
    pinned = torch.empty(6, 8, pin_memory=True)
    assert pinned.is_pinned()
    assert pinned[2:].is_pinned()
    assert pinned.device.type == "cpu"
    assert not rows().is_pinned()
    assert rows().pin_memory().is_pinned()
    pinned.copy_(rows())
    there = torch.empty(6, 8, device=NPU)
    there.copy_(pinned, non_blocking=True)
    back = torch.empty(6, 8, pin_memory=True)
    back.copy_(there, non_blocking=True)
    fake_npu.synchronize()
    assert torch.equal(back, pinned)


def test_host_tensors_do_not_mix() -> None:
    a = rows().to(NPU)
    for mixed in (
        lambda: a + rows(),
        lambda: torch.cat([a, rows()]),
        lambda: torch.nn.functional.linear(a, rows()),
        lambda: rows()[PLACES.to(NPU)],
        lambda: torch.where(a > 0, a, rows()),
        lambda: torch.add(a[0, 0], 1, out=torch.tensor(0.0)),
    ):
        with pytest.raises(RuntimeError, match="device"):
            mixed()  # type: ignore[no-untyped-call]
    # Indexing copies such places itself, as torch does on any device.
    check_same(a[PLACES], a.cpu()[PLACES])


def test_memory_is_counted() -> None:
    fake_npu.reset_peak_memory_stats()
    used, reserved = fake_npu.memory_allocated(), fake_npu.memory_reserved()
    a = torch.zeros(1000, device=NPU)
    b = a + 1
    assert fake_npu.memory_allocated() - used == 8000
    view = b[10:]
    del a, b
    assert fake_npu.memory_allocated() - used == 4000
    del view
    assert fake_npu.memory_allocated() == used
    assert fake_npu.memory_reserved() == reserved
    assert fake_npu.max_memory_allocated() - used == 8000
    free, total = fake_npu.mem_get_info()
    assert total - free == reserved
    assert fake_npu.get_device_properties(0).total_memory == total


def test_no_room(limit: Callable[[int], None]) -> None:
    limit(6000)
    a = torch.zeros(1000, device=NPU)
    too_much: dict[str, Callable[[], Tensor]] = {
        "new": lambda: torch.zeros(600, device=NPU),
        "a result": lambda: a + 1,
        "a result of unknown size": lambda: torch.unique(torch.arange(200, device=NPU)),
        "a copy": lambda: a.clone(),
        "a copy from the host": lambda: rows().repeat(20, 1).to(NPU),
    }
    for call in too_much.values():
        with pytest.raises(torch.OutOfMemoryError, match=r"^NPU out of memory\. Tried to allocate"):
            call()
    assert a[:500].sum().item() == 0
    torch.zeros(500, device=NPU)


def test_the_library_of_the_vendor_is_reached() -> None:
    library = torch.library.Library("npu", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(  # type: ignore[no-untyped-call]
        "xgr_test_twice(Tensor x, Tensor(a!) y, Tensor? z=None, *, int[] n) -> (Tensor, Tensor[])"
    )
    seen = []

    def twice(x: Tensor, y: Tensor, z: Tensor | None = None, *, n: list[int]) -> Any:
        seen.append((x.device.type, z, n))
        y.add_(x)
        return x * 2, [x.clone(), y[:1].clone()]

    library.impl("xgr_test_twice", twice, "CPU")  # type: ignore[no-untyped-call]
    x, y = torch.ones(3, device=NPU), torch.zeros(3, device=NPU)
    one, (two, three) = torch.ops.npu.xgr_test_twice(x, y, n=[4, 5])
    assert seen == [("cpu", None, [4, 5])]
    check_same(
        [one, two, three, y], [torch.full((3,), 2.0), torch.ones(3), torch.ones(1), torch.ones(3)]
    )


def test_an_error_of_a_kernel_arrives() -> None:
    with pytest.raises(IndexError):
        torch.zeros(3, device=NPU)[torch.tensor([5], device=NPU)].sum()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.zeros(3, 2, device=NPU) @ torch.zeros(3, 2, device=NPU)


def test_gradients() -> None:
    w = torch.randn(3, 8)
    a = w.to(NPU).requires_grad_()
    (a.tanh() ** 2).sum().backward()  # type: ignore[no-untyped-call]
    b = w.clone().requires_grad_()
    (b.tanh() ** 2).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(a.grad.cpu() if a.grad is not None else None, b.grad)


def test_threads_have_streams_of_their_own() -> None:
    side = fake_npu.Stream()
    seen = []
    with fake_npu.stream(side):
        thread = threading.Thread(target=lambda: seen.append(fake_npu.current_stream()))
        thread.start()
        thread.join()
        assert fake_npu.current_stream() == side
    assert seen == [fake_npu.default_stream()]


def test_a_module_moves() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
    x = rows()
    expected = model(x)
    torch.testing.assert_close(model.to(NPU)(x.to(NPU)).cpu(), expected)


def test_an_op_that_the_cpu_has_in_one_piece() -> None:
    args: Any = [torch.randn(1, 2, 3, 4) for _ in range(3)]
    attend = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(attend(*on_npu(args)).cpu(), attend(*args))


def test_a_second_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="there is one device"):
        fake_npu.set_device("npu:1")
