"""Every op has a provider on an Ascend NPU without a reference, named here when one is missing; no card is needed.

A fused op needs none where each of its parts has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from xgr_runtime.hal.providers import PROVIDER_MODULES, load_providers
from xgr_runtime.hal.registry import PARTS, REFERENCE, Op, OpSpec, all_ops, explain, impl

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
A2 = "Ascend910B2"
# Triton need not be installed: what it provides is bound only where the vendor's ops are refused.
OPTIONAL_MODULES = {"xgr_ops.ascend.triton_kernels"}
STOCK = ("torch_npu", "aten")
FUSED = {name for name, op in all_ops().items() if op.run_by_parts is not None}


def without_provider(ops: Mapping[str, Op[..., Any]], spec: OpSpec) -> dict[str, list[str]]:
    """The ops that nobody would serve, each with the reasons of those that were asked."""
    missing = {}
    for name, op in ops.items():
        binding, refusals = explain(op, spec, allow_reference=False)
        if binding is None:
            missing[name] = [f"{r.provider}: {r.reason}" for r in refusals if not r.is_load_failure]
    return missing


def test_every_provider_module_loads_without_torch_npu() -> None:
    assert {failure.module for failure in load_providers("npu")} <= OPTIONAL_MODULES
    assert set(PROVIDER_MODULES["npu"]) > OPTIONAL_MODULES


@pytest.mark.parametrize("name", list(all_ops()))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_has_a_provider(name: str, dtype: torch.dtype) -> None:
    missing = without_provider({name: all_ops()[name]}, OpSpec("npu", dtype, A2))
    assert not missing, f"no Ascend provider: {missing}"


def who_serves(name: str, capability: str) -> str:
    spec = OpSpec("npu", torch.bfloat16, capability)
    binding, _ = explain(all_ops()[name], spec, allow_reference=False)
    return binding.provider if binding else ""


@pytest.mark.parametrize("name", sorted(all_ops().keys() - FUSED))
@pytest.mark.parametrize("capability", [A2, "Ascend910_9391"])
def test_the_op_is_served_by_stock_ops(name: str, capability: str) -> None:
    """Not by Triton, which has to be installed, on an Atlas A2 as on an A3."""
    assert who_serves(name, capability) in STOCK


@pytest.mark.parametrize("name", sorted(FUSED))
@pytest.mark.parametrize("capability", [A2, "Ascend910_9391"])
def test_a_fused_op_is_served_by_stock_ops_or_by_parts_that_are(name: str, capability: str) -> None:
    for part in all_ops()[name].parts:
        # a part that is fused itself is asked for as such; one without parts is made of plain torch functions
        assert who_serves(part.name, capability) in (
            STOCK if part.name not in FUSED else (*STOCK, PARTS)
        )
    assert who_serves(name, capability) in (*STOCK, PARTS)


def test_an_op_that_nobody_provides_is_named() -> None:
    def fresh(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    ops = {"fresh": Op(fresh)}
    spec = OpSpec("npu", torch.float16, A2)
    assert list(without_provider(ops, spec)) == ["fresh"]
    reasons = without_provider(ops, spec)["fresh"]
    assert any(f"{REFERENCE}: is not allowed on npu" in reason for reason in reasons)

    impl(ops["fresh"], provider="aten", device="npu", accepts=lambda _: "not today")(fresh)
    assert "aten: not today" in without_provider(ops, spec)["fresh"]
    impl(ops["fresh"], provider="torch_npu", device="npu")(fresh)
    assert not without_provider(ops, spec)
