"""Memory over cycles of load, activate, retire: what a version took is given back, on the host and on the device.

The first two cycles are left out: they allocate the second slot, which stays for the next load by design, and warm up
the allocators. After them a version that stayed would show with all its bytes at every cycle.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.engines import make_config, make_engine
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from tests.helpers.versions import device_bytes
from tools._bench.memory import memory_mib
from xgr_runtime.config import SchedulerConfig
from xgr_runtime.types import RecRequest, Rules, Search
from xgr_runtime.xbeam.catalog_build import build_catalog

if TYPE_CHECKING:
    from pathlib import Path

    from xgr_runtime import Engine

NUM_CODES = 256
WARM_UP = 2


def write_version(path: Path, number: int, num_items: int) -> float:
    """A version with every kind of section; returns the size of its file, MiB."""
    rng = np.random.default_rng(number)
    build_catalog(
        path,
        sids=rng.integers(0, NUM_CODES, (num_items, 3), np.int32),
        item_ids=number * num_items + rng.permutation(num_items),
        keys=(f"v{number}-{row}" for row in range(num_items)),
        titles=(f"The title of row {row}" for row in range(num_items)),
        weights=rng.random(num_items),
        tags={"even": np.arange(0, num_items, 2), "third": np.arange(0, num_items, 3)},
        num_codes=[NUM_CODES] * 3,
        token_offsets=[0, 0, 0],
        version=f"v{number}",
    )
    return path.stat().st_size / 2**20


def ask(engine: Engine) -> str:
    """With rules, so that rule sets and rule rows are made; returns the version that answered."""
    rules = Rules(require=(("even",),), exclude_tags=("third",), exclude_item_ids=(5,))
    search = Search(beam_width=8, num_results=5, rules=rules)
    request = RecRequest(prompt_token_ids=np.array([3, 4]), searches=(search,))
    (result,) = engine.recommend([request])
    assert result.results[0].num_items == 5
    return result.results[0].catalog_version


def anonymous_mib() -> float:
    gc.collect()
    return memory_mib()["anonymous_mib"]


def growth_over_cycles(folder: Path, num_items: int, cycles: int) -> tuple[float, float, set[int]]:
    """MiB that the process grew by after the warm-up, MiB of one file, and the sizes of all slots that were seen."""
    paths = [folder / f"{number}.xgr" for number in (1, 2)]
    sizes = [write_version(path, number, num_items) for number, path in enumerate(paths, 1)]
    model = write_tiny_model(folder / "model", "qwen3", TinyShape(vocab_size=NUM_CODES))
    scheduler = SchedulerConfig(max_batch_histories=2, max_batch_rows=2048, max_batch_tokens=512)
    config = make_config(model, {"main": paths[0]}, scheduler=scheduler)
    after: list[float] = []
    device: set[int] = set()
    with make_engine(config) as engine:
        for cycle in range(WARM_UP + cycles):
            old, new = 1 + cycle % 2, 2 - cycle % 2
            assert ask(engine) == f"v{old}"
            assert engine.load_catalog("main", str(paths[new - 1])) == f"v{new}"
            engine.activate_catalog("main", f"v{new}")
            assert ask(engine) == f"v{new}"
            engine.retire_catalog("main", f"v{old}")
            after.append(anonymous_mib())
            if cycle >= WARM_UP:
                device.add(device_bytes(engine))
    # Two versions take turns and differ by some pages: like is compared with like.
    return max(after[-2:]) - max(after[WARM_UP - 2 : WARM_UP]), min(sizes), device


def test_cycles_give_memory_back(tmp_path: Path) -> None:
    growth, file_mib, device = growth_over_cycles(tmp_path, num_items=60_000, cycles=6)
    assert file_mib > 4, "one version that stayed would be seen"
    assert growth < file_mib, f"grew by {growth:.1f} MiB over 6 cycles of {file_mib:.1f} MiB"
    assert len(device) == 1, f"bytes of the slots changed: {device}"


@pytest.mark.slow
def test_many_cycles_of_a_million_items_give_memory_back(tmp_path: Path) -> None:
    growth, file_mib, device = growth_over_cycles(tmp_path, num_items=1_000_000, cycles=20)
    print(f"grew by {growth:.1f} MiB over 20 cycles of {file_mib:.1f} MiB")  # noqa: T201
    assert growth < file_mib / 4
    assert len(device) == 1
