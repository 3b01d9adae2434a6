"""The soak's arithmetic on known series, its verdicts, and a short run of the tool itself."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.service.stand_in import answer
from tools import soak
from tools._bench.load import run_closed
from tools._bench.traffic import Traffic, TrafficOptions
from xgr_runtime.errors import EngineClosed
from xgr_runtime.service.client import AsyncRecommendClient

if TYPE_CHECKING:
    from pathlib import Path

    from tools._bench.load import Tally
    from xgr_runtime.types import RecRequest, RecResult


def memory_of(mib: list[float], done_per_sample: int = 100) -> soak.Memory:
    return soak.Memory([(10.0 + i, value, i * done_per_sample) for i, value in enumerate(mib)])


def test_a_straight_line_is_its_rise_over_its_mean() -> None:
    """100 MiB that grow by 0.1 MiB a second over 100 s: 10 of a mean of 105."""
    growth = memory_of([100 + 0.1 * i for i in range(101)]).growth(warmup=0)
    assert growth["growth_percent"] == pytest.approx(100 * 10 / 105, abs=1e-3)
    assert growth["slope_mib_per_hour"] == pytest.approx(360)
    assert growth["rss_mib_peak"] == 110


def test_the_warm_up_does_not_count() -> None:
    series = [50.0 + 5 * i for i in range(20)] + [150.0] * 80
    assert memory_of(series).growth(warmup=2000)["growth_percent"] == pytest.approx(0)
    assert memory_of(series).growth(warmup=0)["growth_percent"] > 30


def test_noise_around_a_constant_is_no_growth() -> None:
    rng = np.random.default_rng(0)
    series = (300 + rng.normal(0, 2, 1200)).tolist()
    assert abs(memory_of(series).growth(warmup=2000)["growth_percent"]) < 0.5


def test_too_few_samples_tell_nothing() -> None:
    growth = memory_of([1.0] * 30).growth(warmup=10**6)
    assert (growth["growth_percent"], growth["num_samples_after_warmup"]) == (None, 0)


def good_report() -> dict[str, Any]:
    catalogs = {"movies": {"versions": {"v0": {"num_pins": 0}}}}
    service = {"is_at_rest": True, "num_pages_in_use": 0, "engine": {"catalogs": catalogs}}
    return {
        "growth_percent": 1.0,
        "num_improper": 0,
        "during_stop": {"OK": 3, "UNAVAILABLE": 9},
        "exit_code": 0,
        "service": service,
    }


def test_a_good_run_has_no_failures() -> None:
    assert soak.failures_of(good_report(), 2.0) == []


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("growth_percent",), 2.1, "memory grew"),
        (("growth_percent",), None, "too few samples"),
        (("num_improper",), 1, "contradict"),
        (("during_stop",), {"INTERNAL": 1}, "at the stop"),
        (("exit_code",), 1, "exit code 1"),
        (("service",), None, "exit code"),
        (("service", "is_at_rest"), False, "rest"),
        (("service", "num_pages_in_use"), 2, "2 pages"),
        (("service", "engine", "catalogs", "movies", "versions", "v0", "num_pins"), 1, "pins"),
    ],
)
def test_each_fault_is_named(path: tuple[str, ...], value: object, named: str) -> None:
    report = good_report()
    place: Any = report
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    (failure,) = soak.failures_of(report, 2.0)
    assert named in failure


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--concurrency", "0", "must be a whole number from 1"),
        ("--minutes", "nan", "must be a number above 0"),
        ("--minutes", "0", "must be a number above 0"),
        ("--minutes", "-1", "must be a number above 0"),
        ("--minutes", "inf", "must be a number above 0"),
        ("--rate", "0", "must be a number above 0"),
        ("--limit-percent", "nan", "must be a number from"),
        ("--swap-every-s", "-1", "must be a number from 0"),
        ("--warmup", "x", "must be a whole number from 0"),
        ("--seed", "-1", "must be a whole number from 0"),
        ("--out", "/nope/x", "cannot be written: '/nope/x'"),
        ("--out", "/", "cannot be written: '/'"),
        ("--set", "x", "an override must look like a.b=value, got 'x'"),
        ("--set", "device.x=1", "'device' is a value, not a section"),
        ("--set", "search.beam_witdh=1", "unknown option search.beam_witdh"),
        ("--set", "service.drain_s=-1", "service.drain_s must be in"),
    ],
)
def test_arguments_are_checked_before_anything_runs(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        soak.main([f"{option}={value}"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert "soak: service" not in error


@pytest.mark.e2e
def test_a_service_that_does_not_start_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        soak.main(["--minutes", "0.01", "--set", "model.path=/nowhere"])
    assert caught.value.code == 2
    assert "error: the service did not start; what it said is above" in capfd.readouterr().err


class SlowToStop:
    """A service, its process and its client in one: it refuses requests a while after it was told to stop."""

    stops_after_s = 1.0

    def __init__(self) -> None:
        self.refuses_from_s = math.inf

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGTERM
        self.refuses_from_s = time.monotonic() + self.stops_after_s

    async def recommend(self, request: RecRequest) -> RecResult:
        await asyncio.sleep(0.01)
        if time.monotonic() >= self.refuses_from_s:
            raise EngineClosed("stopping")
        return answer(request)


def test_a_stop_is_loaded_until_it_is_noticed() -> None:
    service: Any = SlowToStop()
    traffic = Traffic(TrafficOptions(), 0)
    statuses = asyncio.run(soak.stop_under_load(service, traffic, service))
    assert set(statuses) == {"OK", "UNAVAILABLE"}


class Seen:
    """What a run has to see before it may end, however slow the machine is."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.num_samples = 0
        self.is_swapped = self.is_swapped_back = False

    def is_enough(self, tally: Tally) -> bool:
        kinds = {"OK", "CANCELLED", "INVALID_ARGUMENT"} <= set(tally.statuses)
        return kinds and self.num_samples >= 3 and self.is_swapped_back


