"""The table of ops/ascend/README.md against the registry and the sources of the providers.

What the ladder executed is compared with it by the ladder.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch

from tools._ladder import readme
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec, all_ops, explain

if TYPE_CHECKING:
    from pathlib import Path

CARD = "Ascend910B2"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EXPERIMENTAL, OTHER_SIZES = "experimental", "other sizes"


def expected_first_for(op_name: str, provider: str) -> str:
    """The dtypes for which a provider is bound on a card when no size speaks against it, or what it is for."""
    names = []
    for name, dtype in DTYPES.items():
        spec = OpSpec("npu", dtype, CARD)
        binding, _ = explain(all_ops()[op_name], spec, allow_reference=False)
        if binding is not None and binding.provider == provider:
            names.append(name)
    return ", ".join(names) or (EXPERIMENTAL if provider == "triton" else OTHER_SIZES)


def test_there_is_a_row_for_every_provider_of_every_op() -> None:
    registered = readme.registrations()
    assert readme.mistaken_rows(readme.read_rows(), registered) == []
    needed = {name for name, op in all_ops().items() if op.run_by_parts is None}
    assert needed <= {op for op, _ in registered} <= set(all_ops())


def test_a_row_that_is_missing_left_over_or_twice_there_is_named() -> None:
    rows = [row for row in readme.read_rows() if row.op in ("rms_norm", "silu_mul")]
    pairs = [row.pair for row in rows]
    assert readme.mistaken_rows(rows, pairs) == []
    assert readme.mistaken_rows(rows, [*pairs, ("silu_mul", "aten")]) == [
        "no row for aten of silu_mul in ops/ascend/README.md"
    ]
    assert readme.mistaken_rows(rows, [("silu_mul", "torch_npu")]) == [
        "a row without a provider: torch_npu of rms_norm in ops/ascend/README.md"
    ]
    assert readme.mistaken_rows([*rows, rows[0]], pairs) == [
        "two rows for torch_npu of rms_norm in ops/ascend/README.md"
    ]


def test_the_sources_register_what_the_registry_holds() -> None:
    failures = [f for f in load_providers("npu") if "No module named 'triton'" not in f.reason]
    assert not failures
    held = {
        (name, i.provider)
        for name, op in all_ops().items()
        for i in op.impls
        if i.device_kind == "npu"
    }
    triton = {pair for pair in readme.registrations() if pair[1] == "triton"}
    assert set(readme.registrations()) == held | triton


@pytest.mark.parametrize("row", readme.read_rows(), ids=lambda row: f"{row.op}-{row.provider}")
def test_a_row_says_what_serves_and_what_was_checked(row: readme.Row) -> None:
    assert row.first_for == expected_first_for(row.op, row.provider)
    assert (row.first_for == EXPERIMENTAL) == (row.provider == "triton")
    assert set(row.rungs) & {"L2", "L3", "L4"}
    assert row.made_of
    assert row.ran_on == "not run on hardware"


def test_the_vendor_ops_of_the_table_are_those_that_the_sources_call() -> None:
    named = set(re.findall(r"npu_\w+", " ".join(row.made_of for row in readme.read_rows())))
    texts = (path.read_text(encoding="utf-8") for path in readme.PROVIDERS.glob("*.py"))
    assert named == readme.vendor_ops(texts)
    for row in readme.read_rows():
        assert ("npu_" in row.made_of) == (row.provider == "torch_npu"), row.pair


def test_what_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)", readme.README.read_text(encoding="utf-8"))
    assert "FIRST_DAY.md" in links
    assert [link for link in links if not (readme.README.parent / link).is_file()] == []


def test_a_table_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    head = (
        "| op | provider | first for | made of | checked at | ran on |\n|---|---|---|---|---|---|\n"
    )
    path.write_text(
        f"x\n{head}| `norm` | aten | bf16 | sums | L2 L3 | a card |\n\n| a | b |\n", "utf-8"
    )
    assert readme.read_rows(path) == [
        readme.Row("norm", "aten", "bf16", "sums", ("L2", "L3"), "a card")
    ]
    path.write_text(f"{head}| norm | aten | bf16 | sums | L2 L9 | a card |\n", "utf-8")
    with pytest.raises(ValueError, match="unknown rung 'L9'; known: L0, L1"):
        readme.read_rows(path)
    path.write_text("no table\n", "utf-8")
    with pytest.raises(ValueError, match="has no table with the columns op, provider"):
        readme.read_rows(path)


def test_registrations_are_found_in_sources(tmp_path: Path) -> None:
    (tmp_path / "norm.py").write_text(
        '@impl(norm, provider="aten", device="npu", accepts=f)\ndef g(): ...\n'
        '@impl(norm, provider="cutlass", device="cuda")\ndef h(): ...\n',
        "utf-8",
    )
    assert readme.registrations(tmp_path) == [("norm", "aten")]
