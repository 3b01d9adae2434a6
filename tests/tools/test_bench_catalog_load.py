"""The benchmark of loads beside traffic on a small catalogue: it runs, and sorts its samples as it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tools._bench.samples import Samples, overlap
from tools.bench_catalog_load import Sizes, run

if TYPE_CHECKING:
    from pathlib import Path


def test_small_run(tmp_path: Path) -> None:
    sizes = Sizes(num_items=30_000, num_codes=64, cycles=3, idle_s=0.2, hidden_size=16)
    report = run(sizes, tmp_path)
    assert report["load_s"] > 0
    assert len(report["states"]) == 4
    for name in ("requests", "lateness"):
        assert report[name]["idle"]["num"] > 10
        assert 0 <= report[name]["idle"]["p50_ms"] <= report[name]["idle"]["max_ms"]
    assert {state["active_slots_mib"] for state in report["states"]} == {
        report["states"][0]["active_slots_mib"]
    }


def test_samples_are_sorted_by_the_spans_they_overlap() -> None:
    start, end = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.5, 1.5, 2.5, 3.5])
    assert overlap(start, end, [(1.2, 1.3), (2.4, 2.9)]).tolist() == [False, True, True, False]
    assert overlap(start, end, [(0.5, 1.0)]).tolist() == [True, True, False, False]
    assert overlap(start, end, []).tolist() == [False] * 4
    samples = Samples()
    for moment in range(4):
        samples.add(moment, 10.0 * moment)
    summary = samples.summary([False, True, True, True])
    with pytest.raises(SystemExit, match="no sample falls into the span"):
        samples.summary([False] * 4)
    assert (summary["p50_ms"], summary["max_ms"], summary["num"]) == (20.0, 30.0, 3)
