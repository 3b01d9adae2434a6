"""The benchmark of loads beside traffic on a small catalogue: it runs, and sorts its samples as it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tools import bench_catalog_load
from tools._bench import samples as samples_file
from tools._bench.samples import Samples, overlap, wait_past
from tools.bench_catalog_load import Sizes, report, run
from xgr_runtime import Engine

if TYPE_CHECKING:
    from pathlib import Path

NOTHING = {"p50_ms": None, "p99_ms": None, "p999_ms": None, "max_ms": None, "num": 0}


def test_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads would take a few milliseconds: each lasts until a request and a sleep have run inside it."""
    made: list[Samples] = []
    load = Engine.load_catalog

    class Noted(Samples):
        def __post_init__(self) -> None:
            made.append(self)

    def long_load(engine: Engine, name: str, path: str) -> str:
        start_s = time.perf_counter()
        version = load(engine, name, path)
        wait_past(start_s, *made)
        return version

    monkeypatch.setattr(bench_catalog_load, "Samples", Noted)
    monkeypatch.setattr(Engine, "load_catalog", long_load)
    sizes = Sizes(num_items=30_000, num_codes=64, cycles=3, idle_s=0.2, hidden_size=16)
    found = run(sizes, tmp_path)
    assert found["load_s"] > 0
    assert len(found["states"]) == 4
    for name in ("requests", "lateness"):
        for span in (found[name]["idle"], found[name]["during_change"]):
            assert span["num"] >= sizes.cycles
            assert 0 <= span["p50_ms"] <= span["max_ms"]
    assert {state["active_slots_mib"] for state in found["states"]} == {
        found["states"][0]["active_slots_mib"]
    }


def samples_at(moments_s: list[float], ms: list[float]) -> Samples:
    samples = Samples()
    for moment, value in zip(moments_s, ms, strict=True):
        samples.add(moment, value)
    return samples


def report_of(samples: Samples) -> dict[str, Any]:
    """Two changes, from 3 to 4 and from 13 to 14 s, after each a look at memory of half a second; loads take half of them."""
    states = [{"resident_mib": mib, "anonymous_mib": 1.0} for mib in (100.0, 110.0, 111.5)]
    loads, changes, pauses = (
        [(at, to), (10 + at, 10 + to)] for at, to in ((3.0, 3.5), (3.0, 4.0), (5.0, 5.5))
    )
    return report(Sizes(cycles=2), 0, samples, samples, loads, changes, pauses, states)


def test_a_report_of_known_samples() -> None:
    """What began before a change and outlived it belongs to it; what a look at memory delayed to nothing."""
    moments = [0.0, 2.0, 2.9, 4.5, 4.9, 12.0, 13.7, 13.9, 20.0]
    ms = [9e3, 20.0, 1500.0, 30.0, 200.0, 40.0, 700.0, 50.0, 60.0]
    found = report_of(samples_at(moments, ms))
    idle, during = found["requests"]["idle"], found["requests"]["during_change"]
    assert (idle["num"], idle["p50_ms"], idle["max_ms"]) == (4, 35.0, 60.0)
    assert (during["num"], during["p50_ms"], during["max_ms"]) == (3, 700.0, 1500.0)
    assert found["lateness"] == found["requests"]
    assert (found["load_s"], found["stall_max_during_change_ms"]) == (0.5, 1500.0)
    assert found["growth_after_second_cycle_mib"] == {"resident_mib": 1.5, "anonymous_mib": 0.0}


@pytest.mark.parametrize(
    ("moments_s", "missing", "advice"),
    [([0.0, 2.0, 8.0], "during_change", "--items"), ([0.0, 3.1, 13.1], "idle", "--idle-s")],
)
def test_a_span_that_nothing_fell_into_has_no_figures(
    moments_s: list[float],
    missing: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report_of(samples_at(moments_s, [1.0, 2.0, 3.0]))
    assert found["requests"][missing] == NOTHING
    assert found[f"p99_{missing}_ms"] is None
    monkeypatch.setattr(bench_catalog_load, "run", lambda *_: found)
    assert bench_catalog_load.main(["--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["requests"][missing] == NOTHING
    assert f"no sample fell into '{missing}': take more {advice}" in told.err


def test_a_client_that_ended_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_file, "LAST_SAMPLE_S", 0.05)
    wait_past(1.0, samples_at([0.0, 2.0], [1.0, 1.0]))
    with pytest.raises(TimeoutError, match="no sample began and ended"):
        wait_past(1.0, samples_at([0.0, 2.0], [1.0, 1.0]), samples_at([0.5], [1.0]))


def test_a_client_that_failed_is_not_waited_for() -> None:
    failed = samples_at([0.5], [1.0])
    with pytest.raises(ZeroDivisionError), failed.taking():
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="has ended before its time"):
        wait_past(1.0, failed)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--items", "1", "must be a whole number from 100"),
        ("--cycles", "2", "must be a whole number from 3"),
        ("--idle-s", "nan", "must be a number from 0"),
        ("--seed", "-1", "must be a whole number from 0"),
    ],
)
def test_a_number_out_of_range_is_named(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench_catalog_load.main([f"{option}={value}"])
    assert caught.value.code == 2
    assert f"argument {option}: {said}" in capsys.readouterr().err


def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither files nor the threads and processes, which hold the pipe of standard error open."""
    command = [sys.executable, bench_catalog_load.__file__, "--items", "3000", "--idle-s", "600"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("two versions of 3000 items")
        assert list(tmp_path.iterdir())
        process.terminate()
        process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_samples_are_sorted_by_the_spans_they_overlap() -> None:
    start, end = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.5, 1.5, 2.5, 3.5])
    assert overlap(start, end, [(1.2, 1.3), (2.4, 2.9)]).tolist() == [False, True, True, False]
    assert overlap(start, end, [(0.5, 1.0)]).tolist() == [True, True, False, False]
    assert overlap(start, end, []).tolist() == [False] * 4
    samples = samples_at([0, 1, 2, 3], [0.0, 10.0, 20.0, 30.0])
    summary = samples.summary([False, True, True, True])
    assert samples.summary([False] * 4) == NOTHING
    assert (summary["p50_ms"], summary["max_ms"], summary["num"]) == (20.0, 30.0, 3)
