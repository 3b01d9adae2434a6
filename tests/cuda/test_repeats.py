"""A provider's kernels give the same bits every time: a graph of one call, replayed a thousand times and compared on the GPU.

Each replay starts from the same arguments, in memory that is filled anew, so that what differs is what the kernels did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.cuda.guard_bands import GuardBands
from tests.cuda.providers import (
    DTYPES,
    assert_none_is_missing,
    cases_of,
    every_provider,
    specified,
    tensors_of,
)
from xgr_runtime.conformance.comparison import clone_to, convert

if TYPE_CHECKING:
    from xgr_runtime.conformance.op_case import Args, OpCase
    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Impl, Op

pytestmark = pytest.mark.device("cuda")
NUM_REPLAYS = 1000


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1, 1).view(torch.uint8)


class Repeated:
    """One call as a captured segment does it, and how many bytes of its results ever differed from the first call's."""

    def __init__(
        self, op: Op[..., Any], found: Impl[..., Any], case: OpCase, device: Device
    ) -> None:
        self._op, self._fn, self._case = op, found.fn, case
        self._pristine: Args = convert(case.args, clone_to(device.torch_device))
        self._args: Args = convert(case.args, clone_to(device.torch_device))
        self._expected = [bits(tensor) for tensor in self._call()]
        self.num_different = torch.zeros(1, dtype=torch.int64, device=device.torch_device)
        device.synchronize()
        self._graph = device.capture(op.name, self._compare)

    def replay(self, times: int) -> None:
        for _ in range(times):
            self._graph.replay()

    def _call(self) -> list[torch.Tensor]:
        for name in self._case.mutates:
            pairs = zip(tensors_of(self._args[name]), tensors_of(self._pristine[name]), strict=True)
            for tensor, pristine in pairs:
                tensor.copy_(pristine)
        with GuardBands():
            result = self._fn(**self._args)
        return list(specified(self._op, self._case, self._args, result).values())

    def _compare(self) -> None:
        for got, expected in zip(self._call(), self._expected, strict=True):
            self.num_different += (bits(got) != expected).sum()


@pytest.mark.parametrize(("op", "found"), every_provider())
def test_a_thousand_calls_give_the_same_bits(
    op: Op[..., Any], found: Impl[..., Any], device: Device
) -> None:
    takes = [case for dtype in DTYPES for case in cases_of(op, found, dtype, device)]
    if not takes:
        assert_none_is_missing(op, found, DTYPES, device)
        return
    largest = max(takes, key=lambda case: sum(t.numel() for t in tensors_of(case.args)))
    repeated = Repeated(op, found, largest, device)
    with device.segment(op.name):
        repeated.replay(NUM_REPLAYS)
    device.synchronize()
    assert int(repeated.num_different) == 0, largest.label


def test_a_call_that_differs_once_is_seen(device: Device) -> None:
    """The counter of calls is the result, as of a kernel that reads what another one has yet to write."""
    x = torch.zeros(4, device=device.torch_device)
    expected, num_different = bits(x.clone()), torch.zeros(1, dtype=torch.int64, device=x.device)

    def count() -> None:
        num_different.add_((bits(x) != expected).sum())
        x[3] += 1

    device.synchronize()
    graph = device.capture("count", count)
    x.zero_()
    with device.segment("count"):
        for _ in range(3):
            graph.replay()
    device.synchronize()
    assert int(num_different) > 0
