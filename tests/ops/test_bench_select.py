"""The selection benchmark on a tiny catalogue: both sides find the same lists, and the report holds what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools import bench_select
from tools._bench.allocator import can_set_pages
from tools._bench.beam_search import DenseSearch, OpsSearch, check_same_lists, load_catalog
from tools._bench.timing import Timing, time_interleaved
from tools.demo.checkpoint import HyperParameters, write_checkpoint
from tools.demo.network import Network, NetworkConfig
from tools.demo.semantic_ids import write_items
from tools.demo.template import VOCAB_SIZE

ROOT = Path(__file__).resolve().parents[2]
TINY = bench_select.Sizes(width=24, num_codes=48, num_items=900, runs=9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("logits_of", [bench_select.normal_logits, bench_select.peaked_logits])
def test_both_sides_of_the_search_agree(seed: int, logits_of: Any) -> None:
    rng = np.random.default_rng(seed)
    work = bench_select.search_work(
        load_catalog(bench_select.random_sids(TINY, rng), TINY.num_codes), TINY, rng, logits_of
    )
    ours, dense = OpsSearch(work), DenseSearch(work)
    lse = ours.normalisers()
    logp = [logits - row[:, None] for logits, row in zip(work.logits, lse, strict=True)]
    assert check_same_lists(ours.run(lse), dense.run(logp), 0.0)["ranks_swapped"] == 0
    check_same_lists(ours.run(), dense.run(), bench_select.NEAR)
    assert len(ours.run().scores) == TINY.width


@pytest.mark.parametrize("spread", [0.0, 6.0])
def test_both_sides_of_the_hub_agree(spread: float) -> None:
    rng = np.random.default_rng(0)
    hub = load_catalog(bench_select.hub_sids(TINY, rng), TINY.num_codes)
    assert np.diff(hub.trie.offsets[2]).tolist() == [24] * 24
    work = bench_select.hub_work(hub, TINY, rng, bench_select.normal_logits, spread)
    check_same_lists(OpsSearch(work).run(), DenseSearch(work).run(), bench_select.NEAR)


def test_random_items_are_distinct_and_as_many_as_asked() -> None:
    sids = bench_select.random_sids(TINY, np.random.default_rng(0))
    assert sids.shape == (TINY.num_items, 3)
    assert len(set(map(tuple, sids.tolist()))) == TINY.num_items
    assert sids.max() < TINY.num_codes


def test_a_different_list_is_noticed() -> None:
    rng = np.random.default_rng(0)
    catalog = load_catalog(bench_select.random_sids(TINY, rng), TINY.num_codes)
    work = bench_select.search_work(catalog, TINY, rng, bench_select.normal_logits)
    right = OpsSearch(work).run()
    wrong = replace(right, nodes=np.roll(right.nodes, 1))
    with pytest.raises(AssertionError, match="rank 0 differs"):
        check_same_lists(right, wrong, 0.0)
    with pytest.raises(AssertionError, match="scores differ"):
        check_same_lists(right, replace(right, scores=right.scores + 1), 1e-4)
    other = replace(right, nodes=np.where(right.nodes == right.nodes[0], -5, right.nodes))
    with pytest.raises(AssertionError, match="lost by more"):
        check_same_lists(right, other, 1e-4)


def test_report_is_one_json_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    hyper = HyperParameters()
    write_checkpoint(tmp_path / "model", Network(NetworkConfig(VOCAB_SIZE), 3), hyper, "", [])
    sids = np.random.default_rng(0).integers(0, 64, (300, 3)).tolist()
    write_items(tmp_path / "items.jsonl", dict(enumerate(sids)))
    model = ["--model", str(tmp_path / "model"), "--model-items", str(tmp_path / "items.jsonl")]
    sizes = ["--width", "90", "--codes", "48", "--items", "900", "--runs", "9"]
    assert bench_select.main([*sizes, *model, "--json", "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(out.read_text())
    for key in (
        "select_ratio_to_dense",
        "select_ratio_without_norm",
        "select_ratio_hub",
        "select_ratio_hub_equal",
    ):
        assert report[key] > 0
    assert 0 <= report["rows_skipped_hub"] <= 1
    layouts = [level["layout"] for level in report["layouts"]["search"]]
    assert layouts == ["dense", "dense", "csr"]
    assert [level["max_fanout"] for level in report["layouts"]["hub"]] == [2, 48, 24]
    assert report["fresh_pages"]["cases"]["hub"]["timings"]["ops"]["runs"] == 9
    assert report["environment"]["torch_threads"] == 1
    assert report["trained_model"] == "model"
    assert report["kept_pages"]["cases"]["search_trained"]["ratio"] > 0


def test_report_says_when_there_is_no_trained_model(tmp_path: Path) -> None:
    report = bench_select.run(TINY, 0, tmp_path, tmp_path / "items.jsonl")
    assert report["trained_model"] == f"not run: no {tmp_path}"
    assert "search_trained" not in report["fresh_pages"]["cases"]


def test_too_few_runs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_select.main(["--runs", "8"])
    assert (
        "argument --runs: must be a whole number from 9 to 100000000, got '8'"
        in capsys.readouterr().err
    )


def test_pages_are_fresh_or_kept() -> None:
    """The 64 MiB temporary of a top-k, in a process of its own (the switches act on a whole process)."""
    code = (
        "import torch; from tools._bench.allocator import *; prepare_pages()\n"
        "scores = torch.zeros(1 << 22); run = lambda: scores.topk(9)\n"
        "for regime in (FRESH_PAGES, KEPT_PAGES):\n"
        "    set_pages(regime); run(); print(page_faults(run))"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    fresh, kept = (int(line) for line in printed.split())
    assert kept < 30 < fresh or not can_set_pages()


def test_cases_are_timed_in_turn_and_warm_ups_left_out() -> None:
    order: list[str] = []
    cases = {name: (lambda name=name: order.append(name)) for name in "abc"}
    timings = time_interleaved(cases, runs=3, warmup_runs=1)
    assert "".join(order) == "abc" + "cba" + "abc" + "cba"
    assert {t.runs for t in timings.values()} == {3}


def test_timing_is_the_median_with_its_spread() -> None:
    assert Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == Timing(3.5, 2.0, 5.0, 6)
