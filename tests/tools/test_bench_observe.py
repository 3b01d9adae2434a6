"""The benchmark of observation runs and says what it claims; its figures are for a quiet machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tools._bench.timing import Timing
from tools.bench_observe import NoTimer, _each_us, clock_one, main
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.xschedule.stage_times import StageTimes

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.e2e
def test_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert main(["--runs", "9", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    for kind in ("batches", "processor"):
        assert set(report[kind]) == {"observed", "unobserved"}
        assert all(case["runs"] == 9 and case["median_ms"] > 0 for case in report[kind].values())
    parts = report["parts_us"]
    assert set(parts) == {
        "stage_times_of_a_batch",
        "totals_of_a_batch",
        "record_of_a_call",
        "scrape",
    }
    assert min(parts.values()) > 0


def test_microseconds_of_one() -> None:
    """Two hundred in 3 ms."""
    assert _each_us(Timing(3.0, 2.0, 4.0, 9), 200) == 15


def test_what_is_compared() -> None:
    """The timed clock measures, the other does not."""
    times = clock_one(CpuDevice())
    assert isinstance(times, StageTimes)
    assert len(times.rounds_s[0]) == 3
    assert min(seconds or 0.0 for seconds in times.rounds_s[0]) > 0
    device = CpuDevice()
    device.timer = NoTimer  # type: ignore[method-assign]
    untimed = clock_one(device)
    assert isinstance(untimed, StageTimes)
    assert untimed.rounds_s == ((0.0, 0.0, 0.0),)
