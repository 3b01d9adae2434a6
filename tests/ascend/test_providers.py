"""The Ascend providers on the CPU against the references, under the rules of a captured segment, and what they refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.ascend.providers import copied, fill, providers, tensors_of
from tests.helpers.strict_device import RuleBroken, StrictDevice
from xgr_runtime.conformance.comparison import call, compare, expected_results, native_dtypes
from xgr_runtime.conformance.op_cases import GENERATORS
from xgr_runtime.hal.registry import OpSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.conformance.op_case import OpCase

F32 = torch.float32
DTYPES = (F32, torch.float16, torch.bfloat16)
NAMES = (
    "add_rms_norm",
    "children_logsumexp",
    "flag_failed_searches",
    "head_logsumexp",
    "level_logsumexp",
    "reorder_unshared_kv",
    "rms_norm",
    "rotary_embedding",
    "select_beams",
    "silu_mul",
    "write_shared_kv",
    "write_unshared_kv",
)
A2 = "Ascend910B2"


def test_one_provider_for_each_of_these_ops() -> None:
    assert tuple(sorted(providers())) == NAMES
    calls_vendor = {name for name, (_, found) in providers().items() if is_vendors(found.provider)}
    assert calls_vendor == {
        "add_rms_norm",
        "reorder_unshared_kv",
        "rms_norm",
        "rotary_embedding",
        "silu_mul",
        "write_shared_kv",
        "write_unshared_kv",
    }


def is_vendors(provider: str) -> bool:
    assert provider in ("torch_npu", "aten"), provider
    return provider == "torch_npu"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_parity(name: str, dtype: torch.dtype) -> None:
    op, found = providers()[name]
    native = native_dtypes(op, GENERATORS[name], dtype)
    num_cases = 0
    for case in GENERATORS[name](dtype):
        assert found.accepts(OpSpec("npu", dtype, A2, case.dims)) is None, case.label
        expected = expected_results(op, case)
        got = call(found.fn, case, copied(case.args))
        assert got.keys() == expected.keys()
        for key, tensor in got.items():
            compare(tensor, expected[key], case, dtype, native[key])
        num_cases += 1
    assert num_cases >= 4


def smallest_and_largest(cases: list[OpCase]) -> list[OpCase]:
    sizes = [sum(t.numel() for t in tensors_of(case.args)) for case in cases]
    return [cases[sizes.index(min(sizes))], cases[sizes.index(max(sizes))]]


@pytest.mark.parametrize("name", NAMES)
def test_captured_and_replayed_without_a_host_read(name: str) -> None:
    """The replay starts from the same buffers, filled again, and has to run the same ops with the same constants."""
    op, found = providers()[name]
    native = native_dtypes(op, GENERATORS[name], F32)
    for case in smallest_and_largest(list(GENERATORS[name](F32))):
        args = copied(case.args)
        results: list[Any] = []
        graph = StrictDevice().capture(name, recording(found.fn, args, results))
        assert graph.num_ops > 0
        fill(args, case.args)
        graph.replay()
        expected = expected_results(op, case)
        for key, tensor in case.view(args, results[-1]).items():
            compare(tensor, expected[key], case, F32, native[key])


def recording(
    fn: Callable[..., Any], args: dict[str, Any], results: list[Any]
) -> Callable[[], None]:
    def call() -> None:
        results.append(fn(**args))

    return call


def test_the_strict_device_does_refuse_what_these_tests_look_for() -> None:
    lengths = torch.tensor([1, 2])
    with pytest.raises(RuleBroken, match="reads on the host"):
        StrictDevice().capture("read", lambda: lengths.tolist())
    with pytest.raises(RuleBroken, match="depends on data"):
        StrictDevice().capture("mask", lambda: lengths[lengths > 1])


# what is refused


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_of_which_nothing_is_known_is_accepted(name: str) -> None:
    for dtype in DTYPES:
        assert providers()[name][1].accepts(OpSpec("npu", dtype)) is None


@pytest.mark.parametrize("capability", ["Ascend910B1", "Ascend910B4-1", "Ascend910_9391"])
@pytest.mark.parametrize("name", NAMES)
def test_atlas_a2_and_a3_are_accepted(name: str, capability: str) -> None:
    assert providers()[name][1].accepts(OpSpec("npu", torch.bfloat16, capability)) is None


@pytest.mark.parametrize(
    ("name", "spec", "reason"),
    [
        ("rms_norm", OpSpec("npu", torch.float64, A2), "npu_rms_norm takes torch.float32"),
        ("add_rms_norm", OpSpec("npu", torch.int8, A2), "npu_add_rms_norm takes torch.float32"),
        ("head_logsumexp", OpSpec("npu", torch.float64, A2), "head_logsumexp takes torch.float32"),
        ("silu_mul", OpSpec("npu", torch.float16, "Ascend310P3"), "got Ascend310P3"),
        ("rotary_embedding", OpSpec("npu", torch.float16, "Ascend910ProB"), "got Ascend910ProB"),
        ("rotary_embedding", OpSpec("npu", torch.float16, A2, {"D": 896}), "D must be below 896"),
        ("rotary_embedding", OpSpec("npu", torch.float16, A2, {"D": 63}), "D must be even, got 63"),
        ("rotary_embedding", OpSpec("npu", torch.float16, A2, {"Q": 1000}), "Q must be below 1000"),
        ("rotary_embedding", OpSpec("npu", torch.float16, A2, {"G": 1000}), "G must be below 1000"),
        ("write_shared_kv", OpSpec("npu", torch.bfloat16, "Ascend310P3"), "bfloat16 on Atlas A2"),
        ("write_unshared_kv", OpSpec("npu", torch.float64, A2), "npu_scatter_nd_update_ takes"),
        ("reorder_unshared_kv", OpSpec("npu", torch.float16, "Ascend310P3"), "sort in fp32"),
        ("select_beams", OpSpec("npu", torch.float16, "Ascend910A"), "round fp32 to fp16"),
        ("select_beams", OpSpec("npu", torch.float16, A2, {"N": 1 << 24}), "N must be below"),
        ("reorder_unshared_kv", OpSpec("npu", torch.float16, A2, {"N": 1 << 24}), "N must be"),
    ],
)
def test_refusals_have_a_reason(name: str, spec: OpSpec, reason: str) -> None:
    assert reason in str(providers()[name][1].accepts(spec))


def test_fp16_caches_are_written_on_any_device() -> None:
    spec = OpSpec("npu", torch.float16, "Ascend310P3")
    assert providers()["write_shared_kv"][1].accepts(spec) is None
