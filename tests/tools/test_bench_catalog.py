"""The catalogue benchmark on a small catalogue: its own checks pass and its answer has the promised keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tools.bench_catalog import Sizes, check_build, random_items, run
from xgr_runtime.xbeam.catalog import Catalog

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Sizes(num_items=3000, num_codes=32, few_exclusions=10, many_exclusions=2500, runs=1)


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
    )
    assert all(report[name] > 0 for name in numbers)
    assert set(report["cases"]["build"]["timings"]) == {"build", "lexsort", "open", "verify"}
    assert {"commit", "python", "numpy"} <= set(report["environment"])
    assert report["cases"]["build"]["timings"]["build"]["runs"] == 1


def test_the_check_is_red_for_other_items(tmp_path: Path) -> None:
    run(SMALL, tmp_path)
    items = random_items(SMALL, np.random.default_rng(0))
    with Catalog.open(tmp_path / "bench.catalog") as catalog:
        check_build(catalog, items)
        items.sids[17, 1] ^= 1
        with pytest.raises(SystemExit, match="does not give back the SIDs"):
            check_build(catalog, items)
