"""Every implementation of every op on this device against the torch reference in float32 on the CPU.

Generated from the registry: a new provider is tested by being registered, a new op fails until `inputs.py` has a
generator for it. On an accelerator the reference itself is compared too. Memory that an op allocates without filling
it is NaN, so that an element nobody writes is seen. Results have the reference's dtype, are contiguous and new memory;
arguments that the op may not write to are afterwards what they were.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.inputs import GENERATORS, OpCase, results_only
from xgr_runtime.errors import OpUnavailable
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import REFERENCE, Impl, Op, OpSpec, all_ops, explain, impl, resolve
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xgr_runtime.hal.device import Device

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)
UNFILLED = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")
GARBAGE = {torch.bool: True, torch.uint8: 255}


class NanFilled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills what is allocated without a value: NaN, or a number that no index can be."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.name().split(".")[0] in UNFILLED:
            value = torch.nan if output.is_floating_point() else GARBAGE.get(output.dtype, -77)
            output.fill_(value)
        return output


def convert(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same arguments with every tensor changed, also inside dataclasses; strides are kept."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: convert(getattr(value, f.name), change) for f in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **fields)
    if isinstance(value, dict):
        return {name: convert(element, change) for name, element in value.items()}
    return value


def clone_to(device: torch.device, dtype: torch.dtype | None = None) -> Callable[[Any], Any]:
    """A copy on the device; half precision becomes `dtype` where one is given."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        new_dtype = dtype if dtype is not None and tensor.dtype in HALF else tensor.dtype
        if 0 in tensor.stride():
            return tensor[:1].to(device, new_dtype, copy=True).expand_as(tensor)
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=new_dtype, device=device)
        return copy.copy_(tensor)

    return change


def run(fn: Callable[..., Any], case: OpCase, args: Any) -> dict[str, torch.Tensor]:
    """What the contract specifies of a call; raises where the call wrote elsewhere or returned somebody else's memory."""
    before = {name: bits_of(arg) for name, arg in args.items() if name not in case.mutates}
    with NanFilled():  # type: ignore[no-untyped-call]
        result = fn(**args)
    for name, bits in before.items():
        assert bits_of(args[name]) == bits, f"{name} was written to"
    owned = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(args)}
    for name, tensor in results_only(args, result).items():
        assert tensor.is_contiguous(), f"{name} is not contiguous"
        if tensor.numel():
            assert tensor.untyped_storage().data_ptr() not in owned, f"{name} is no new memory"
    return case.view(args, result)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor inside arguments."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    convert(value, note)
    return found


def bits_of(value: Any) -> list[bytes]:
    """The content of every tensor inside an argument, NaN included."""
    return [
        tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
        for tensor in tensors_of(value)
    ]


def implementations(op: Op[..., object], kind: str) -> list[tuple[str, Callable[..., Any]]]:
    own = [(i.provider, i.fn) for i in op.impls if i.device_kind == kind]
    return [(REFERENCE, op.reference), *own]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "op_name" in metafunc.fixturenames:
        kind = metafunc.config.getoption("device")
        failures = load_providers(kind)
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


def accepts(op: Op[..., object], provider: str, spec: OpSpec) -> str | None:
    found: list[Impl[..., object]] = [
        i for i in op.impls if (i.provider, i.device_kind) == (provider, spec.device_kind)
    ]
    return found[0].accepts(spec) if found else None


def assert_close(
    got: torch.Tensor,
    expected: torch.Tensor,
    case: OpCase,
    dtype: torch.dtype,
    native: torch.dtype,
) -> None:
    assert got.shape == expected.shape
    assert got.dtype == native, f"expected {native}, got {got.dtype}"
    got = got.to("cpu")
    if expected.is_floating_point():
        got, expected = got.double(), expected.double()
    if case.is_exact:
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    else:
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(
            got, expected, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True
        )


def test_parity(
    op_name: str, provider: str, fn: Callable[..., Any], dtype: torch.dtype, device: Device
) -> None:
    assert op_name in GENERATORS, f"op {op_name!r} has no input generator in tests/ops/inputs.py"
    op = all_ops()[op_name]
    native = native_dtypes(op, dtype)
    for case in GENERATORS[op_name](dtype):
        spec = OpSpec(device.kind, dtype, device.capability, case.dims)
        reason = accepts(op, provider, spec)
        if reason is not None:
            refusals = explain(op, spec, allow_reference=False)[1]
            assert (provider, reason) in [(r.provider, r.reason) for r in refusals], case.label
            continue
        cpu = torch.device("cpu")
        reference_args = convert(case.args, clone_to(cpu, torch.float32))
        expected = run(op.reference, case, reference_args)
        got = run(fn, case, convert(case.args, clone_to(device.torch_device)))
        assert got.keys() == expected.keys()
        for name, tensor in got.items():
            try:
                assert_close(tensor, expected[name], case, dtype, native[name])
            except AssertionError as error:
                raise AssertionError(
                    f"{op_name}, {provider}, {case.label}, {name}: {error}"
                ) from error


def native_dtypes(op: Op[..., object], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What the reference returns for arguments of this dtype; the same for every case."""
    case = next(GENERATORS[op.name](dtype))
    results = run(op.reference, case, convert(case.args, clone_to(torch.device("cpu"))))
    return {name: tensor.dtype for name, tensor in results.items()}


@pytest.mark.parametrize("name", list(all_ops()))
def test_every_provider_runs_some_case(name: str, device: Device) -> None:
    op = all_ops()[name]
    for provider, _ in implementations(op, device.kind):
        specs = [
            OpSpec(device.kind, dtype, device.capability, case.dims)
            for dtype in DTYPES
            for case in GENERATORS[name](dtype)
        ]
        assert any(accepts(op, provider, spec) is None for spec in specs), (
            f"{provider} of {name} refuses every case, the first with: {accepts(op, provider, specs[0])}"
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
    expected = run(fresh_op().reference, case, case.args)["result"]
    got = run(forgetful, case, case.args)["result"]
    with pytest.raises(AssertionError, match="1 / 3"):
        assert_close(got, expected, case, torch.float32, torch.float32)


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
    expected = run(fresh_op().reference, case, case.args)["result"]
    with pytest.raises(AssertionError, match=text):
        assert_close(
            run(fn, case, case.args)["result"], expected, case, torch.float32, torch.float32
        )


def test_a_mutated_argument_may_be_written_to() -> None:
    case = OpCase("three", {"x": torch.ones(3)}, mutates=("x",))
    assert run(in_place, case, case.args)["result"].tolist() == [2, 2, 2]


def test_a_provider_is_found_by_its_own_device() -> None:
    op = fresh_op()

    def double_it(x: torch.Tensor) -> torch.Tensor:
        return x + x

    impl(op, provider="twice", device="cuda", accepts=lambda _: "not today")(double_it)
    impl(op, provider="twice", device="cpu")(double_it)
    untyped: Any = op
    assert accepts(untyped, "twice", OpSpec("cpu", torch.float32)) is None
    assert accepts(untyped, "twice", OpSpec("cuda", torch.float32)) == "not today"


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
