"""The registry: one signature per op, reasons for every refusal, no silent fallback."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import xgr_ops

from xgr_runtime.errors import OpUnavailable
from xgr_runtime.hal import providers, registry
from xgr_runtime.hal.discovery import DEVICE_KINDS
from xgr_runtime.hal.providers import PROVIDER_MODULES
from xgr_runtime.hal.registry import Op, OpSpec, all_ops, by_parts, explain, impl, resolve

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Iterator


def scale_reference(x: int, factor: int = 2) -> int:
    return x * factor


@pytest.fixture
def scale() -> Op[[int, int], int]:
    """An op that no other test knows."""
    return Op(scale_reference)


@pytest.fixture
def fake_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str, tuple[str, ...]], None]]:
    """Names the provider modules of a kind of device for one test."""

    def name_modules(kind: str, modules: tuple[str, ...]) -> None:
        monkeypatch.setitem(providers.PROVIDER_MODULES, kind, modules)

    providers.load_providers.cache_clear()
    yield name_modules
    providers.load_providers.cache_clear()


def spec(kind: str = "cuda", **dims: int) -> OpSpec:
    return OpSpec(kind, torch.float32, "sm_90", dims)


def refuse(reason: str) -> Callable[[OpSpec], str | None]:
    return lambda spec: reason


def test_calling_an_op_runs_its_reference(scale: Op[[int, int], int]) -> None:
    assert scale(3, 4) == 12
    assert scale.name == "scale_reference"


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x,
        lambda x, factor: x,
        lambda x, factor=3: x,
        lambda y, factor=2: y,
        lambda x, factor=2, extra=0: x,
        lambda *, x, factor=2: x,
    ],
    ids=["missing", "no default", "another default", "another name", "one more", "keyword only"],
)
def test_a_differing_signature_raises(scale: Op[[int, int], int], fn: Callable[..., int]) -> None:
    with pytest.raises(TypeError, match="parameters differ from the reference"):
        impl(scale, provider="wrong", device="cuda")(fn)
    assert not scale.impls


def test_a_provider_registers_once(scale: Op[[int, int], int]) -> None:
    impl(scale, provider="fast", device="cuda")(scale_reference)
    impl(scale, provider="fast", device="cpu")(scale_reference)
    with pytest.raises(ValueError, match="registered twice"):
        impl(scale, provider="fast", device="cuda")(scale_reference)


def test_the_first_that_accepts_is_bound(
    scale: Op[[int, int], int], fake_modules: Callable[[str, tuple[str, ...]], None]
) -> None:
    fake_modules("cuda", ())

    def sum_up(x: int, factor: int = 2) -> int:
        return sum(x for _ in range(factor))

    impl(scale, provider="small", device="cuda", accepts=refuse("N is too large"))(scale_reference)
    impl(scale, provider="adding", device="cuda")(sum_up)
    impl(scale, provider="late", device="cuda")(scale_reference)
    binding = resolve(scale, spec(), allow_reference=False)
    assert (binding.provider, binding.op_name) == ("adding", "scale_reference")
    assert binding.fn is sum_up
    assert [(r.provider, r.reason) for r in binding.refusals] == [("small", "N is too large")]


def test_refusals_carry_every_reason(
    scale: Op[[int, int], int], fake_modules: Callable[[str, tuple[str, ...]], None]
) -> None:
    fake_modules("cuda", ("no_such_package.beam",))
    impl(scale, provider="tiny", device="cuda", accepts=refuse("D must be 64, got 80"))(
        scale_reference
    )
    impl(scale, provider="numpy", device="cpu")(scale_reference)
    with pytest.raises(OpUnavailable) as caught:
        resolve(scale, spec(), allow_reference=False)
    text = str(caught.value)
    for part in (
        "'scale_reference' has no provider on cuda",
        "no_such_package.beam: could not be imported: No module named 'no_such_package'",
        "tiny: D must be 64, got 80",
        "numpy: is for cpu, not cuda",
        "reference: is not allowed on cuda; set ops.allow_reference: true to accept it",
    ):
        assert part in text


def test_the_reference_on_an_accelerator_only_when_allowed(scale: Op[[int, int], int]) -> None:
    assert explain(scale, spec("cuda"), allow_reference=False)[0] is None
    binding = resolve(scale, spec("cuda"), allow_reference=True)
    assert binding.provider == "reference"
    assert binding.fn is scale.reference


def test_on_the_cpu_the_reference_needs_no_permission(scale: Op[[int, int], int]) -> None:
    assert resolve(scale, spec("cpu"), allow_reference=False).provider == "reference"


def test_accepts_sees_the_spec(scale: Op[[int, int], int]) -> None:
    seen: list[OpSpec] = []

    def note(spec: OpSpec) -> str | None:
        seen.append(spec)
        return None

    impl(scale, provider="noting", device="cuda", accepts=note)(scale_reference)
    resolve(scale, spec(N=7), allow_reference=False)
    assert (seen[0].dims["N"], seen[0].capability, seen[0].dtype) == (7, "sm_90", torch.float32)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ImportError("no driver"), "no driver"),
        (OSError("libx.so: not found"), "libx.so: not found"),
    ],
)
def test_an_unloadable_module_is_a_reason(
    fake_modules: Callable[[str, tuple[str, ...]], None],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    reason: str,
) -> None:
    def import_module(name: str) -> types.ModuleType:
        raise error

    fake_modules("cuda", ("xgr_ops.cuda.beam",))
    monkeypatch.setattr(providers, "import_module", import_module)
    assert [(f.module, f.reason) for f in providers.load_providers("cuda")] == [
        ("xgr_ops.cuda.beam", f"could not be imported: {reason}")
    ]


def test_a_defect_in_a_module_is_no_reason(
    fake_modules: Callable[[str, tuple[str, ...]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> types.ModuleType:
        raise ZeroDivisionError

    fake_modules("cuda", ("xgr_ops.cuda.beam",))
    monkeypatch.setattr(providers, "import_module", import_module)
    with pytest.raises(ZeroDivisionError):
        providers.load_providers("cuda")


def test_an_op_is_declared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_OPS", {})
    registry.op(scale_reference)
    with pytest.raises(ValueError, match="declared twice"):
        registry.op(scale_reference)


def test_the_listed_order_of_modules_decides_not_that_of_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = Op(scale_reference)
    for name in ("second", "first", "unlisted"):

        def scaled(x: int, factor: int = 2) -> int:
            return x * factor

        scaled.__module__ = f"xgr_ops.test.{name}"
        impl(op, provider=name, device="cpu")(scaled)
    listed = {
        "cuda": ("xgr_ops.test.unlisted_here",),
        "cpu": ("xgr_ops.test.first", "xgr_ops.test.second"),
    }
    monkeypatch.setattr(registry, "PROVIDER_MODULES", listed)
    monkeypatch.setattr(registry, "load_providers", lambda kind: ())
    for expected in ("unlisted", "first", "second"):
        binding = resolve(op, OpSpec("cpu", torch.float32), allow_reference=True)
        assert binding.provider == expected
        op.impls[:] = [i for i in op.impls if i.provider != expected]


class Fused:
    """An op of two parts, as `by_parts` makes it: x -> (x * 2) + 1; each call notes who ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

        def double(x: int) -> int:
            self.ran.append("reference of double")
            return x * 2

        def increment(x: int) -> int:
            self.ran.append("reference of increment")
            return x + 1

        def double_increment(x: int) -> int:
            self.ran.append("reference")
            return x * 2 + 1

        self.double, self.increment = Op(double), Op(increment)
        self.op = Op(double_increment)

        @by_parts(self.op, self.double, self.increment)
        def run(parts: Any, x: int) -> int:
            self.ran.append("parts")
            result: int = parts.increment(parts.double(x))
            return result

    def provide(self, op: Op[[int], int], accepts: Callable[[OpSpec], str | None]) -> None:
        def provided(x: int) -> int:
            self.ran.append(f"fast {op.name}")
            return op.reference(x)

        impl(op, provider="fast", device="cuda", accepts=accepts)(provided)

    def run(self, spec: OpSpec, *, allow_reference: bool = False) -> tuple[str, list[str]]:
        """Who is bound, and what ran in order, of one call."""
        binding = resolve(self.op, spec, allow_reference=allow_reference)
        self.ran.clear()
        assert binding.fn(3) == 7
        return binding.provider, list(self.ran)


