"""The script for NVIDIA's checkers: what it says where there is no GPU, and that it runs and judges providers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tools import cuda_sanitize
from xgr_runtime.conformance.op_cases import GENERATORS
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.registry import Impl, all_ops

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "tools/cuda_sanitize.py"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=hidden, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("cuda_sanitize: needs a CUDA device: ")


class NamedGpu(CpuDevice):
    """The CPU under the name that the providers of a GPU have."""

    kind = "cuda"


@pytest.mark.parametrize(
    ("change", "is_right"), [(lambda x: x, True), (lambda x: x + 1, False)], ids=["right", "wrong"]
)
def test_providers_of_a_gpu_run_on_small_cases(
    change: Callable[[Any], Any],
    is_right: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    op = all_ops()["silu_mul"]

    def provided(gate_up_N2F: torch.Tensor) -> torch.Tensor:
        return change(op.reference(gate_up_N2F))  # type: ignore[no-any-return]

    monkeypatch.setattr(op, "impls", [Impl("fast", "cuda", provided, lambda _: None)])
    failures = cuda_sanitize.run_op(op, torch.float32, NamedGpu(), 2)
    assert capsys.readouterr().out == "silu_mul by fast, float32: 2 cases ran, 0 refused\n"
    assert bool(failures) != is_right
    assert all(line.startswith("silu_mul by fast, float32, ") for line in failures)


def test_cases_are_chosen_among_those_that_a_provider_takes() -> None:
    """It takes the widest alone, which no sample of all cases would be sure to hold; large ones only where nothing is small."""
    op, dtype = all_ops()["rms_norm"], torch.float32
    widest = max(case.dims["M"] for case in GENERATORS[op.name](dtype))
    found = Impl(
        "wide", "cuda", op.reference, lambda s: None if s.dims["M"] == widest else "narrow"
    )
    chosen = cuda_sanitize.chosen_cases(op, found, dtype, NamedGpu(), 1)
    assert [case.dims["M"] for case in chosen] == [widest]


def test_a_provider_that_takes_no_case_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    op = all_ops()["silu_mul"]
    found = Impl("shy", "cuda", op.reference, lambda spec: "not these" if spec.dims else None)
    monkeypatch.setattr(op, "impls", [found])
    (failure,) = cuda_sanitize.run_op(op, torch.float32, NamedGpu(), 2)
    assert "shy, float32, no case: takes float32 on this device, and none of 1 cases ran" in failure
