"""The ladder's compilation for sm_90: what a launcher would start is found on a CPU, and one that does not compile is told by name.

Kernels of its own, among them one that a pass of the compiler fails at and one that ends the compiler's process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.triton

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def good_kernel(x_ptr, n, TILE: tl.constexpr):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(x_ptr + place, 0.0, mask=place < n)

@triton.jit
def small_kernel(x_ptr, TILE: tl.constexpr):
    tl.static_assert(TILE > 64, "a tile is too small")
    tl.store(x_ptr + tl.arange(0, TILE), 0.0)
"""

PROGRAM = """
import json, os
from unittest.mock import patch
import torch
from tools._ladder import l4_compile_checks, l4_sm90
from tools._ladder.l4_calls import Call
from tools._ladder.l4_report import Report
from tools._ladder.l4_started import noting_starts
from some_kernels import good_kernel, small_kernel

def start_all(x, sizes):
    for size in sizes:
        good_kernel[(1,)](x, 100, TILE=size)
        small_kernel[(1,)](x, TILE=size, num_warps=8)

def raise_error(x, sizes):
    raise ValueError("refused")

report, x = Report({}), torch.zeros(64)
with noting_starts() as starts:
    for label in ("first", "second"):
        call = Call("an op by a provider", label, start_all, {"x": x, "sizes": [32, 128]})
        l4_compile_checks.start([call], starts, report)
    call = Call("another", "third", raise_error, {"x": x, "sizes": []})
    l4_compile_checks.start([call], starts, report)
kernels = l4_compile_checks.with_stages(starts.kernels)
found = l4_sm90.failures(kernels, 2)

def pass_that_fails(kernel, last_stage):
    if kernel.name == "good_kernel":
        os.write(2, b"some.py:1:2: error: 'op' failed\\nmodule\\n")
        raise l4_sm90.NotCompiled("ttgir: RuntimeError: PassManager::run failed")
    os.abort()

with patch.object(l4_sm90, "compile_until", pass_that_fails):
    planted = l4_sm90.failures(kernels, 2)
stages = [(kernel.name, stage) for kernel, stage in kernels]
print(json.dumps([stages, report.failures, dict(starts.num_starts), found, planted]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("compile")
    (folder / "some_kernels.py").write_text(KERNELS)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_each_kernel_is_found_once_and_the_first_of_its_kind_compiled_farther(told: Any) -> None:
    stages, failures, num_starts, *_ = told
    assert [tuple(it) for it in stages] == [
        ("good_kernel", "llir"),
        ("small_kernel", "llir"),
        ("good_kernel", "ttgir"),
        ("small_kernel", "ttgir"),
    ]
    assert num_starts == {"an op by a provider": 8}
    assert failures == ["the launcher raised: another, third: ValueError: refused"]


def test_what_does_not_compile_is_told_with_its_sizes_its_caller_and_the_reason(told: Any) -> None:
    (failure,) = told[3]
    expected = "small_kernel (TILE=32, num_warps=8), started by an op by a provider, first, "
    assert failure.startswith(f"{expected}does not compile for sm_90: syntax: ")
    assert "a tile is too small" in failure


def test_the_reason_of_a_pass_is_what_it_printed_and_an_ended_compiler_is_a_failure(
    told: Any,
) -> None:
    planted = sorted(line.split(" does not compile for ")[1] for line in told[4])
    assert planted == [
        *["sm_90: the compiler ended its process: SIGABRT"] * 2,
        *["sm_90: ttgir: some.py:1:2: error: 'op' failed"] * 2,
    ]
    assert len({line.split(", started")[0] for line in told[4]}) == 4