@pytest.fixture
def fused(fake_modules: Callable[[str, tuple[str, ...]], None]) -> Fused:
    fake_modules("cuda", ())
    return Fused()


def only_at(size: int) -> Callable[[OpSpec], str | None]:
    return lambda spec: None if spec.dims.get("N", size) == size else f"N must be {size}"


def test_a_fused_op_is_bound_to_a_provider_then_to_its_parts_then_to_its_reference(
    fused: Fused,
) -> None:
    fused.provide(fused.op, only_at(1))
    fused.provide(fused.double, only_at(2))
    fused.provide(fused.increment, only_at(2))
    own, parts = ["fast double_increment", "reference"], ["parts"]
    for part in ("double", "increment"):
        parts += [f"fast {part}", f"reference of {part}"]
    assert fused.run(spec(N=1)) == ("fast", own)
    assert fused.run(spec(N=2)) == (registry.PARTS, parts)
    binding = resolve(fused.op, spec(N=2), allow_reference=False)
    assert [(r.provider, r.reason) for r in binding.refusals] == [("fast", "N must be 1")]


def test_parts_that_nobody_provides_are_named(fused: Fused) -> None:
    fused.provide(fused.double, only_at(2))
    with pytest.raises(OpUnavailable) as caught:
        resolve(fused.op, spec(N=2), allow_reference=False)
    assert "\n  parts: no provider of increment\n  reference: is not allowed" in str(caught.value)
    _, refusals = explain(fused.op, spec(N=3), allow_reference=False)
    assert refusals[0] == registry.Refusal(registry.PARTS, "no provider of double, increment")


