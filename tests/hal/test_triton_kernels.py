"""Triton's kernels are found without starting them, compiled once, and started afterwards without a compiler. For sm_90, with a
driver that only counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from xgr_runtime.hal import triton_kernels

if TYPE_CHECKING:
    from pathlib import Path

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def add_kernel(x_ptr, y_ptr, n, TILE: tl.constexpr):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + place, mask=place < n, other=0.0)
    tl.store(y_ptr + place, x + tl.load(y_ptr + place, mask=place < n, other=0.0), mask=place < n)

@triton.jit
def broken_kernel(x_ptr, TILE: tl.constexpr):
    tl.static_assert(TILE > 64, "a tile is too small")
    tl.store(x_ptr + tl.arange(0, TILE), 0.0)
"""

PROGRAM = """
import contextlib, json, threading
import torch, triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from xgr_runtime.hal import triton_kernels
from xgr_runtime.hal.kernels import Compilation
from some_kernels import add_kernel, broken_kernel

class Utils:
    def get_device_properties(self, device): return {"max_shared_mem": 232448}
    def load_binary(self, *told): seen["loaded"] += 1; return "module", 1, 16, 0, 1024

class Launcher:
    def __init__(self, source, metadata): pass
    def __call__(self, *told): seen["started"] += 1

class Driver:
    utils, launcher_cls = Utils(), Launcher
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

def compiled(**told): seen["compiled"] += 1

def elsewhere():
    add_kernel[(1,)](x, x, 64, TILE=32)

driver.set_active(Driver())
torch.cuda.device = lambda device: contextlib.nullcontext()
seen = {"loaded": 0, "started": 0, "compiled": 0}
knobs.runtime.jit_post_compile_hook = compiled
x, half = torch.zeros(64), torch.zeros(64, dtype=torch.float16)
assert triton_kernels.why_not_found() is None

def start():
    for tensor in (x, half, x):
        add_kernel[(1,)](tensor, tensor, 64, TILE=64)
    add_kernel[(1,)](x, x, 7, TILE=64)  # no multiple of 16: another kernel

with triton_kernels.missing_kernels(torch.device("cpu")) as found:
    start()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
after_search = dict(seen)
assert knobs.runtime.jit_cache_hook is None
names = [kernel.name for kernel in found]
compilation = Compilation(tuple(found))
while not compilation.wait(0.1): pass
after_compilation = dict(seen)
with triton_kernels.missing_kernels(torch.device("cpu")) as again:
    start()
after_start = dict(seen)
with triton_kernels.missing_kernels(torch.device("cpu")) as broken:
    broken_kernel[(1,)](x, TILE=64)
(kernel,) = broken
try:
    kernel.make_ready()
    error = ""
except Exception as raised:
    error = f"{type(raised).__name__} {raised}"
print(json.dumps([names, after_search, after_compilation, len(again), after_start, error]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("triton")
    (folder / "some_kernels.py").write_text(KERNELS)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(folder / "cache")
    env["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.triton
def test_kernels_are_noted_once_and_only_other_threads_start_any(told: Any) -> None:
    names, after_search, *_ = told
    assert names == ["add_kernel"] * 3
    assert after_search == {"loaded": 1, "started": 1, "compiled": 1}


@pytest.mark.triton
def test_what_was_noted_is_compiled_and_loaded_and_then_starts_at_once(told: Any) -> None:
    _, _, after_compilation, num_missing, after_start, _ = told
    assert after_compilation == {"loaded": 4, "started": 1, "compiled": 4}
    assert num_missing == 0
    assert after_start == {"loaded": 4, "started": 5, "compiled": 4}


@pytest.mark.triton
def test_the_error_of_a_kernel_is_tritons_own(told: Any) -> None:
    error = told[-1]
    assert "CompileTimeAssertionFailure" in error
    assert "a tile is too small" in error


def test_an_older_triton_is_said_not_to_tell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "triton.py").write_text("__version__ = '3.2.0'\nclass JITFunction:\n    pass\n")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.setitem(
            sys.modules, "triton", None
        )  # so that whatever is there now is there again afterwards
        del sys.modules["triton"]
        reason = triton_kernels.why_not_found()
    assert reason == "Triton 3.2.0 does not say beforehand what it compiles"


def test_without_triton_nothing_of_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert triton_kernels.why_not_found() is None
    with triton_kernels.missing_kernels(torch.device("cpu")) as found:
        pass
    assert not found
