"""Returning users: answers with the prefix cache are those without it, whatever was cached, evicted or swapped.

Two engines get the same traffic, one with the cache and few pages, one without it. Lists that are not equal row by row
within the tolerance of a score are judged by the same-answer rule against transformers, both of them; and every n-th
answer is judged so anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.catalogs import random_catalog, scattered_tokens
from tests.helpers.engines import (
    Oracle,
    loaded_catalog,
    make_config,
    make_engine,
    prompt_of,
    record_batches,
    request_of,
    same_bits,
    write_catalog,
)
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from xgr_runtime.config import CacheConfig, LimitsConfig, SchedulerConfig
from xgr_runtime.kvcache.allocator import num_pages_of
from xgr_runtime.types import Rules, Search

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.helpers.engines import Recording
    from tests.helpers.oracle import Catalog
    from xgr_runtime import Engine, RecResult

pytestmark = pytest.mark.e2e
T = 1e-4
VOCAB = 80
TOKENS = scattered_tokens([12, 11, 13], VOCAB, seed=4, share_absent=0.1)
MAX_ITEMS = 12
MAX_TOKENS = 1 + 3 * MAX_ITEMS
PAGE = 4
NUM_PAGES = 1 + 40  # four of the longest histories


@dataclass
class Side:
    """One engine and what its batches did."""

    engine: Engine
    recording: Recording


@dataclass
class Sides:
    """The engine with the cache, the one without, and the oracle of each loaded version."""

    cached: Side
    plain: Side
    oracles: dict[str, Oracle]
    catalogs: dict[str, Catalog]
    files: dict[str, Path]
    num_equal: int = 0
    num_judged: int = 0
    versions: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    folder = write_tiny_model(
        tmp_path_factory.mktemp("model"), "qwen3", TinyShape(vocab_size=VOCAB)
    )
    first = random_catalog(2, 300, TOKENS, share_hidden=0.05, skew=0.3)
    catalogs = {"v1": first, "v2": first.keep(lambda item: item.item_id % 5 != 0)}
    place = tmp_path_factory.mktemp("catalogs")
    files = {
        version: write_catalog(place / f"{version}.xgr", catalog, version)
        for version, catalog in catalogs.items()
    }

    def engine_of(*, prefix_cache: bool) -> Engine:
        return make_engine(
            make_config(
                folder,
                {"main": files["v1"]},
                limits=LimitsConfig(
                    max_prompt_tokens=MAX_TOKENS, max_history_items=MAX_ITEMS, max_beam_width=64
                ),
                scheduler=SchedulerConfig(
                    max_batch_histories=4, max_batch_tokens=128, max_batch_rows=256, max_wait_ms=5.0
                ),
                cache=CacheConfig(
                    page_size_tokens=PAGE, num_pages=NUM_PAGES, prefix_cache=prefix_cache
                ),
            )
        )

    with engine_of(prefix_cache=True) as cached, engine_of(prefix_cache=False) as plain:
        yield Sides(
            Side(cached, record_batches(cached)),
            Side(plain, record_batches(plain)),
            {version: Oracle(folder, catalog) for version, catalog in catalogs.items()},
            catalogs,
            files,
        )


def is_row_by_row_equal(one: RecResult, two: RecResult) -> bool:
    a, b = one.results[0], two.results[0]
    return bool(
        a.num_valid == b.num_valid
        and np.array_equal(a.item_ids, b.item_ids)
        and np.allclose(a.scores, b.scores, rtol=0, atol=T)
    )


def judge(
    sides: Sides, side: Side, reply: RecResult, history: Sequence[int], search: Search
) -> None:
    result = reply.results[0]
    oracle = sides.oracles[result.catalog_version]
    catalog = loaded_catalog(side.engine, version=result.catalog_version)
    trace = side.recording.trace(reply.request_id, catalog)
    known = {item.item_id for item in oracle.catalog.items}
    kept = [item for item in history if item in known][-MAX_ITEMS:]
    prompt = prompt_of(oracle.catalog, kept)
    oracle.check(result, trace, history, search, prompt, T)
    sides.num_judged += 1


def swap(sides: Sides, version: str) -> None:
    for side in (sides.cached, sides.plain):
        loaded = side.engine.describe()["catalogs"]["main"]["versions"]
        if version not in loaded:
            side.engine.load_catalog("main", str(sides.files[version]))
        side.engine.activate_catalog("main", version)


def test_growing_histories_moving_windows_pressure_and_swaps(sides: Sides) -> None:
    rng = np.random.default_rng(7)
    ids = {version: {item.item_id for item in c.items} for version, c in sides.catalogs.items()}
    every = sorted(ids["v1"] | ids["v2"])
    histories = {user: rng.choice(every, 3).tolist() for user in range(8)}
    num_cached = num_tokens = num_moved = num_partial = 0
    starts: set[tuple[int, ...]] = set()
    for turn in range(60):
        if turn % 15 == 14:
            swap(sides, "v2" if turn % 2 == 0 else "v1")
        users = rng.choice(8, int(rng.integers(1, 5)), replace=False).tolist()
        asked = {}
        for user in users:
            if len(histories[user]) > MAX_ITEMS + 5:
                histories[user] = rng.choice(every, 3).tolist()  # somebody new
            histories[user] += rng.choice(every, int(rng.integers(1, 4))).tolist()
            width = int(rng.integers(1, 40))
            rules = Rules(exclude_history=bool(rng.integers(2)))
            asked[f"{turn}-{user}"] = (
                list(histories[user]),
                Search(beam_width=width, num_results=2 * width, rules=rules),
            )
        requests = [request_of(name, *what) for name, what in asked.items()]
        with_cache = sides.cached.engine.recommend(requests)
        without = sides.plain.engine.recommend(requests)
        for one, two in zip(with_cache, without, strict=True):
            history, search = asked[one.request_id]
            assert two.num_cached_tokens == 0
            num_partial += one.num_cached_tokens % PAGE > 0
            assert one.num_cached_tokens < one.num_prompt_tokens == two.num_prompt_tokens
            version = one.results[0].catalog_version
            assert two.results[0].catalog_version == version
            known = [item for item in history if item in ids[version]]
            start = tuple(known[-MAX_ITEMS:][:2])
            if len(known) > MAX_ITEMS and start not in starts:
                # No window began like this: at most the first item is another history's too.
                assert one.num_cached_tokens <= PAGE
                num_moved += 1
            starts.add(start)
            num_cached += one.num_cached_tokens
            num_tokens += one.num_prompt_tokens
            sides.versions.add(version)
            if is_row_by_row_equal(one, two):
                sides.num_equal += 1
            else:
                judge(sides, sides.plain, two, history, search)
                judge(sides, sides.cached, one, history, search)
        if turn % 4 == 0:
            judge(sides, sides.cached, with_cache[0], *asked[with_cache[0].request_id])
        for side in (sides.cached, sides.plain):
            side.engine.pages.check_conservation()
    described = sides.cached.engine.describe()
    assert sides.versions == {"v1", "v2"}
    assert num_moved > 15
    assert num_cached > 0.2 * num_tokens
    assert num_partial > 30
    assert described["num_prefix_evicted_pages"] > 50, "there was no pressure"
    assert described["num_prefix_cached_tokens"] == num_cached
    assert sides.num_judged >= 15
    plain = sides.plain.engine.describe()
    assert (plain["num_cached_pages"], plain["num_prefix_cached_tokens"]) == (0, 0)


def test_a_repeated_request_is_a_hit_and_after_a_reset_a_miss(sides: Sides) -> None:
    engine = sides.cached.engine
    engine.reset_prefix_cache()
    history = [item.item_id for item in sides.catalogs["v1"].items][:8]
    request = request_of("again", history, Search(beam_width=8))
    first, second = engine.recommend([request]), engine.recommend([request])
    num_tokens = first[0].num_prompt_tokens
    assert num_tokens > PAGE
    assert first[0].num_cached_tokens == 0
    assert second[0].num_cached_tokens == num_tokens - 1
    assert is_row_by_row_equal(first[0], second[0])
    freed = engine.reset_prefix_cache()
    assert freed == num_pages_of(num_tokens, PAGE)
    third = engine.recommend([request])
    assert same_bits(first[0], third[0])


def test_pages_of_a_failed_batch_are_not_reused(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sides.cached.engine
    engine.reset_prefix_cache()
    history = [item.item_id for item in sides.catalogs["v1"].items][20:28]
    request = request_of("fails", history, Search(beam_width=8))
    (expected,) = sides.plain.engine.recommend([request])

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the device lost its mind")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.state, "copy_to_host", broken)
        with pytest.raises(RuntimeError, match="lost its mind"):
            engine.recommend([request])
    assert engine.pages.num_cached == 0
    (reply,) = engine.recommend([request])
    assert reply.num_cached_tokens == 0
    assert is_row_by_row_equal(reply, expected)
