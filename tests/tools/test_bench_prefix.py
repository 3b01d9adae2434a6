"""The prefix-cache benchmark counts what it says, and its random model does look at the history."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tools import bench_prefix
from tools.bench_prefix import Sizes, ask, difference, make_engine

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Sizes(num_layers=2, hidden_size=64, width=8, num_visits=3, least_tokens=60, most_tokens=90)


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--layers", "2", "--hidden-size", "64", "--users", "3", "--visits", "3"]
    arguments += ["--tokens", "60", "90", "--timed-tokens", "100", "--width", "8", "--json"]
    assert bench_prefix.main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hit_ratio"] == 1.0
    assert (report["num_requests"], report["num_returning_requests"]) == (9, 6)
    assert report["saved_tokens_share"] == pytest.approx(
        report["num_cached_tokens"] / report["num_prompt_tokens"], abs=1e-4
    )
    # A visit adds at most 9 tokens; all of the visit before is found.
    assert report["num_cached_tokens"] >= 6 * 60
    assert report["timed_prompt_tokens"] == 100
    assert 100 - 9 <= report["timed_cached_tokens"] < 100
    assert report["evicted_pages"] == 0
    hit, miss = (report["timings_ms"][case]["median_ms"] for case in ("hit", "miss"))
    assert report["time_ratio_hit_to_miss"] == pytest.approx(hit / miss, abs=1e-4)
    assert min(hit, miss) > 0


def test_a_cache_without_room_evicts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--layers", "1", "--hidden-size", "64", "--users", "30", "--visits", "2"]
    arguments += ["--tokens", "1500", "2000", "--timed-tokens", "60", "--width", "4", "--json"]
    assert bench_prefix.main([*arguments, "--cache-bytes", "0"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hit_ratio"] < 0.5
    assert report["evicted_pages"] > 1000


def test_the_random_model_looks_at_the_history(tmp_path: Path) -> None:
    with make_engine(tmp_path, SMALL, seed=1) as engine:
        one, two = (ask(engine, np.arange(20) + first, 8) for first in (0, 1000))
        assert set(one.results[0].item_ids.tolist()) != set(two.results[0].item_ids.tolist())
        assert one.results[0].scores[0] - one.results[0].scores[-1] > 0.1
        with pytest.raises(SystemExit, match="hit and miss differ"):
            difference(one, two)
