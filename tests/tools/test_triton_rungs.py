"""The verdict of rung L5 on what Huawei's compiler printed and left, and the report of the Triton rungs. No Triton is needed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tools._ladder.l4_report import Report
from tools._ladder.l5_verdict import element_loop, verdict

if TYPE_CHECKING:
    from pathlib import Path

ACCEPTED_LOG = """[ERROR] Cannot find hivmc under $PATH
[ERROR] Failed to run `hivmc --version`.
loc("linalg.mlir":1:1): error: External hivmc run fails, returning module before running external compiler
"""
# as left for a kernel of whole rows: a loop over items that reads its slot, and a compiler's loop that moves a row a turn
ROWS = """
    scf.for %arg1 = %6 to %arg6 step %arg7  : i32 {
      %9 = memref.load %cast[%c0] : memref<1xi32, strided<[1], offset: ?>, #hivm.address_space<gm>>
      scf.for %arg2 = %c0 to %c16 step %c1 {
        %33 = memref.load %22[%arg2] {DiscreteMemAccess} : memref<16xi32, #hivm.address_space<ub>>
        func.call @load_gm_to_ubuf_1d_half(%a, %b, %c0_i32, %cst, %c0) : (memref<?xf16>) -> ()
      } {ExtractedLoadOrStore, hivm.parallel_loop}
    }
"""
ELEMENTS = """
    scf.for %arg1 = %6 to %arg6 step %arg7  : i32 {
      %4 = scf.for %arg2 = %c0 to %c1024 step %c1 iter_args(%arg3 = %3) -> (tensor<1024xf16>) {
        %32 = memref.load %22[%arg2] {DiscreteMemAccess} : memref<1024xi32, #hivm.address_space<ub>>
        %34 = memref.load %cast[%c0] : memref<1xf16, strided<[1], offset: ?>, #hivm.address_space<gm>>
      } {ExtractedLoadOrStore}
    }
"""
SCATTER = ELEMENTS.replace("%34 = memref.load %cast[%c0]", "memref.store %9, %15[%arg2]")


def test_the_missing_last_step_with_a_module_is_the_accepted_end() -> None:
    assert verdict(ACCEPTED_LOG, ROWS) is None


@pytest.mark.parametrize(
    ("log", "module", "text"),
    [
        (ACCEPTED_LOG, None, "no module.hivm.opt.mlir"),
        (ACCEPTED_LOG.splitlines()[0], ROWS, "ended otherwise"),
        ("", ROWS, "ended otherwise"),
        (
            f"[NOTE] Ub overflow; automatically set enable-auto-multi-buffer to false\n{ACCEPTED_LOG}",
            ROWS,
            "without overlap",
        ),
        ("error: ub overflow, requires 4194304 bits", None, "ub overflow"),
        (ACCEPTED_LOG, ELEMENTS, "element by element: %34"),
        (ACCEPTED_LOG, SCATTER, "element by element: memref.store"),
    ],
)
def test_every_other_end_is_refused_with_its_reason(
    log: str, module: str | None, text: str
) -> None:
    reason = verdict(log, module)
    assert reason is not None
    assert text in reason


def test_a_loop_that_moves_rows_moves_no_elements() -> None:
    assert element_loop(ROWS) is None
    assert element_loop(ROWS + ELEMENTS) is not None


def test_a_report_without_anything_that_ran_has_not_passed(tmp_path: Path) -> None:
    report = Report({"triton": "0"})
    passed = [report.is_passed]
    report.count("cases")
    passed.append(report.is_passed)
    assert passed == [False, True]
    report.note("silu_mul")
    report.require(False, "one case")
    report.write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == {
        "set": {"triton": "0"},
        "counts": {"cases": 1},
        "providers": [{"op": "silu_mul", "provider": "triton"}],
        "result": "failed",
        "failures": ["one case"],
    }
