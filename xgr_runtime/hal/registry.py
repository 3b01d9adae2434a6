"""The op registry: an op *is* its torch reference; providers register other functions against it.

Binding happens once per bucket at warm-up and yields a plain callable, so that nothing is dispatched in the hot path.
There is no silent fallback: a provider refuses with a reason, and when nobody is left `OpUnavailable` carries all
reasons. On an accelerator the reference itself counts as a provider only when the configuration allows it.

A fused op is one that its parts can do as well, each bound on its own: where no provider fuses them, it runs by parts. So
a device needs a provider for the parts alone.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from xgr_runtime.errors import OpUnavailable
from xgr_runtime.hal.providers import PROVIDER_MODULES, load_providers

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE = "reference"
PARTS = "parts"

# Sizes a provider may ask for. Of the bucket, each an upper bound of what a call has: packed tokens, rows, histories, new
# tokens, rows and history tokens of one history. Of the model (one rank of it): hidden size, feed-forward size, query heads,
# KV heads, head dimension, vocabulary; of its KV cache: tokens of a page, pages of histories.
BUCKET_SIZES = ("T", "N", "H", "max_q", "max_rows", "max_kv")
MODEL_SIZES = ("M", "F", "Q", "G", "D", "V", "page_size", "num_pages")


@dataclass(frozen=True)
class OpSpec:
    """What a provider may look at when it accepts or refuses: no tensors, only facts known at warm-up.

    dims holds sizes by name, of BUCKET_SIZES and MODEL_SIZES. A size is absent where it does not exist (max_q in a round)
    or is not known (`xgr doctor` asks without a model): read it with `dims.get`. capability is the device's own string.
    """

    device_kind: str
    dtype: "torch.dtype"
    capability: str = ""
    dims: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.dims).difference(BUCKET_SIZES, MODEL_SIZES)
        if unknown:
            raise ValueError(
                f"unknown sizes {', '.join(sorted(unknown))}; known: {', '.join((*BUCKET_SIZES, *MODEL_SIZES))}"
            )


Accepts = Callable[[OpSpec], str | None]


@dataclass(frozen=True)
class Impl(Generic[P, R]):
    """One provider's function for one op on one kind of device."""

    provider: str
    device_kind: str
    fn: Callable[P, R]
    accepts: Accepts


@dataclass(frozen=True)
class Refusal:
    """Why a provider was not bound. is_load_failure: its module could not be imported at all."""

    provider: str
    reason: str
    is_load_failure: bool = False


@dataclass(frozen=True)
class Binding(Generic[P, R]):
    """The function bound for an op, who provides it, and who refused before."""

    op_name: str
    provider: str
    fn: Callable[P, R]
    refusals: tuple[Refusal, ...]


