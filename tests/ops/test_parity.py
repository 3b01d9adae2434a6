"""Every implementation of every op on this device against the torch reference in float32 on the CPU.

Generated from the registry: a new provider is tested by being registered, a new op fails until
`xgr_runtime/conformance/op_cases.py` has a generator for it. On an accelerator the reference itself is compared too.
The comparison is the package's own, which `xgr conformance` runs where no checkout is; that it sees what it is there
for is shown here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.ladder import note_executed
from xgr_runtime.conformance.comparison import call, compare
from xgr_runtime.conformance.op_case import OpCase
from xgr_runtime.conformance.op_cases import GENERATORS
from xgr_runtime.conformance.parity import DTYPES, check_provider, implementations, refusal
from xgr_runtime.errors import OpUnavailable
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import (
    PARTS,
    REFERENCE,
    Op,
    OpSpec,
    all_ops,
    by_parts,
    impl,
    resolve,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from xgr_runtime.hal.device import Device


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "op_name" in metafunc.fixturenames:
        kind = metafunc.config.getoption("device")
        # Triton is optional: where it is absent its providers do not exist, and the header of `xgr conformance` says so.
        failures = [f for f in load_providers(kind) if "No module named 'triton'" not in f.reason]
        assert not failures, f"providers that could not be loaded: {failures}"
        cases = [
            pytest.param(
                name, provider, fn, dtype, id=f"{name}-{provider}-{dtype}".replace("torch.", "")
            )
            for name, op in all_ops().items()
            for provider, fn in implementations(op, kind)
            for dtype in DTYPES
        ]
        metafunc.parametrize(("op_name", "provider", "fn", "dtype"), cases)


def test_parity(
    op_name: str, provider: str, fn: Callable[..., Any], dtype: torch.dtype, device: Device
) -> None:
    assert op_name in GENERATORS, (
        f"op {op_name!r} has no input generator in xgr_runtime/conformance/op_cases.py"
    )
    entry = check_provider(all_ops()[op_name], provider, fn, dtype, device)
    assert entry.result != "failed", "\n".join(
        f"{op_name}, {provider}, {case}: {message}" for case, message in entry.failures
    )
    if entry.num_run:
        note_executed(device.kind, op_name, provider, entry.dtype)


@pytest.mark.parametrize("name", list(all_ops()))
def test_every_provider_runs_some_case(name: str, device: Device) -> None:
    op = all_ops()[name]
    for provider, _ in implementations(op, device.kind):
        reasons = (
            refusal(op, provider, OpSpec(device.kind, dtype, device.capability, case.dims))
            for dtype in DTYPES
            for case in GENERATORS[name](dtype)
        )
        first = next(reasons)
        assert first is None or None in reasons, (
            f"{provider} of {name} refuses every case, the first with: {first}"
        )


def test_every_generator_has_an_op() -> None:
    assert GENERATORS.keys() <= all_ops().keys()


def fresh_op() -> Op[[torch.Tensor], torch.Tensor]:
    def double_it(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return Op(double_it)


def test_an_element_that_nobody_writes_is_seen() -> None:
    def forgetful(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[:-1] = x[:-1] * 2
        return out

    case = OpCase("three", {"x": torch.ones(3)})
    expected = call(fresh_op().reference, case, case.args)["result"]
    got = call(forgetful, case, case.args)["result"]
    with pytest.raises(AssertionError, match="1 / 3"):
        compare(got, expected, case, torch.float32, torch.float32)


def in_place(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2).clone()


def aliasing(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(2, 3).copy_(x.T).T


def wider(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).double()


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (in_place, "x was written to"),
        (aliasing, "result is no new memory"),
        (transposed, "result is not contiguous"),
        (wider, "expected torch.float32, got torch.float64"),
    ],
)
def test_what_breaks_the_contract_beside_the_values_is_seen(
    fn: Callable[..., Any], text: str
) -> None:
    case = OpCase("six", {"x": torch.ones(3, 2)})
    expected = call(fresh_op().reference, case, case.args)["result"]
    with pytest.raises(AssertionError, match=text):
        compare(call(fn, case, case.args)["result"], expected, case, torch.float32, torch.float32)


def test_a_mutated_argument_may_be_written_to() -> None:
    case = OpCase("three", {"x": torch.ones(3)}, mutates=("x",))
    assert call(in_place, case, case.args)["result"].tolist() == [2, 2, 2]


def test_a_provider_is_found_by_its_own_device() -> None:
    op = fresh_op()

    def double_it(x: torch.Tensor) -> torch.Tensor:
        return x + x

    impl(op, provider="twice", device="cuda", accepts=lambda _: "not today")(double_it)
    impl(op, provider="twice", device="cpu")(double_it)
    untyped: Any = op
    assert refusal(untyped, "twice", OpSpec("cpu", torch.float32)) is None
    assert refusal(untyped, "twice", OpSpec("cuda", torch.float32)) == "not today"


def test_a_fused_op_is_checked_by_its_parts() -> None:
    """With whoever provides them for a case, so that a wrong part shows in the fused op too."""
    part = fresh_op()
    fused: Op[..., Any] = Op(fresh_op().reference)

    @by_parts(fused, part)
    def call_it(parts: Any, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = parts.double_it(x)
        return doubled

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def cases(dtype: torch.dtype) -> Iterator[OpCase]:
        yield OpCase("small", {"x": torch.ones(3, dtype=dtype)}, {"N": 1})
        yield OpCase("large", {"x": torch.ones(3, dtype=dtype)}, {"N": 9})

    def only_large(spec: OpSpec) -> str | None:
        return None if spec.dims.get("N", 9) == 9 else "too small"

    (reference, by_its_parts) = implementations(fused, "cpu")
    assert (reference[0], by_its_parts[0]) == (REFERENCE, PARTS)
    entry = check_provider(fused, *by_its_parts, torch.float32, CpuDevice(), cases)
    assert (entry.num_run, entry.num_failed, entry.num_default) == (2, 0, 2)
    impl(part, provider="wrong", device="cpu", accepts=only_large)(wrong)
    entry = check_provider(fused, *by_its_parts, torch.float32, CpuDevice(), cases)
    assert [case for case, _ in entry.failures] == ["large"]


def test_parts_that_nobody_provides_are_a_refusal() -> None:
    part, fused = fresh_op(), Op(fresh_op().reference)
    by_parts(fused, part)(lambda parts, x: parts.double_it(x))
    untyped: Any = fused
    spec = OpSpec("cuda", torch.float32)
    assert refusal(untyped, PARTS, spec) == "no provider of double_it"
    impl(part, provider="twice", device="cuda")(part.reference)
    assert refusal(untyped, PARTS, spec) is None


def test_a_refused_spec_is_not_bound() -> None:
    op = fresh_op()

    def only_small(spec: OpSpec) -> str | None:
        rows = spec.dims.get("N", 0)
        return None if rows <= 4 else f"N must be at most 4, got {rows}"

    def double_it(x: torch.Tensor) -> torch.Tensor:
        return x + x

    impl(op, provider="small", device="cuda", accepts=only_small)(double_it)
    spec = OpSpec("cuda", torch.float32, dims={"N": 4})
    assert resolve(op, spec, allow_reference=False).provider == "small"
    spec = OpSpec("cuda", torch.float32, dims={"N": 5})
    with pytest.raises(OpUnavailable, match="N must be at most 4, got 5"):
        resolve(op, spec, allow_reference=False)