def run_until_enough(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's main load goes on until enough was seen, for five minutes at most."""
    add, recommend = soak.Memory.add, AsyncRecommendClient.recommend

    def count(memory: soak.Memory, pid: int, num_done: int) -> None:
        add(memory, pid, num_done)
        seen.num_samples += num_done >= seen.warmup

    async def look(client: AsyncRecommendClient, request: RecRequest, **options: Any) -> RecResult:
        was_swapped = seen.is_swapped
        result = await recommend(client, request, **options)
        version = result.results[0].catalog_version
        seen.is_swapped |= version == "v1"
        # One that was sent after a swap and sees the version before it came after a second one.
        seen.is_swapped_back |= was_swapped and version == "v0"
        return result

    # Only the main load has a warm-up.
    async def run(client: AsyncRecommendClient, traffic: Traffic, tally: Tally, *rest: Any) -> None:
        concurrency, until_s, most = rest
        end_s = time.monotonic() + 300
        await run_closed(client, traffic, tally, concurrency, until_s, most)
        while tally.skip and not seen.is_enough(tally) and time.monotonic() < end_s:
            await run_closed(client, traffic, tally, concurrency, time.monotonic() + 0.5, most)

    monkeypatch.setattr(soak.Memory, "add", count)
    monkeypatch.setattr(AsyncRecommendClient, "recommend", look)
    monkeypatch.setattr(soak, "run_closed", run)


@pytest.mark.e2e
def test_a_short_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too short to tell growth (so any is allowed): traffic of every kind, swaps, a stop under load, nothing left over."""
    run_until_enough(Seen(20), monkeypatch)
    out = tmp_path / "report.json"
    arguments = ["--minutes", "0.06", "--warmup", "20", "--swap-every-s", "0.5"]
    assert soak.main([*arguments, "--limit-percent", "1000", "--json", "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    assert report["failures"] == []
    assert report["exit_code"] == 0
    assert {"OK", "CANCELLED", "INVALID_ARGUMENT"} <= set(report["statuses"])
    assert set(report["statuses"]) <= {"OK", "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND"}
    assert report["service"]["num_swaps"] >= 2
    assert report["service"]["end"] == "DRAINED"
    assert "UNAVAILABLE" in report["during_stop"]
    assert report["num_samples_after_warmup"] >= 3


@pytest.mark.e2e
@pytest.mark.slow
def test_three_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--minutes", "3", "--limit-percent", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["service"]["num_swaps"] > 5