def test_a_reference_is_among_the_parts_only_where_it_is_allowed(fused: Fused) -> None:
    """There the part counts as an op that runs on its reference, since each part is bound as an op of its own too."""
    fused.provide(fused.double, lambda _: None)
    mixed = ["parts", "fast double", "reference of double", "reference of increment"]
    assert fused.run(spec(), allow_reference=True) == (registry.PARTS, mixed)
    assert resolve(fused.increment, spec(), allow_reference=True).provider == registry.REFERENCE
    assert explain(fused.op, spec(), allow_reference=False)[0] is None


def test_on_the_cpu_the_parts_come_before_the_reference(fused: Fused) -> None:
    parts = ["parts", "reference of double", "reference of increment"]
    assert fused.run(spec("cpu")) == (registry.PARTS, parts)


def test_the_parts_of_every_fused_op_are_ops_that_are_bound_beside_it() -> None:
    ops = all_ops()
    for op in ops.values():
        assert all(ops[part.name] is part for part in op.parts)
        assert op.run_by_parts is not None or not op.parts
        if op.run_by_parts is not None:
            _, *own = inspect.signature(op.run_by_parts).parameters.values()
            assert own == list(op.signature.parameters.values()), op.name


def test_the_contract_names() -> None:
    assert set(all_ops()) == {
        "copy_page_starts",
        "add_rms_norm",
        "beam_attention",
        "children_logsumexp",
        "embedding_rms_norm_cos_sin",
        "flag_failed_searches",
        "flagged_level_logsumexp",
        "head_logits",
        "head_logsumexp",
        "level_logsumexp",
        "linear",
        "linear_add_rms_norm",
        "linear_rope_write_shared_kv",
        "linear_rope_write_unshared_kv",
        "linear_silu_mul",
        "merge_attention_states",
        "prefill_attention",
        "reorder_unshared_kv",
        "rms_norm",
        "rope_write_shared_kv",
        "rope_write_unshared_kv",
        "rotary_embedding",
        "select_beams",
        "shared_attention",
        "silu_mul",
        "stream_linear_rope_write_shared_kv",
        "stream_linear_rope_write_unshared_kv",
        "stream_linear_silu_mul",
        "unshared_attention",
        "write_shared_kv",
        "write_unshared_kv",
    }
    assert all(op.__doc__ for op in all_ops().values())


def test_all_ops_is_a_copy() -> None:
    names = set(all_ops())
    all_ops().clear()
    assert set(all_ops()) == names


def test_providers_of_the_cpu_load() -> None:
    assert providers.load_providers("cpu") == ()
    assert "xgr_ops.cpu.beam" in sys.modules


def test_every_module_with_a_provider_is_listed() -> None:
    """A module that nobody imports provides nothing, and nothing would say so."""
    folder = Path(xgr_ops.__path__[0])
    found = {
        "xgr_ops." + ".".join(file.relative_to(folder).with_suffix("").parts)
        for file in folder.rglob("*.py")
        if re.search(r"^@impl\(", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    listed = [module for modules in PROVIDER_MODULES.values() for module in modules]
    assert found
    assert found == set(listed)
    # Without it a folder is found in a checkout and missing from the wheel.
    assert all((folder / module.split(".")[1] / "__init__.py").is_file() for module in found)


def test_providers_are_for_kinds_that_exist() -> None:
    assert set(PROVIDER_MODULES) <= set(DEVICE_KINDS)
    for kind in PROVIDER_MODULES:
        providers.load_providers(kind)
    kinds = {i.device_kind for op in all_ops().values() for i in op.impls}
    assert kinds <= set(DEVICE_KINDS), kinds


def test_a_size_that_nobody_passes_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown sizes W; known: T, N, H, max_q"):
        OpSpec("cpu", torch.float32, dims={"N": 1, "W": 3})
