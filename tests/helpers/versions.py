"""Versions of one catalogue: files by number, an engine started on the first, and which version a reply came from.

Each version has item ids of its own range (version k: k * 10,000 onward), so one look at a reply says which version
answered it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.helpers.catalogs import random_catalog, scattered_tokens
from tests.helpers.engines import make_config, make_engine, write_catalog
from tests.helpers.oracle import Catalog
from xgr_runtime.config import BucketsConfig, CacheConfig, SchedulerConfig
from xgr_runtime.types import RecRequest, Search

if TYPE_CHECKING:
    from pathlib import Path

    from xgr_runtime import Engine
    from xgr_runtime.types import SearchResult

VOCAB = 64
RANGE = 10_000
TOKENS = scattered_tokens([8, 8, 8], VOCAB, seed=6)
PROMPT = np.asarray([1, 5, 9, 11], dtype=np.int64)


def version_of(number: int, num_items: int = 150) -> Catalog:
    """Other SIDs and other ids in every version."""
    catalog = random_catalog(number, num_items, TOKENS)
    items = [replace(item, item_id=number * RANGE + i) for i, item in enumerate(catalog.items)]
    return Catalog(tuple(items), TOKENS)


class Versions:
    """Catalogue files by number, written on first use; version names are v1, v2, ..."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.catalogs: dict[int, Catalog] = {}

    def path(self, number: int, num_items: int = 150) -> str:
        path = self._folder / f"{number}.xgr"
        if number not in self.catalogs:
            self.catalogs[number] = version_of(number, num_items)
            write_catalog(path, self.catalogs[number], f"v{number}")
        return str(path)


def start_engine(folder: Path, versions: Versions, num_slots: int = 2) -> Engine:
    config = make_config(
        folder,
        {"main": versions.path(1)},  # type: ignore[dict-item]
        scheduler=SchedulerConfig(
            max_batch_histories=4, max_batch_rows=2048, max_batch_tokens=512, max_wait_ms=0.0
        ),
        cache=CacheConfig(catalog_slots=num_slots),
        buckets=BucketsConfig(at_start=False, rows=(600, 1200)),  # exhaustive searches are 600 wide
    )
    return make_engine(config)


def ask(engine: Engine, version: str = "", **search: Any) -> SearchResult:
    request = RecRequest(
        prompt_token_ids=PROMPT,
        searches=(Search(catalog_version=version, beam_width=600, num_results=1000, **search),),
    )
    return engine.recommend([request])[0].results[0]


def assert_is_version(result: SearchResult, number: int, versions: Versions) -> None:
    """Every servable item of that version and nothing else: the search was exhaustive."""
    assert result.catalog_version == f"v{number}"
    expected = {i.item_id for i in versions.catalogs[number].items if i.servable}
    assert set(result.item_ids.tolist()) == expected


def state_of(engine: Engine) -> Any:
    described = engine.describe()
    return described["catalogs"], set(engine.catalogs.by_slot), described["num_free_pages"]


def device_bytes(engine: Engine) -> int:
    """Bytes of all slots, full or free."""
    named = engine.catalogs._names["main"]
    return sum(v.slot.nbytes for v in named.versions.values()) + sum(
        slot.nbytes for _, slot in named.free_slots
    )
