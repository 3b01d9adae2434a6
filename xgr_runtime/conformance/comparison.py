"""One call of an op compared with its torch reference in float32 on the CPU.

Memory that an op allocates without filling it is NaN, so that an element nobody writes is seen. Results have the
reference's dtype, are contiguous and new memory; arguments that the op may not write to are afterwards what they were.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xgr_runtime.conformance.difference import Difference, require
from xgr_runtime.conformance.op_case import Generator, OpCase, results_only
from xgr_runtime.hal.registry import Op
from xgr_runtime.hal.tolerances import TOLERANCES

HALF = (torch.float16, torch.bfloat16)
CPU = torch.device("cpu")
_UNFILLED = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")
_GARBAGE = {torch.bool: True, torch.uint8: 255}

Results = dict[str, torch.Tensor]


class NanFilled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills what is allocated without a value: NaN, or a number that no index can be."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.name().split(".")[0] in _UNFILLED:
            value = torch.nan if output.is_floating_point() else _GARBAGE.get(output.dtype, -77)
            output.fill_(value)
        return output


@dataclass(frozen=True)
class Error:
    """The largest difference of finite elements: as it is, and as a share of what the tolerance allows there."""

    absolute: float = 0.0
    of_tolerance: float = 0.0

    def worst(self, other: "Error") -> "Error":
        """The larger of each."""
        return Error(max(self.absolute, other.absolute), max(self.of_tolerance, other.of_tolerance))


class TooFar(Difference):
    """A result beyond its tolerance, and how far it is from the expected one where both are finite."""

    def __init__(self, message: str, error: Error) -> None:
        super().__init__(message)
        self.error = error


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


def clone_to(
    place: torch.device, dtype: torch.dtype | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A copy on the device; half precision becomes `dtype` where one is given."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        new_dtype = dtype if dtype is not None and tensor.dtype in HALF else tensor.dtype
        if 0 in tensor.stride():
            return tensor[:1].to(place, new_dtype, copy=True).expand_as(tensor)
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=new_dtype, device=place)
        return copy.copy_(tensor)

    return change


def call(fn: Callable[..., Any], case: OpCase, args: Any, *, is_filling: bool = True) -> Results:
    """What the contract specifies of a call; Difference where it wrote elsewhere or returned somebody else's memory.

    is_filling: whether memory that it allocates is NaN; without it, a checker sees what nobody has written.
    """
    before = {name: _bits_of(arg) for name, arg in args.items() if name not in case.mutates}
    filling: AbstractContextManager[Any] = nullcontext()
    if is_filling:
        filling = NanFilled()  # type: ignore[no-untyped-call]
    with filling:
        result = fn(**args)
    for name, bits in before.items():
        require(_bits_of(args[name]) == bits, f"{name} was written to")
    owned = {tensor.untyped_storage().data_ptr() for tensor in _tensors_of(args)}
    for name, tensor in results_only(args, result).items():
        require(tensor.is_contiguous(), f"{name} is not contiguous")
        is_new = not tensor.numel() or tensor.untyped_storage().data_ptr() not in owned
        require(is_new, f"{name} is no new memory")
    return case.view(args, result)


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor inside arguments."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    convert(value, note)
    return found


def _bits_of(value: Any) -> list[bytes]:
    """The content of every tensor inside an argument, NaN included."""
    return [
        tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
        for tensor in _tensors_of(value)
    ]


def expected_results(op: Op[..., object], case: OpCase) -> Results:
    """The reference's, in float32 on the CPU."""
    return call(op.reference, case, convert(case.args, clone_to(CPU, torch.float32)))


def native_dtypes(
    op: Op[..., object], generator: Generator, dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """What the reference returns for arguments of this dtype; the same for every case."""
    case = next(generator(dtype))
    results = call(op.reference, case, convert(case.args, clone_to(CPU)))
    return {name: tensor.dtype for name, tensor in results.items()}


def compare(
    got: torch.Tensor,
    expected: torch.Tensor,
    case: OpCase,
    dtype: torch.dtype,
    native: torch.dtype,
) -> Error:
    """How far one result is from the expected one; Difference where that is more than the case allows.

    dtype: the one under test, whose tolerance applies. native: the dtype that the result must have.
    """
    require(got.shape == expected.shape, f"expected shape {expected.shape}, got {got.shape}")
    require(got.dtype == native, f"expected {native}, got {got.dtype}")
    got = got.to("cpu")
    if expected.is_floating_point():
        got, expected = got.double(), expected.double()
    tolerance = TOLERANCES[dtype]
    atol, rtol = (0.0, 0.0) if case.is_exact else (tolerance.atol, tolerance.rtol)
    error = _error(got, expected, atol, rtol)
    try:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as reason:
        raise TooFar(str(reason), error) from reason
    return error


def _error(got: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float) -> Error:
    if not expected.is_floating_point() or not expected.numel():
        return Error()
    is_finite = torch.isfinite(got) & torch.isfinite(expected)
    absolute = (got - expected).abs().masked_fill(~is_finite, 0.0)
    largest = float(absolute.max())
    allowed = atol + rtol * expected.abs().masked_fill(~is_finite, math.inf)
    if not atol:
        return Error(largest, math.inf if largest else 0.0)
    return Error(largest, float((absolute / allowed).max()))
