"""Every provider of an op on a device, case by case: what ran, what it refused, what it got wrong and by how much.

A provider that raises has failed that case, and the next one runs. Only a lost device ends it. One that takes the dtype, as
`xgr doctor` asks without sizes, has failed where it ran no case: nobody knows what it does.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from xgr_runtime.conformance.comparison import (
    Error,
    Results,
    TooFar,
    call,
    clone_to,
    compare,
    convert,
    expected_results,
    native_dtypes,
)
from xgr_runtime.conformance.difference import Difference, require
from xgr_runtime.conformance.op_case import Generator, OpCase
from xgr_runtime.conformance.op_cases import GENERATORS
from xgr_runtime.hal.device import Device
from xgr_runtime.hal.explain import explain_error
from xgr_runtime.hal.registry import (
    PARTS,
    REFERENCE,
    Impl,
    Op,
    OpSpec,
    bind_parts,
    explain,
    why_no_parts,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_FAILURES = 8  # as many messages are kept of one provider; all failed cases are counted
MAX_MESSAGE = 600  # characters


@dataclass
class ParityEntry:
    """One provider of one op in one dtype.

    num_failed: also one for all cases that are missing. num_default: cases in which it is the provider that is bound. refusals: reason -> number of cases. failures: (case,
    message). error: the largest of finite results; worst_case: where it is largest relative to the tolerance.
    """

    op: str
    provider: str
    dtype: str
    num_cases: int = 0
    num_run: int = 0
    num_failed: int = 0
    num_default: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)
    error: Error = field(default_factory=Error)
    worst_case: str = ""
    seconds: float = 0.0

    @property
    def num_refused(self) -> int:
        """Cases that the provider does not take."""
        return sum(self.refusals.values())

    @property
    def result(self) -> str:
        """passed, failed, or refused where no case ran and none had to."""
        if self.num_failed:
            return "failed"
        return "passed" if self.num_run else "refused"

    def note_error(self, case: str, error: Error) -> None:
        """Keep the larger error."""
        if not self.worst_case or error.of_tolerance > self.error.of_tolerance:
            self.worst_case = case
        self.error = self.error.worst(error)

    def note_failure(self, case: str, message: str) -> None:
        """Count a failed case; the first few keep their messages."""
        self.num_failed += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append((case, message[:MAX_MESSAGE]))


def implementations(op: Op[..., object], kind: str) -> list[tuple[str, Callable[..., Any]]]:
    """(provider, function) of all that can run on that kind of device, the reference first.

    A fused op runs by its parts too; that function gets the parts that are bound for a case in front of its arguments.
    """
    own = [(i.provider, i.fn) for i in op.impls if i.device_kind == kind]
    by_parts = [] if op.run_by_parts is None else [(PARTS, op.run_by_parts)]
    return [(REFERENCE, op.reference), *by_parts, *own]


def refusal(op: Op[..., object], provider: str, spec: OpSpec) -> str | None:
    """Why the provider does not take the spec, None where it does."""
    if provider == PARTS:
        _, missing = bind_parts(op, spec, allow_reference=False)
        return why_no_parts(missing) if missing else None
    found: list[Impl[..., object]] = [
        i for i in op.impls if (i.provider, i.device_kind) == (provider, spec.device_kind)
    ]
    return found[0].accepts(spec) if found else None


def check_provider(
    op: Op[..., object],
    provider: str,
    fn: Callable[..., Any],
    dtype: torch.dtype,
    device: Device,
    generator: Generator | None = None,
    *,
    is_filling: bool = True,
) -> ParityEntry:
    """Run all cases of an op, up to one that a lost device does not survive. generator: if not that of GENERATORS.

    is_filling: whether memory that the provider allocates is NaN, as of `comparison.call`.
    """
    generator = GENERATORS[op.name] if generator is None else generator
    entry = ParityEntry(op.name, provider, str(dtype).removeprefix("torch."))
    native, start = native_dtypes(op, generator, dtype), time.perf_counter()
    run = partial(call, is_filling=is_filling)
    for case in generator(dtype):
        entry.num_cases += 1
        spec = OpSpec(device.kind, dtype, device.capability, case.dims)
        binding = explain(op, spec, allow_reference=False)[0]
        is_default = binding is not None and binding.provider == provider
        entry.num_default += is_default
        reason = refusal(op, provider, spec)
        if reason is not None:
            entry.refusals[reason] = entry.refusals.get(reason, 0) + 1
            if is_default:
                entry.note_failure(case.label, f"is bound although it refuses: {reason}")
            continue
        entry.num_run += 1
        try:
            bound = _with_parts(op, provider, fn, spec)
            for name, error in _errors(op, partial(run, bound), case, dtype, native, device):
                entry.note_error(f"{case.label}, {name}", error)
        except Difference as difference:
            entry.note_failure(case.label, str(difference))
        except Exception as error:  # noqa: BLE001 - whatever a provider raises is its failure
            named = explain_error(device.kind, error) or error
            entry.note_failure(case.label, f"{type(named).__name__}: {named}")
            if why_unusable(device):
                break
    if not entry.num_run and _takes_dtype(op, provider, dtype, device):
        ran = f"takes {entry.dtype} on this device, and none of {entry.num_cases} cases ran"
        entry.note_failure("no case", ran)
    entry.seconds = time.perf_counter() - start
    return entry


def _takes_dtype(op: Op[..., object], provider: str, dtype: torch.dtype, device: Device) -> bool:
    """Whether a provider takes the dtype as far as is known without a model's sizes, so that cases of it have to exist.

    The reference takes all, and every part is asked about its own op.
    """
    if provider in (REFERENCE, PARTS):
        return False
    return refusal(op, provider, OpSpec(device.kind, dtype, device.capability)) is None


def _with_parts(
    op: Op[..., object], provider: str, fn: Callable[..., Any], spec: OpSpec
) -> Callable[..., Any]:
    """What is called for the spec: the function itself, or with the parts that are bound there."""
    if provider != PARTS:
        return fn
    return partial(fn, bind_parts(op, spec, allow_reference=False)[0])


def _errors(
    op: Op[..., object],
    run: Callable[[OpCase, Any], Results],
    case: OpCase,
    dtype: torch.dtype,
    native: dict[str, torch.dtype],
    device: Device,
) -> Iterator[tuple[str, Error]]:
    """The error of each result of one case. run: the provider's `call`."""
    expected = expected_results(op, case)
    got = run(case, convert(case.args, clone_to(device.torch_device)))
    require(got.keys() == expected.keys(), f"expected {[*expected]}, got {[*got]}")
    for name, tensor in got.items():
        try:
            yield name, compare(tensor, expected[name], case, dtype, native[name])
        except TooFar as difference:
            yield name, difference.error
            raise Difference(f"{name}: {difference}") from difference
        except Difference as difference:
            raise Difference(f"{name}: {difference}") from difference


def why_unusable(device: Device) -> str:
    """What the device answers to the smallest task, "" where it does it."""
    try:
        device.synchronize()
        total = float(torch.ones(2, device=device.torch_device).sum().cpu())
    except RuntimeError as error:  # what torch raises for every failed device
        return f"{type(error).__name__}: {error}"
    return "" if total == 2.0 else f"1 + 1 is {total}"
