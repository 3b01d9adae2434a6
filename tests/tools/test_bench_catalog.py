"""The catalogue benchmark on a small catalogue: its own checks pass and its answer has the promised keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tools._bench.catalog_size import run_child
from tools.bench_catalog import Sizes, check_build, random_items, run
from xgr_runtime.xbeam.catalog import Catalog

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Sizes(
    num_items=3000,
    num_codes=32,
    few_exclusions=10,
    many_exclusions=2500,
    runs=1,
    jsonl_items=500,
    jsonl_runs=1,
    array_items=2000,
)


def test_small_run(tmp_path: Path) -> None:
    report = run(SMALL, tmp_path)
    numbers = (
        "build_ratio_to_lexsort",
        "file_mib",
        "open_ms",
        "verify_ms",
        "rule_set_ms",
        "exclude_few_ms",
        "exclude_many_ms",
        "jsonl_1m_s",
        "build_10m_s",
    )
    assert all(report[name] > 0 for name in numbers)
    assert set(report["cases"]["build"]["timings"]) == {"build", "lexsort", "open", "verify"}
    assert {"commit", "python", "numpy"} <= set(report["environment"])
    assert report["cases"]["build"]["timings"]["build"]["runs"] == 1
    # A process that imports numpy has at least this; one that counted its parent would have all of pytest and torch.
    for name in ("peak_rss_mib_jsonl_1m", "peak_rss_mib_10m"):
        assert 20 < report[name] < 200, name
    assert not list(tmp_path.glob("bench_arrays*")), "files at size do not stay"


def test_a_child_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match=r"(?s)-c 1/0 failed:.*ZeroDivisionError"):
        run_child(["-c", "1/0"])


def test_the_check_is_red_for_other_items(tmp_path: Path) -> None:
    run(SMALL, tmp_path)
    items = random_items(SMALL, np.random.default_rng(0))
    with Catalog.open(tmp_path / "bench.catalog") as catalog:
        check_build(catalog, items)
        items.sids[17, 1] ^= 1
        with pytest.raises(SystemExit, match="does not give back the SIDs"):
            check_build(catalog, items)
