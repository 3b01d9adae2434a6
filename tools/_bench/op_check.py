"""Parity of an op before it is timed: the cases of the conformance run, then the very call that will be timed.

The latter against the torch reference in float32 on the same device, TF32 off, within the tolerance of the dtype, or within what
the roundings on the way give (`op_rounding`) where that is more; memory that the call allocates, and everything it has to write,
is NaN before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tools._bench.op_rounding import SIGMAS
from xgr_runtime.conformance.comparison import NanFilled, clone_to, convert
from xgr_runtime.conformance.parity import check_provider, implementations, refusal
from xgr_runtime.hal.registry import PARTS, REFERENCE, OpSpec, bind_parts, explain
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from functools import partial

    from tools._bench.op_work import OpWork
    from xgr_runtime.conformance.op_case import OpCase
    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Op

    Fn = Callable[..., Any] | partial[Any]


def spec_of(device: Device, dtype: torch.dtype, case: OpCase) -> OpSpec:
    return OpSpec(device.kind, dtype, device.capability, case.dims)


def bound_provider(op: Op[..., object], spec: OpSpec) -> str:
    """Who is bound there, "" where nobody is."""
    binding, _ = explain(op, spec, allow_reference=False)
    return "" if binding is None else binding.provider


def providers(op: Op[..., object], spec: OpSpec) -> Iterator[tuple[str, Fn]]:
    """Everybody who takes the spec; the reference only where it is what is bound."""
    for provider, fn in implementations(op, spec.device_kind):
        if provider == REFERENCE:
            if bound_provider(op, spec) == REFERENCE:
                yield provider, fn
        elif refusal(op, provider, spec) is None:
            yield provider, _with_parts(op, spec, fn) if provider == PARTS else fn


def _with_parts(op: Op[..., object], spec: OpSpec, fn: Fn) -> Fn:
    parts, _ = bind_parts(op, spec, allow_reference=False)
    return lambda **args: fn(parts, **args)


def check_cases(
    op: Op[..., object], dtype: torch.dtype, device: Device, only: str = ""
) -> list[dict[str, Any]]:
    """The conformance cases of every provider, or of that one."""
    found = []
    for provider, fn in implementations(op, device.kind):
        if provider == REFERENCE or only not in ("", provider):
            continue
        entry = check_provider(op, provider, fn, dtype, device)
        found.append(
            {
                "op": op.name,
                "provider": provider,
                "cases": entry.num_cases,
                "run": entry.num_run,
                "failed": entry.num_failed,
                "largest_error_of_tolerance": round(entry.error.of_tolerance, 4),
                "failures": [f"{case}: {message}" for case, message in entry.failures[:3]],
            }
        )
    return found


def check_work(
    work: OpWork, op: Op[..., object], dtype: torch.dtype, device: Device
) -> list[dict[str, Any]]:
    """Of each provider and peer of a call: its largest error as a share of what is allowed, or why it has none."""
    case = work.draw(0)
    place = device.torch_device
    spec = spec_of(device, dtype, case)
    reference = convert(case.args, clone_to(place, torch.float32))
    noise = {} if work.noise is None else work.noise(reference, dtype)
    expected = case.view(reference, op.reference(**reference))
    del reference
    found = []
    for provider, fn in providers(op, spec):
        args = convert(case.args, clone_to(place))
        found.append(_checked(work, provider, case, (expected, noise), _run(fn, args, case)))
    for name, peer in work.peers.items():
        found.append(
            {**_checked(work, name, case, (expected, noise), _run_peer(peer, case)), "peer": True}
        )
    return found


def _run(fn: Fn, args: dict[str, Any], case: OpCase) -> Callable[[], Mapping[str, torch.Tensor]]:
    def call() -> Mapping[str, torch.Tensor]:
        with NanFilled():  # type: ignore[no-untyped-call]
            result = fn(**args)
        return case.view(args, result)

    return call


def _run_peer(peer: Any, case: OpCase) -> Callable[[], Mapping[str, torch.Tensor]]:
    def call() -> Mapping[str, torch.Tensor]:
        found: Mapping[str, torch.Tensor] = peer(case.args)()
        return found

    return call


def _checked(
    work: OpWork,
    who: str,
    case: OpCase,
    wanted: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]],
    call: Callable[[], Mapping[str, torch.Tensor]],
) -> dict[str, Any]:
    """wanted: the results of the reference, and the noise of those that have one."""
    found: dict[str, Any] = {"op": work.op, "label": work.label, "provider": who}
    expected, noise = wanted
    try:
        got = call()
        dtype = _dtype_under_test(case)
        wrong = {
            name: of_tolerance(
                tensor, expected[name], dtype, is_exact=case.is_exact, noise=noise.get(name)
            )
            for name, tensor in got.items()
        }
    except Exception as error:  # noqa: BLE001 - whatever it raises is why it has no figure
        return {**found, "failure": f"{type(error).__name__}: {error}"[-600:]}
    worst = max(wrong.values())
    found["error_of_tolerance"] = round(worst, 4)
    if not worst <= 1:
        found["failure"] = f"beyond the tolerance: {wrong}"
    return found


def _dtype_under_test(case: OpCase) -> torch.dtype:
    """The narrowest floating dtype among the arguments."""
    given = [a.dtype for a in case.args.values() if isinstance(a, torch.Tensor)]
    return min((d for d in given if d.is_floating_point), key=lambda d: d.itemsize)


def of_tolerance(
    got: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    *,
    is_exact: bool = False,
    noise: torch.Tensor | None = None,
) -> float:
    """The largest difference as a share of what is allowed; infinite for another shape, and where one is finite alone.

    noise: standard deviation of what roundings on the way change in each element; atol is no less than SIGMAS of it.
    """
    if got.shape != expected.shape:
        return float("inf")
    if is_exact:
        expected = expected.to(got.dtype)
        is_same = (got == expected) | ((got != got) & (expected != expected))
        return 0.0 if bool(is_same.all()) else float("inf")
    tolerance = TOLERANCES[dtype]
    got, expected = got.double(), expected.double()
    is_same = (got == expected) | (got.isnan() & expected.isnan())
    allowed = tolerance.rtol * expected.abs()
    allowed += tolerance.atol if noise is None else (SIGMAS * noise).clamp_min(tolerance.atol)
    share = torch.where(is_same, 0.0, (got - expected).abs() / allowed).nan_to_num(float("inf"))
    return float(share.max()) if share.numel() else 0.0
