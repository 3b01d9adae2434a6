"""The Ascend providers on the CPU against the references, under the rules of a captured segment, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ascend.providers import copied, fill, providers, tensors_of
from tests.helpers.strict_device import RuleBroken, StrictDevice
from xgr_runtime.conformance.comparison import call, compare, expected_results, native_dtypes
from xgr_runtime.conformance.op_cases import GENERATORS
from xgr_runtime.hal.ops.activation import silu_mul
from xgr_runtime.hal.registry import OpSpec, all_ops, impl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.ascend.providers import Key
    from xgr_runtime.conformance.op_case import OpCase
    from xgr_runtime.hal.registry import Impl

F32 = torch.float32
DTYPES = (F32, torch.float16, torch.bfloat16)
A2 = "Ascend910B2"
# Prefill takes its lengths from the host and runs outside graphs.
EAGER = ("prefill_attention",)
KEYS = sorted(providers())
# In half precision the vendor's attention refuses head sizes and pages that these ops are asked for elsewhere.
FUSED = ("prefill_attention", "shared_attention", "unshared_attention", "merge_attention_states")
REFUSED_SOMEWHERE = (*FUSED, "beam_attention")


def named(key: Key) -> str:
    return "-".join(key)


every_provider = pytest.mark.parametrize("key", KEYS, ids=named)


def accepted(key: Key, dtype: torch.dtype) -> list[OpCase]:
    """The cases of the op that the provider takes on an Atlas A2."""
    name, _ = key
    _, found = providers()[key]
    return [
        case
        for case in GENERATORS[name](dtype)
        if found.accepts(OpSpec("npu", dtype, A2, case.dims)) is None
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(all_ops()))
def test_every_case_is_served(name: str, dtype: torch.dtype) -> None:
    specs = [OpSpec("npu", dtype, A2, case.dims) for case in GENERATORS[name](dtype)]
    served = [is_served(name, spec) for spec in specs]
    assert any(served) if name in REFUSED_SOMEWHERE and dtype != F32 else all(served)


def is_served(name: str, spec: OpSpec) -> bool:
    """By a provider, or a fused op by those of its parts."""
    op = all_ops()[name]
    if op.run_by_parts is not None:
        return all(is_served(part.name, spec) for part in op.parts)
    asked = [found for key, (_, found) in providers().items() if key[0] == name]
    return any(found.accepts(spec) is None for found in asked)


@pytest.mark.parametrize("dtype", DTYPES)
@every_provider
def test_parity(key: Key, dtype: torch.dtype) -> None:
    """A dtype is taken for some sizes or refused whatever the sizes are."""
    op, found = providers()[key]
    cases = accepted(key, dtype)
    assert bool(cases) == (found.accepts(OpSpec("npu", dtype, A2)) is None)
    native = native_dtypes(op, GENERATORS[op.name], dtype)
    for case in cases:
        expected = expected_results(op, case)
        got = call(found.fn, case, copied(case.args))
        assert got.keys() == expected.keys()
        for result, tensor in got.items():
            compare(tensor, expected[result], case, dtype, native[result])


def smallest_and_largest(cases: list[OpCase]) -> list[OpCase]:
    sizes = [sum(t.numel() for t in tensors_of(case.args)) for case in cases]
    return [cases[sizes.index(min(sizes))], cases[sizes.index(max(sizes))]]


class Called(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of the ops that ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def check_captured(key: Key) -> set[str]:
    """The provider captured and replayed; returns the ops it ran.

    The replay starts from the same buffers, filled again, and has to run the same ops with the same constants.
    """
    op, found = providers()[key]
    dtype = next(dtype for dtype in DTYPES if accepted(key, dtype))
    native = native_dtypes(op, GENERATORS[op.name], dtype)
    called = Called()
    for case in smallest_and_largest(accepted(key, dtype)):
        args = copied(case.args)
        results: list[Any] = []
        graph = StrictDevice().capture(op.name, recording(found.fn, args, results, called))
        assert graph.num_ops > 0
        fill(args, case.args)
        graph.replay()
        expected = expected_results(op, case)
        for result, tensor in case.view(args, results[-1]).items():
            compare(tensor, expected[result], case, dtype, native[result])
    return called.names


def recording(
    fn: Callable[..., Any], args: dict[str, Any], results: list[Any], called: Called
) -> Callable[[], None]:
    def call() -> None:
        with called:
            results.append(fn(**args))

    return call


@pytest.mark.parametrize("key", [key for key in KEYS if key[0] not in EAGER], ids=named)
def test_captured_and_replayed_without_a_host_read(key: Key) -> None:
    is_vendors = any(name.startswith("npu::") for name in check_captured(key))
    assert is_vendors == (key[1] == "torch_npu")


def reads_a_value(gate_up_N2F: torch.Tensor) -> torch.Tensor:
    """Right, yet the host waits for the device."""
    return silu_mul(gate_up_N2F + min(0.0, abs(gate_up_N2F.sum().item())))


def counts_values(gate_up_N2F: torch.Tensor) -> torch.Tensor:
    """Right, yet the number of its indices depends on data."""
    gate_up_N2F.nonzero()
    return silu_mul(gate_up_N2F)


@pytest.mark.parametrize(
    ("fn", "reason"), [(reads_a_value, "reads on the host"), (counts_values, "depends on data")]
)
def test_a_provider_that_is_not_first_in_line_is_checked_too(
    fn: Callable[..., Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silu_mul, "impls", list(silu_mul.impls))
    impl(silu_mul, provider="behind", device="npu")(fn)
    key = ("silu_mul", "behind")
    assert set(providers()) == {*KEYS, key}
    test_parity(key, F32)
    with pytest.raises(RuleBroken, match=reason):
        check_captured(key)


def test_the_strict_device_does_refuse_what_these_tests_look_for() -> None:
    lengths = torch.tensor([1, 2])
    with pytest.raises(RuleBroken, match="reads on the host"):
        StrictDevice().capture("read", lambda: lengths.tolist())
    with pytest.raises(RuleBroken, match="depends on data"):
        StrictDevice().capture("mask", lambda: lengths[lengths > 1])


# what is refused


def taken(key: Key) -> tuple[Impl[..., Any], list[torch.dtype]]:
    """The provider and the dtypes it takes on an Atlas A2."""
    _, found = providers()[key]
    return found, [dtype for dtype in DTYPES if found.accepts(OpSpec("npu", dtype, A2)) is None]


@every_provider
def test_what_is_not_known_is_no_reason(key: Key) -> None:
    found, dtypes = taken(key)
    assert dtypes
    for dtype in dtypes:
        assert found.accepts(OpSpec("npu", dtype)) is None


@pytest.mark.parametrize("capability", ["Ascend910B1", "Ascend910B4-1", "Ascend910_9391"])
@every_provider
def test_atlas_a2_and_a3_are_accepted_alike(key: Key, capability: str) -> None:
    found, dtypes = taken(key)
    for dtype in dtypes:
        assert found.accepts(OpSpec("npu", dtype, capability)) is None


@pytest.mark.parametrize(
    ("key", "spec", "reason"),
    [
        (
            ("rms_norm", "torch_npu"),
            OpSpec("npu", torch.float64, A2),
            "npu_rms_norm takes torch.float32",
        ),
        (
            ("add_rms_norm", "torch_npu"),
            OpSpec("npu", torch.int8, A2),
            "npu_add_rms_norm takes torch.float32",
        ),
        (
            ("head_logsumexp", "aten"),
            OpSpec("npu", torch.float64, A2),
            "head_logsumexp takes torch.float32",
        ),
        (("silu_mul", "torch_npu"), OpSpec("npu", torch.float16, "Ascend310P3"), "got Ascend310P3"),
        (
            ("rotary_embedding", "torch_npu"),
            OpSpec("npu", torch.float16, "Ascend910ProB"),
            "got Ascend910ProB",
        ),
        (
            ("rotary_embedding", "torch_npu"),
            OpSpec("npu", torch.float16, A2, {"D": 896}),
            "D must be below 896",
        ),
        (
            ("rotary_embedding", "torch_npu"),
            OpSpec("npu", torch.float16, A2, {"D": 63}),
            "D must be even, got 63",
        ),
        (
            ("rotary_embedding", "torch_npu"),
            OpSpec("npu", torch.float16, A2, {"Q": 1000}),
            "Q must be below 1000",
        ),
        (
            ("rotary_embedding", "torch_npu"),
            OpSpec("npu", torch.float16, A2, {"G": 1000}),
            "G must be below 1000",
        ),
        (
            ("write_shared_kv", "torch_npu"),
            OpSpec("npu", torch.bfloat16, "Ascend310P3"),
            "bfloat16 on Atlas A2",
        ),
        (
            ("write_unshared_kv", "torch_npu"),
            OpSpec("npu", torch.float64, A2),
            "npu_scatter_nd_update_ takes",
        ),
        (
            ("reorder_unshared_kv", "torch_npu"),
            OpSpec("npu", torch.float16, "Ascend310P3"),
            "sort in fp32",
        ),
        (
            ("select_beams", "aten"),
            OpSpec("npu", torch.float16, "Ascend910A"),
            "round fp32 to fp16",
        ),
        (
            ("select_beams", "aten"),
            OpSpec("npu", torch.float16, A2, {"N": 1 << 24}),
            "N must be below",
        ),
        (
            ("reorder_unshared_kv", "torch_npu"),
            OpSpec("npu", torch.float16, A2, {"N": 1 << 24}),
            "N must be",
        ),
    ],
)
def test_refusals_have_a_reason(key: Key, spec: OpSpec, reason: str) -> None:
    assert reason in str(providers()[key][1].accepts(spec))


def test_fp16_caches_are_written_on_any_device() -> None:
    spec = OpSpec("npu", torch.float16, "Ascend310P3")
    assert providers()["write_shared_kv", "torch_npu"][1].accepts(spec) is None
