"""What the parity check says of right, wrong, raising and refusing providers, and of a device that is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from xgr_runtime.conformance.op_cases import GENERATORS
from xgr_runtime.conformance.parity import MAX_FAILURES, ParityEntry, check_provider
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.registry import Impl, all_ops
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.hal.registry import OpSpec

FLOAT = torch.float32
NUM_CASES = len(list(GENERATORS["rms_norm"](FLOAT)))


def check(
    make: Callable[[Callable[..., Any]], Callable[..., Any]],
    accepts: Callable[[OpSpec], str | None] = lambda _: None,
    device: CpuDevice | None = None,
) -> ParityEntry:
    """`rms_norm` by a provider that is registered for this check alone."""
    op = all_ops()["rms_norm"]
    fn = make(op.reference)
    op.impls.insert(0, Impl("temporary", "cpu", fn, accepts))
    try:
        return check_provider(op, "temporary", fn, FLOAT, device or CpuDevice())
    finally:
        del op.impls[0]


def test_a_right_provider_passes_with_its_error() -> None:
    entry = check(lambda reference: lambda **args: reference(**args) + 1e-5)
    assert entry.result == "passed"
    assert (entry.num_cases, entry.num_run, entry.num_failed) == (NUM_CASES, NUM_CASES, 0)
    assert entry.num_default == NUM_CASES
    assert entry.error.absolute == pytest.approx(1e-5, rel=0.1)
    assert 0.1 < entry.error.of_tolerance <= 1e-5 / TOLERANCES[FLOAT].atol
    assert entry.worst_case


def test_a_wrong_provider_fails_in_every_case_and_some_messages_are_kept() -> None:
    entry = check(lambda reference: lambda **args: reference(**args) * 1.5)
    assert entry.result == "failed"
    assert entry.num_failed == entry.num_run == NUM_CASES
    assert len(entry.failures) == min(MAX_FAILURES, NUM_CASES)
    assert entry.error.of_tolerance > 1000
    case, message = entry.failures[0]
    assert case == "one, rows"
    assert message.startswith("result: Tensor-likes are not close!")


def test_a_provider_that_raises_once_fails_once() -> None:
    def make(reference: Callable[..., Any]) -> Callable[..., Any]:
        def sometimes(**args: Any) -> Any:
            if args["x_NM"].shape == (17, 48):
                raise RuntimeError("no kernel for 48")
            return reference(**args)

        return sometimes

    entry = check(make)
    assert (entry.num_run, entry.num_failed) == (NUM_CASES, 1)
    assert entry.failures == [("not a power of two, rows", "RuntimeError: no kernel for 48")]


def test_what_a_provider_breaks_beside_its_result_is_a_failure() -> None:
    def make(reference: Callable[..., Any]) -> Callable[..., Any]:
        def in_place(**args: Any) -> Any:
            return args["x_NM"].copy_(reference(**args)).clone()

        return in_place

    entry = check(make)
    assert entry.num_failed == NUM_CASES
    assert entry.failures[0][1] == "x_NM was written to"


def test_refusals_are_counted_by_reason_and_do_not_run() -> None:
    def accepts(spec: OpSpec) -> str | None:
        size = spec.dims["M"]
        return None if size % 16 == 0 else f"M must be a multiple of 16, got {size}"

    entry = check(lambda reference: lambda **args: reference(**args), accepts)
    assert entry.result == "passed"
    assert entry.refusals == {
        "M must be a multiple of 16, got 2": 2,
        "M must be a multiple of 16, got 6": 2,
    }
    assert entry.num_default == entry.num_run == NUM_CASES - 4
    entry = check(lambda reference: reference, lambda _: "not on Mondays")
    assert (entry.result, entry.num_run) == ("refused", 0)


def test_a_provider_that_takes_a_dtype_and_no_case_of_it_has_failed() -> None:
    entry = check(lambda reference: reference, lambda spec: "too small" if spec.dims else None)
    assert (entry.result, entry.num_run, entry.num_failed) == ("failed", 0, 1)
    message = f"takes float32 on this device, and none of {NUM_CASES} cases ran"
    assert entry.failures == [("no case", message)]


class LostCpu(CpuDevice):
    """A processor that can be told to fail for good."""

    is_lost = False

    def synchronize(self) -> None:
        if self.is_lost:
            raise RuntimeError("device error 507018")


def test_a_lost_device_ends_the_check_with_the_cases_before() -> None:
    device = LostCpu()

    def make(reference: Callable[..., Any]) -> Callable[..., Any]:
        def fatal(**args: Any) -> Any:
            if args["x_NM"].shape == (3, 6):
                device.is_lost = True
                raise RuntimeError("stream 3 was aborted")
            return reference(**args)

        return fatal

    entry = check(make, device=device)
    assert (entry.result, entry.num_run, entry.num_failed) == ("failed", 3, 1)
    assert entry.failures == [("odd, rows", "RuntimeError: stream 3 was aborted")]
