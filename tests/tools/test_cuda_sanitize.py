"""The script for NVIDIA's checkers: what it says where there is no GPU, and that it runs and judges providers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tools import cuda_sanitize, cuda_sanitize_all
from xgr_runtime.conformance.comparison import NanFilled
from xgr_runtime.conformance.op_cases import GENERATORS
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.registry import Impl, all_ops

if TYPE_CHECKING:
    from collections.abc import Callable

WRITE = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 2 bytes
=========     at write_rows_kernel+0x310 in cache_kernels.py:40
=========     by thread (0,0,0) in block (0,0,0)
========= Invalid __global__ write of size 2 bytes
=========     at write_rows_kernel+0x310 in cache_kernels.py:40
========= ERROR SUMMARY: 2 errors
"""
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at combine_kernel+0x10 in x.py:1
=========     and Read access at combine_kernel+0x90 in x.py:2 [64 hazards]
=========
silu_mul by fast, bfloat16: 2 cases ran, 0 refused
all ran and agreed
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = "========= COMPUTE-SANITIZER\nall ran and agreed\n========= ERROR SUMMARY: 0 errors\n"
# what the checker of CUDA 13.0 prints, with exit code 0, where the program ends before it uses the device
NOTHING = """\
========= COMPUTE-SANITIZER
========= Target application terminated before first instrumented API call
========= Error: couldn't find exit code.
"""

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


