"""The load generator against a stand-in service whose answers and times are known."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.service.servers import running, running_in_thread
from tests.service.stand_in import StandInEngine
from tools import load_gen
from tools._bench import load
from tools._bench.load import Arrivals, Tally, percentiles, run_closed, run_open
from tools._bench.traffic import Traffic, TrafficOptions, read_histories
from xgr_runtime.service.client import AsyncRecommendClient
from xgr_runtime.types import RecRequest, Search

if TYPE_CHECKING:
    from array import array
    from pathlib import Path

    from tools._bench.traffic import Planned
    from xgr_runtime.types import RecResult


def requests_of(options: TrafficOptions, seed: int, count: int, **kinds: Any) -> list[Planned]:
    traffic = Traffic(options, seed, **kinds)
    return [traffic.next() for _ in range(count)]


def ids_of(planned: Planned) -> list[int]:
    history = planned.request.history_item_ids
    assert history is not None
    return [int(item) for item in history]


def test_the_same_seed_sends_the_same_requests() -> None:
    options = TrafficOptions(
        tags=("a", "b"), rules_share=0.5, bad_share=0.2, cancel_share=0.3, num_users=20
    )
    one, two, other = (repr(requests_of(options, seed, 300)) for seed in (3, 3, 4))
    assert one == two != other


def test_shares_and_ranges() -> None:
    options = TrafficOptions(
        num_items=50,
        max_length=7,
        tags=("a", "b"),
        rules_share=0.5,
        bad_share=0.1,
        cancel_share=0.2,
    )
    sent = requests_of(options, 0, 4000)
    good = [planned for planned in sent if not planned.is_bad]
    assert len(sent) - len(good) == pytest.approx(400, abs=80)
    assert sum(p.cancel_after_s is not None for p in good) == pytest.approx(
        0.2 * len(good), rel=0.15
    )
    assert {len(ids_of(p)) for p in good} == set(range(1, 8))
    assert {i for p in good for i in ids_of(p)} == set(range(1, 51))
    plain = sum(p.request.searches[0] is options.search for p in good)
    assert plain == pytest.approx(0.5 * len(good), rel=0.1)
    assert len({p.request.request_id for p in sent}) == len(sent)


def test_users_return_with_histories_that_have_grown_by_one_to_three() -> None:
    recorded = [np.arange(first, first + 30) for first in (100, 200, 300)]
    last: dict[int, int] = {}
    growths = []
    for planned in requests_of(TrafficOptions(num_users=3), 1, 500, histories=recorded):
        ids = ids_of(planned)
        assert ids == list(range(ids[0], ids[0] + len(ids)))
        before = last.get(ids[0], 0)
        if len(ids) > before and before:
            growths.append(len(ids) - before)
        last[ids[0]] = len(ids)
    assert len(growths) > 300


def test_histories_are_read_from_both_forms(tmp_path: Path) -> None:
    file = tmp_path / "histories.jsonl"
    file.write_text('[1, 2]\n\n{"request_id": "x", "history_item_ids": [3]}\n')
    assert [history.tolist() for history in read_histories(file)] == [[1, 2], [3]]
    for text, named in (
        ("", "no line"),
        ("[]\n", "line 1"),
        ("[1]\nnonsense\n", "line 2"),
        ('{"history_keys": ["a"]}\n', "line 1"),
        ('["a"]\n', "line 1"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=named):
            read_histories(file)


def test_percentiles_and_goodput() -> None:
    tally = Tally(skip=2)
    for ms in (9e9, 9e9, *range(1, 101)):
        tally.add("OK", float(ms))
    tally.add("UNAVAILABLE", 5.0)
    tally.end_s = tally.start_s + 10
    report = tally.report(slo_ms=50)
    assert report["latency_ms"] == {"p50": 50.5, "p90": 90.1, "p99": 99.01, "max": 100.0}
    assert report["statuses"] == {"OK": 100, "UNAVAILABLE": 1}
    assert (report["answers_per_s"], report["goodput_per_s"]) == (10.0, 5.0)
    nothing: array[float] = Tally().latencies
    assert percentiles(nothing) is None


class Fixed(Traffic):
    """Always the same request, for a stand-in that answers after `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(TrafficOptions(search=Search(catalog=f"wait:{seconds}")), 0)


class Gated(StandInEngine):
    """Answers nobody before `is_open` is set, which it sets itself when `num_needed` wait; counts the most that waited."""

    def __init__(self, num_needed: int) -> None:
        super().__init__()
        self.is_open, self.num_needed = asyncio.Event(), num_needed
        self.num_waiting = self.most_waiting = 0

    async def submit(self, request: RecRequest) -> RecResult:
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        if self.num_waiting == self.num_needed:
            self.is_open.set()
        await self.is_open.wait()
        self.num_waiting -= 1
        return await super().submit(request)


def test_an_open_loop_counts_from_when_a_request_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests leave when they are due, whether those before were answered or not: all hundred wait at once."""
    gaps, engine = Arrivals(200.0, 1000, seed=0), Gated(100)
    found_s, send = [], load.send

    def note(client: Any, planned: Planned, tally: Tally, due_s: float) -> Any:
        assert time.monotonic() >= due_s
        found_s.append(due_s)
        return send(client, planned, tally, due_s)

    monkeypatch.setattr(load, "send", note)

    async def main() -> Tally:
        tally = Tally()
        async with (
            running(engine) as (_, target),
            AsyncRecommendClient(target, timeout_s=60) as client,
        ):
            arrivals, until_s = Arrivals(200.0, 1000, seed=0), time.monotonic() + 600
            await run_open(client, Fixed(0.05), tally, arrivals, until_s, max_requests=100)
        return tally

    tally = asyncio.run(main())
    report = tally.report(slo_ms=1e6)
    assert report["statuses"] == {"OK": 100}
    due_s = np.cumsum([gaps.next_gap_s() for _ in range(100)])
    assert 0.25 < due_s[-1] < 1, "about half a second at 200 a second"
    np.testing.assert_allclose(np.diff(found_s), np.diff(due_s), atol=1e-6)
    assert report["seconds"] >= due_s[-1] + 0.05
    # The gate opened when the last was there, and the stand-in took 50 ms then.
    least_ms = np.sort(1e3 * (due_s[-1] - due_s) + 50)
    assert np.all(np.sort(tally.latencies) >= least_ms - 0.01)


def test_an_open_loop_counts_what_the_cap_kept_back() -> None:
    """Two are never answered: the other 98 are counted and not waited for."""

    async def main() -> Tally:
        tally, engine = Tally(), Gated(3)
        async with (
            running(engine) as (_, target),
            AsyncRecommendClient(target, timeout_s=60) as client,
        ):
            sending = run_open(client, Fixed(0), tally, Arrivals(2000.0, 2, seed=0), 1e18, 100)
            running_load = asyncio.ensure_future(sending)
            while tally.num_done < 98:
                assert not running_load.done()
                await asyncio.sleep(1e-3)
            engine.is_open.set()
            await running_load
        return tally

    assert asyncio.run(main()).report(slo_ms=1e6)["statuses"] == {"NOT_SENT": 98, "OK": 2}


def test_a_closed_loop_keeps_its_callers_busy() -> None:
    engine = Gated(10)

    async def main() -> Tally:
        tally = Tally()
        async with (
            running(engine) as (_, target),
            AsyncRecommendClient(target, timeout_s=60) as client,
        ):
            await run_closed(client, Fixed(0.05), tally, 10, time.monotonic() + 600, 60)
        return tally

    tally = asyncio.run(main())
    assert tally.report(slo_ms=1e6)["statuses"] == {"OK": 60}
    assert engine.most_waiting == 10
    assert min(tally.latencies) >= 50
    # Nothing is due before its caller is free, so nothing is late but by a pause of the process.
    assert np.median(tally.lags) < 50


def test_callers_that_give_up_and_contradictions_are_counted() -> None:
    """The stand-in answers whatever it gets, so every bad request is an answer that should not be."""
    options = TrafficOptions(
        search=Search(catalog="wait:600"), cancel_share=1.0, cancel_after_s=0.01, bad_share=0.0
    )
    bad = TrafficOptions(bad_share=1.0)

    async def main(options: TrafficOptions) -> Tally:
        tally = Tally()
        async with (
            running(StandInEngine()) as (_, target),
            AsyncRecommendClient(target, timeout_s=60) as client,
        ):
            await run_closed(client, Traffic(options, 0), tally, 4, time.monotonic() + 600, 20)
        return tally

    assert asyncio.run(main(options)).statuses == {"CANCELLED": 20}
    contradicted = asyncio.run(main(bad))
    assert contradicted.num_improper == contradicted.statuses["OK"] > 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    histories = tmp_path / "histories.jsonl"
    histories.write_text("[1, 2, 3]\n")
    with running_in_thread(StandInEngine()) as target:
        common = ["--target", target, "--requests", "40", "--warmup", "10", "--json"]
        common += ["--timeout-s", "60"]
        assert load_gen.main([*common, "--rate", "400", "--histories", str(histories)]) == 0
        opened = json.loads(capsys.readouterr().out)
        assert load_gen.main([*common, "--concurrency", "4", "--num-items", "9"]) == 0
        closed = json.loads(capsys.readouterr().out)
    assert (opened["loop"], opened["rate_per_s"]) == ("open", 400)
    assert (closed["loop"], closed["concurrency"]) == ("closed", 4)
    for report in (opened, closed):
        assert report["statuses"] == {"OK": 30}
        assert list(report["latency_ms"]) == ["p50", "p90", "p99", "max"]
        assert report["goodput_per_s"] <= report["answers_per_s"]


def test_a_load_that_nobody_answered_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--target", "127.0.0.1:1", "--concurrency", "2", "--requests", "4", "--json"]
    assert load_gen.main(arguments) == 1
    told = capsys.readouterr()
    assert told.err == "load_gen: not one request was answered: 4 UNAVAILABLE\n"
    report = json.loads(told.out)
    assert report["statuses"] == {"UNAVAILABLE": 4}
    assert (report["latency_ms"], report["answers_per_s"]) == (None, 0)


def test_broken_requests_are_answered_by_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--concurrency", "1", "--requests", "20", "--bad-share", "1"]
    with running_in_thread(StandInEngine()) as target:
        assert load_gen.main([*arguments, "--target", target, "--seed", "0"]) == 1
        assert "not one request" not in capsys.readouterr().err
    assert load_gen.main([*arguments, "--target", "127.0.0.1:1", "--requests", "2"]) == 1
    assert "answered: 2 UNAVAILABLE\n" in capsys.readouterr().err


def test_a_load_that_was_all_warm_up_or_none_is_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running_in_thread(StandInEngine()) as target:
        common = ["--target", target, "--requests", "3"]
        assert load_gen.main([*common, "--concurrency", "1", "--warmup", "3"]) == 1
        assert "answered: all 3 were of the warm-up\n" in capsys.readouterr().err
        assert load_gen.main([*common, "--rate", "0.001", "--duration-s", "0.1"]) == 1
        assert "answered: none was sent\n" in capsys.readouterr().err
        given_up = ["--cancel-share", "1", "--cancel-after-ms", "1", "--catalog", "wait:600"]
        assert load_gen.main([*common, "--concurrency", "1", *given_up]) == 0
        assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = [sys.executable, load_gen.__file__, "--concurrency", "1", "--requests", "1"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*command, "--target", "127.0.0.1:1"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        (
            "--num-items",
            "9" * 20,
            "must be a whole number from 1 to 4611686018427387903, got '99999999999999999999'",
        ),
        (
            "--num-items",
            "9" * 5000,
            "must be a whole number from 1 to 4611686018427387903, got '9999",
        ),
        ("--seed", "-1", "must be a whole number from 0 to 4611686018427387904, got '-1'"),
        ("--warmup", "-1", "must be a whole number from 0"),
        ("--max-length", "1" + "0" * 12, "must be a whole number from 1 to 16777216"),
        ("--concurrency", "1" + "0" * 12, "must be a whole number from 1 to 65536"),
        ("--users", "many", "must be a whole number from 1"),
        ("--timeout-s", "nan", "must be a number above 0 and at most 1e+09, got 'nan'"),
        ("--duration-s", "inf", "must be a number above 0"),
        ("--bad-share", "-0.1", "must be a number from 0 to 1, got '-0.1'"),
    ],
)
def test_a_number_out_of_range_is_named(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = [] if option == "--concurrency" else ["--concurrency", "1"]
    with pytest.raises(SystemExit) as caught:
        load_gen.main([*loop, f"{option}={value}"])
    assert caught.value.code == 2
    assert f"argument {option}: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--rate", "0"],
        ["--concurrency", "0"],
        ["--rate", "5", "--concurrency", "5"],
        ["--rate", "5", "--bad-share", "1.5"],
        ["--rate", "5", "--histories", "/nowhere.jsonl"],
        ["--rate", "5", "--target", "\n"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_gen.main(arguments)
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_requests_carry_the_search_that_was_asked_for() -> None:
    args = load_gen.make_parser().parse_args(
        [
            "--rate",
            "1",
            "--beam-width",
            "7",
            "--num-results",
            "3",
            "--tags",
            "a,b",
            "--catalog",
            "c",
        ]
    )
    options = load_gen.traffic_options(args)
    assert options.search == Search(catalog="c", beam_width=7, num_results=3)
    assert options.tags == ("a", "b")
    (planned,) = requests_of(options, 0, 1)
    assert isinstance(planned.request, RecRequest)
    assert planned.request.searches == (options.search,)


def test_histories_that_the_catalogue_does_not_know_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a load of nearly empty histories looks like a fast service."""
    with running_in_thread(StandInEngine()) as target:
        arguments = ["--target", target, "--requests", "5", "--concurrency", "1", "--json"]
        assert load_gen.main(arguments) == 0
        known = capsys.readouterr()
        reply = AsyncRecommendClient.recommend

        async def unknown(*args: Any, **options: Any) -> RecResult:
            result = await reply(*args, **options)
            return dataclasses.replace(result, num_history_used=1, num_history_unknown=3)

        monkeypatch.setattr(AsyncRecommendClient, "recommend", unknown)
        assert load_gen.main(arguments) == 0
        told = capsys.readouterr()
    assert json.loads(known.out)["num_history_unknown"] == 0
    assert known.err == ""
    report = json.loads(told.out)
    assert (report["num_history_used"], report["num_history_unknown"]) == (5, 15)
    assert "the catalogue knows 5 of 20 history items" in told.err
