"""What the demo's exit code depends on: each promise broken alone is named."""

from __future__ import annotations

import copy
import importlib.metadata
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import xgr_runtime
from tools.demo.run import Places, main, shortfalls

GOOD: dict[str, Any] = {
    "recall_at_10": 0.17,
    "popularity": {"recall_at_10": 0.05},
    "markov1": {"recall_at_10": 0.15},
    "num_invalid_items": 0,
    "returning_user": [{"num_cached_tokens": 0}, {"num_cached_tokens": 48}],
    "has_prefix_cache": True,
}


def test_a_report_that_keeps_every_promise() -> None:
    assert shortfalls(GOOD) == []


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("num_invalid_items",), 1, "1 invalid items"),
        (("returning_user",), [{"num_cached_tokens": 0}] * 2, "history was not cached"),
        (("recall_at_10",), 0.2501, "a leak"),
        (("popularity", "recall_at_10"), 0.0567, "below 3 x popularity 0.0567"),
        (("markov1", "recall_at_10"), 0.1701, "below Markov-1 0.1701"),
    ],
)
def test_each_broken_promise_is_named(path: tuple[str, ...], value: Any, text: str) -> None:
    report = copy.deepcopy(GOOD)
    target = report
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value
    found = shortfalls(report)
    assert len(found) == 1
    assert text in found[0]


def test_without_the_prefix_cache_nothing_has_to_be_cached() -> None:
    report = {**GOOD, "returning_user": [{"num_cached_tokens": 0}] * 2, "has_prefix_cache": False}
    assert shortfalls(report) == []


def test_the_report_says_what_was_served() -> None:
    """The values are those of configs/demo-ascend-910b.yaml and of what is installed."""
    places = Places(Path("work"), Path("report.json"), "demo-ascend-910b")
    settings = places.settings()
    versions = settings.pop("versions")
    assert settings == {
        "config": "demo-ascend-910b",
        "overrides": [],
        "device": "npu",
        "dtype": "bfloat16",
        "has_prefix_cache": False,
    }
    assert versions["torch"] == importlib.metadata.version("torch")
    assert versions["xgr"] == xgr_runtime.__version__
    assert set(versions) == {"xgr", "torch", "torch-npu"}


def test_overrides_count_and_are_told() -> None:
    overrides = ("device=npu", "model.dtype=float16")
    settings = replace(Places(Path("work"), Path("report.json")), overrides=overrides).settings()
    assert (settings["device"], settings["dtype"]) == ("npu", "float16")
    assert settings["overrides"] == list(overrides)
    assert settings["has_prefix_cache"] is True


@pytest.mark.slow
@pytest.mark.e2e
def test_metrics_are_the_same_with_and_without_the_prefix_cache(tmp_path: Path) -> None:
    reports = []
    for has_prefix_cache in (True, False):
        overrides = () if has_prefix_cache else ("cache.prefix_cache=false",)
        places = Places(tmp_path / "work", tmp_path / "report.json", overrides=overrides)
        assert main(places) == 0
        reports.append(json.loads(places.report.read_text(encoding="utf-8")))
    names = ("recall_at_10", "ndcg_at_10", "num_users", "num_invalid_items")
    assert [reports[0][name] for name in names] == [reports[1][name] for name in names]
    cached = [[v["num_cached_tokens"] for v in r["returning_user"]] for r in reports]
    assert cached == [[0, 48, 48], [0, 0, 0]]