@pytest.mark.parametrize(("option", "is_filled"), [([], True), (["--unfilled"], False)])
def test_new_memory_is_nan_or_left_as_it_is(
    option: list[str], is_filled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen by the mode, as memory that is left as it is may hold NaN."""
    op, modes = all_ops()["silu_mul"], list[object]()

    def provided(gate_up_N2F: torch.Tensor) -> object:
        modes.append(_get_current_dispatch_mode())
        return op.reference(gate_up_N2F)

    monkeypatch.setattr(op, "impls", [Impl("fast", "cuda", provided, lambda _: None)])
    monkeypatch.setattr(cuda_sanitize, "open_device", lambda _: SimpleNamespace(device=NamedGpu()))
    monkeypatch.setattr(cuda_sanitize, "load_providers", lambda _: ())
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    arguments = ["--ops", "silu_mul", "--dtypes", "float32", "--most", "1", *option]
    assert cuda_sanitize.main(arguments) == 0
    assert [isinstance(mode, NanFilled) for mode in modes] == [is_filled]


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


@pytest.mark.parametrize(
    ("tool", "text", "is_late", "expected"),
    [
        ("memcheck", CLEAN, False, "clean"),
        ("memcheck", WRITE, False, "found"),
        ("memcheck", WRITE, True, "found"),
        ("memcheck", CLEAN.replace("all ran and agreed\n", ""), False, "died"),
        ("memcheck", "all ran and agreed\n", False, "died"),
        ("memcheck", NOTHING, False, "died"),
        ("memcheck", "", True, "late"),
        ("racecheck", RACE, False, "found"),
        ("racecheck", CLEAN.replace("ERROR SUMMARY: 0", "RACECHECK SUMMARY: 0 hazards displayed (0"), False, "clean"),
        ("plain", "all ran and agreed\n", False, "clean"),
        ("plain", "silu_mul by x, float32: 2 cases ran, 0 refused\nwrong: silu_mul by x\n", False, "wrong"),
        ("memcheck", CLEAN.replace("all ran and agreed", "wrong: silu_mul"), False, "wrong"),
    ],
)  # fmt: skip
def test_what_the_output_of_a_checked_program_means(
    tool: str, text: str, is_late: bool, expected: str
) -> None:
    assert cuda_sanitize_all.judge(tool, text, is_late=is_late) == expected


def test_what_is_planted_lies_right_behind_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    op, seen = all_ops()["write_shared_kv"], list[tuple[int, int]]()

    def provided(k_pages: torch.Tensor, slot_T: torch.Tensor, **_: torch.Tensor) -> None:
        seen.append((k_pages.shape[0] * k_pages.shape[1], int(slot_T.max())))

    monkeypatch.setattr(op, "impls", [Impl("fast", "cuda", provided, lambda _: None)])
    assert cuda_sanitize.plant(NamedGpu()) == 0
    ((num_slots, slot),) = seen
    assert slot == num_slots


def test_findings_are_counted_by_kind_and_kernel() -> None:
    written = "Invalid __global__ write of size 2 bytes in write_rows_kernel"
    assert cuda_sanitize_all.findings(WRITE) == [f"2 x {written}"]
    (race,) = cuda_sanitize_all.findings(RACE)
    assert race.startswith("1 x Race reported between Write access at combine_kernel")
    assert cuda_sanitize_all.findings(CLEAN) == []


def test_every_op_is_in_one_group() -> None:
    names = list(all_ops())
    groups = cuda_sanitize_all.groups(names)
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert ("beam_attention",) in groups


def fake_checker(folder: Path, planted: str) -> Path:
    """Finds what is planted, or not; memcheck is clean, racecheck finds a race, initcheck never ends."""
    path = folder / "checker"
    path.write_text(
        f"""#!{sys.executable}
import sys, time
if "--plant" in sys.argv:
    print({planted!r})
elif "initcheck" in sys.argv:
    assert "--unfilled" in sys.argv
    time.sleep(60)
else:
    print({CLEAN!r} if "memcheck" in sys.argv else {RACE!r})
"""
    )
    path.chmod(0o755)
    return path


def test_a_round_says_what_was_found_and_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    op = all_ops()["silu_mul"]
    monkeypatch.setattr(op, "impls", [Impl("fast", "cuda", op.reference, lambda _: None)])
    monkeypatch.setattr(cuda_sanitize_all, "load_providers", lambda _: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    log = tmp_path / "log"
    arguments = ["--ops", "silu_mul", "--each", "300", "--log", str(log)]
    checker = str(fake_checker(tmp_path, WRITE))
    tools = ["--tools", "memcheck", "racecheck"]
    assert cuda_sanitize_all.main([*arguments, *tools, "--checker", checker]) == 1
    said = capsys.readouterr().out
    assert "== plain: 0 of 1 ops clean" in said
    assert "needs a CUDA device" in said
    assert "== memcheck: 1 of 1 ops clean" in said
    assert "== racecheck: 0 of 1 ops clean" in said
    assert "1 x Race reported between Write access at combine_kernel" in said
    assert "#### racecheck silu_mul: found" in log.read_text()
    late = ["--tools", "initcheck", "--each", "1.5", "--checker", checker, "--ops", "silu_mul"]
    assert cuda_sanitize_all.main(late) == 1
    _, of_checker = capsys.readouterr().out.split("== initcheck")
    assert "late after 2 s: silu_mul" in of_checker


def test_ops_without_a_provider_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside others, and alone, which is nothing to check: a usage error before anything runs."""
    op = all_ops()["silu_mul"]
    monkeypatch.setattr(op, "impls", [Impl("fast", "cuda", op.reference, lambda _: None)])
    monkeypatch.setattr(all_ops()["linear"], "impls", [])
    monkeypatch.setattr(cuda_sanitize_all, "load_providers", lambda _: ())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ["--checker", str(fake_checker(tmp_path, WRITE)), "--tools", "memcheck", "--ops"]
    assert cuda_sanitize_all.main([*arguments, "linear", "silu_mul"]) == 1
    said = capsys.readouterr().out
    assert "not checked, no CUDA provider: linear\n" in said
    assert "== memcheck: 1 of 1 ops clean" in said
    with pytest.raises(SystemExit) as ended:
        cuda_sanitize_all.main([*arguments, "linear"])
    assert ended.value.code == 2
    said, wrong = capsys.readouterr()
    assert said == ""
    assert "usage: " in wrong
    assert "no CUDA provider of linear: nothing to check" in wrong


def test_a_checker_that_sees_nothing_is_no_checker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    op = all_ops()["silu_mul"]
    monkeypatch.setattr(op, "impls", [Impl("fast", "cuda", op.reference, lambda _: None)])
    monkeypatch.setattr(cuda_sanitize_all, "load_providers", lambda _: ())
    blind = str(fake_checker(tmp_path, CLEAN))
    assert cuda_sanitize_all.main(["--checker", blind]) == 2
    assert "did not find what was planted" in capsys.readouterr().out
    assert cuda_sanitize_all.main(["--checker", str(tmp_path / "none")]) == 2
