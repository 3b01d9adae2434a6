"""What a provider writes: all of its results, and nothing beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.cuda.guard_bands import GuardBands, num_unwritten, same_nan
from tests.cuda.providers import DTYPES, assert_none_is_missing, cases_of, every_provider
from xgr_runtime.conformance.comparison import clone_to, convert

if TYPE_CHECKING:
    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Impl, Op

CPU = torch.device("cpu")


@pytest.mark.device("cuda")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "found"), every_provider())
def test_a_provider_writes_its_results_and_nothing_beside_them(
    op: Op[..., Any], found: Impl[..., Any], dtype: torch.dtype, device: Device
) -> None:
    cases = cases_of(op, found, dtype, device)
    if not cases:
        assert_none_is_missing(op, found, (dtype,), device)
    for case in cases:
        with GuardBands() as bands:
            args = convert(convert(case.args, clone_to(device.torch_device)), same_nan)
            results = case.view(args, found.fn(**args))
        device.synchronize()
        assert bands.written_bands() == [], case.label
        left = {name: num_unwritten(tensor) for name, tensor in results.items()}
        assert not any(left.values()), f"{case.label}: never written: {left}"


def fresh() -> torch.Tensor:
    return torch.empty(3, 5)


@pytest.mark.parametrize(("place", "where"), [(-1, "before"), (15, "behind")])
def test_an_element_beside_a_tensor_is_seen(place: int, where: str) -> None:
    with GuardBands() as bands:
        out = fresh()
        out.fill_(1.0)
        assert bands.written_bands() == []
        out.as_strided((1,), (1,), out.storage_offset() + place).fill_(2.0)
    (said,) = bands.written_bands()
    assert said.startswith("block 0 of 60 bytes: ")
    assert said.endswith(f" bytes {where}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_an_element_that_is_never_written_is_seen(dtype: torch.dtype) -> None:
    with GuardBands():
        out = torch.empty(7, dtype=dtype)
        assert num_unwritten(out) == 7
        out[:5] = 0
        assert num_unwritten(out) == 2
        out[5:] = torch.nan if dtype.is_floating_point else -1
    assert num_unwritten(out) == 0


def test_a_nan_that_is_brought_along_is_no_unwritten_element() -> None:
    """Rounded to bfloat16 many at a time, torch makes a NaN on the CPU all bits set."""
    brought = torch.full((3, 16), torch.nan).bfloat16()
    brought[1] = 2.0
    with GuardBands():
        kept = same_nan(clone_to(CPU)(brought))
    assert num_unwritten(kept) == 0
    assert torch.equal(kept.isnan(), brought.isnan())
    assert kept[1].tolist() == [2.0] * 16


def test_memory_keeps_its_shape_strides_and_alignment() -> None:
    with GuardBands():
        kept = torch.empty_strided((4, 6), (10, 1), dtype=torch.float16)
        like, new, none = torch.empty_like(kept), kept.new_empty((2,)), torch.empty(0, 3)
    assert (kept.shape, kept.stride()) == ((4, 6), (10, 1))
    assert (like.dtype, new.shape, none.numel()) == (torch.float16, (2,), 0)
    assert kept.data_ptr() % 64 == 0
    assert convert({"x": kept}, clone_to(CPU))["x"].stride() == kept.stride()