class Op(Generic[P, R]):
    """A declared op. Calling it runs the reference."""

    def __init__(self, reference: Callable[P, R]) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.signature = inspect.signature(reference)
        self.impls: list[Impl[P, R]] = []
        self.parts: tuple[Op[..., Any], ...] = ()
        self.run_by_parts: Callable[Concatenate[Any, P], R] | None = None
        self.__doc__ = reference.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.reference(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


_OPS: "dict[str, Op[..., object]]" = {}


def op(reference: Callable[P, R]) -> Op[P, R]:
    """Declare an op by its torch reference. The function's name is the op's name and is a contract."""
    declared = Op(reference)
    if declared.name in _OPS:
        raise ValueError(f"op {declared.name!r} is declared twice")
    _OPS[declared.name] = declared  # type: ignore[assignment]
    return declared


def _accept_all(spec: OpSpec) -> str | None:
    return None


def impl(
    target: Op[P, R], *, provider: str, device: str, accepts: Accepts = _accept_all
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a provider's function for `target` on `device`; its parameters must equal the reference's.

    `accepts(spec)` returns None or the reason for a refusal; it never raises, copies or reads the environment. Where it
    refuses for a size, it accepts a spec without that size.
    """

    def register(fn: Callable[P, R]) -> Callable[P, R]:
        expected = [(p.name, p.kind, p.default) for p in target.signature.parameters.values()]
        got = [(p.name, p.kind, p.default) for p in inspect.signature(fn).parameters.values()]
        if expected != got:
            raise TypeError(
                f"{provider} provider of op {target.name!r} on {device}: parameters differ from the reference: "
                f"expected {target.signature}, got {inspect.signature(fn)}"
            )
        if any(i.provider == provider and i.device_kind == device for i in target.impls):
            raise ValueError(
                f"{provider} provider of op {target.name!r} on {device} is registered twice"
            )
        target.impls.append(Impl(provider, device, fn, accepts))
        return fn

    return register


def by_parts(
    target: Op[P, R], *parts: Op[..., Any]
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Make `target` a fused op: the function gets a namespace of its bound parts by name, then the op's own arguments.

    Beside the parts it may use plain torch functions that every device has.
    """

    def register(fn: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        target.parts, target.run_by_parts = parts, fn
        return fn

    return register


def all_ops() -> "dict[str, Op[..., object]]":
    """Every declared op by name (a copy)."""
    load_reference_ops()
    return dict(sorted(_OPS.items()))


def load_reference_ops() -> None:
    """Import every module below `xgr_runtime.hal.ops`, so that the registry is complete."""
    from importlib import import_module  # noqa: PLC0415 - the op modules import this one
    from pkgutil import iter_modules  # noqa: PLC0415

    package = import_module("xgr_runtime.hal.ops")
    for module in iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")


def _in_order(impls: "list[Impl[P, R]]") -> "list[Impl[P, R]]":
    """By the order of their modules in `PROVIDER_MODULES`, whichever happened to be imported first.

    In front of them whatever somebody registers beside the list, in his own order: he wants it to be used.
    """
    places = {
        module: place
        for modules in PROVIDER_MODULES.values()
        for place, module in enumerate(modules)
    }
    return sorted(impls, key=lambda found: places.get(found.fn.__module__, -1))


def explain(
    target: Op[P, R], spec: OpSpec, *, allow_reference: bool
) -> tuple[Binding[P, R] | None, tuple[Refusal, ...]]:
    """The binding `resolve` would make (or None), and the refusals on the way, unloadable modules included."""
    refusals = [Refusal(f.module, f.reason, True) for f in load_providers(spec.device_kind)]
    for candidate in _in_order(target.impls):
        if candidate.device_kind != spec.device_kind:
            refusals.append(
                Refusal(
                    candidate.provider, f"is for {candidate.device_kind}, not {spec.device_kind}"
                )
            )
            continue
        reason = candidate.accepts(spec)
        if reason is None:
            return Binding(target.name, candidate.provider, candidate.fn, tuple(refusals)), tuple(
                refusals
            )
        refusals.append(Refusal(candidate.provider, reason))
    if target.run_by_parts is not None:
        bound, missing = bind_parts(target, spec, allow_reference=allow_reference)
        if not missing:
            fn = partial(target.run_by_parts, bound)
            return Binding(target.name, PARTS, fn, tuple(refusals)), tuple(refusals)
        refusals.append(Refusal(PARTS, why_no_parts(missing)))
    if spec.device_kind == "cpu" or allow_reference:
        return Binding(target.name, REFERENCE, target.reference, tuple(refusals)), tuple(refusals)
    refusals.append(
        Refusal(
            REFERENCE,
            f"is not allowed on {spec.device_kind}; set ops.allow_reference: true to accept it",
        )
    )
    return None, tuple(refusals)


def bind_parts(
    target: Op[P, R], spec: OpSpec, *, allow_reference: bool
) -> tuple[SimpleNamespace, list[str]]:
    """The functions of a fused op's parts by name, and the names of parts that nobody provides."""
    bound, missing = SimpleNamespace(), []
    for part in target.parts:
        binding, _ = explain(part, spec, allow_reference=allow_reference)
        if binding is None:
            missing.append(part.name)
        else:
            setattr(bound, part.name, binding.fn)
    return bound, missing


def why_no_parts(missing: Sequence[str]) -> str:
    """The refusal of a fused op whose parts of these names nobody provides."""
    return f"no provider of {', '.join(missing)}"


def resolve(target: Op[P, R], spec: OpSpec, *, allow_reference: bool) -> Binding[P, R]:
    """Bind `target` for `spec`: the first provider that accepts, in the order of their modules, then its parts, then the
    reference.

    Raises OpUnavailable with every provider's reason.
    """
    binding, refusals = explain(target, spec, allow_reference=allow_reference)
    if binding is None:
        reasons = "".join(f"\n  {r.provider}: {r.reason}" for r in refusals)
        raise OpUnavailable(f"op {target.name!r} has no provider on {spec.device_kind}:{reasons}")
    return binding
