"""Published semantic ids with collisions, and deep random ones: only valid items, expanded as specified, up to W 1,024."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.catalogs import contiguous_tokens, random_catalog, scattered_tokens
from tests.helpers.engines import (
    Oracle,
    assert_expanded,
    items_of,
    loaded_catalog,
    make_config,
    make_engine,
    record_batches,
    request_of,
    write_catalog,
)
from tests.helpers.oracle import Catalog, Item
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from xgr_runtime.config import LimitsConfig, SchedulerConfig
from xgr_runtime.types import NORMALIZATIONS, Search

if TYPE_CHECKING:
    from pathlib import Path

WIDE = LimitsConfig(max_prompt_tokens=128, max_beam_width=1024, max_num_results=5000)
ROWS = SchedulerConfig(max_batch_rows=2048, max_batch_tokens=512)
SETS = {
    "beauty": ("amazon-beauty", "sid", 12_101),
    "beauty rqvae": ("amazon-beauty", "sid_rqvae", 11_499),
    "scientific": ("amazon-scientific", "sid", 4_344),
    "scientific native": ("amazon-scientific", "sid_native", 3_469),
}


def read_amazon(folder: Path, field: str) -> Catalog:
    """Items of a published index; weights make the order inside a SID differ from the order of ids."""
    lines = (folder / "items.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    items = tuple(Item(row["id"], tuple(row[field]), float(row["id"] % 3)) for row in rows)
    return Catalog(items, contiguous_tokens([256] * 4, 2))


@pytest.mark.shared_data
@pytest.mark.e2e
@pytest.mark.parametrize("name", SETS)
def test_published_catalogs(name: str, tmp_path: Path, shared_data: Path) -> None:
    folder, field, num_sids = SETS[name]
    catalog = read_amazon(shared_data / folder, field)
    assert len(catalog.sids) == num_sids
    vocab_size = 2 + 4 * 256
    model = write_tiny_model(tmp_path / "model", "qwen3", TinyShape(vocab_size=vocab_size))
    file = write_catalog(tmp_path / "items.xgr", catalog)
    by_id = items_of(catalog)
    rng = np.random.default_rng(3)
    searches = [
        Search(beam_width=1, num_results=1),
        Search(beam_width=50, num_results=10),
        Search(beam_width=512, num_results=512, max_items_per_sid=1, normalization="level"),
        Search(beam_width=1000, num_results=1500, normalization="valid"),
        Search(beam_width=1024, num_results=5000),
        Search(beam_width=1024, num_results=5000, max_items_per_sid=2),
    ]
    config = make_config(model, {"main": file}, limits=WIDE, scheduler=ROWS)
    with make_engine(config) as engine:
        recording = record_batches(engine)
        requests = [
            request_of(str(i), rng.choice(list(by_id), int(rng.integers(1, 9))).tolist(), search)
            for i, search in enumerate(searches)
        ]
        for request, reply in zip(requests, engine.recommend(requests), strict=True):
            (result,), (search,) = reply.results, request.searches
            rows = recording.trace(request.request_id, loaded_catalog(engine)).levels[-1]
            assert result.num_valid == len(rows) == search.beam_width
            assert len({sid for sid, _ in rows}) == len(rows)
            assert_expanded(
                result, rows, catalog, search.num_results or 0, search.max_items_per_sid
            )
            ids = result.item_ids.tolist()
            assert len(set(ids)) == len(ids)
            assert [by_id[item].sid for item in ids] == [tuple(s) for s in result.sids.tolist()]
            assert (np.diff(result.scores) <= 0).all()
            if search.num_results == 5000 and search.max_items_per_sid is None:
                expected = sum(item.sid in dict(rows) for item in catalog.items)
                assert result.num_items == expected >= len(rows)


@pytest.mark.e2e
@pytest.mark.parametrize("num_levels", [1, 2, 4, 6])
def test_other_depths(tmp_path: Path, num_levels: int) -> None:
    """Under every normalisation, in one engine."""
    tokens = scattered_tokens([9] * num_levels, 48, seed=num_levels, share_absent=0.1)
    catalog = random_catalog(num_levels, 300, tokens, skew=0.4)
    model = write_tiny_model(tmp_path / "model", "qwen2", TinyShape(vocab_size=48))
    oracle = Oracle(model, catalog)
    file = write_catalog(tmp_path / "items.xgr", catalog)
    history = [item.item_id for item in catalog.items[:4]]
    with make_engine(make_config(model, {"main": file}, limits=WIDE)) as engine:
        recording = record_batches(engine)
        for normalization, width in itertools.product(NORMALIZATIONS, (1, 9, 60, 1024)):
            search = Search(
                beam_width=width,
                num_results=2 * width,
                normalization=normalization,
                return_level_scores=True,
            )
            name = f"{normalization} {width}"
            (reply,) = engine.recommend([request_of(name, history, search)])
            trace = recording.trace(name, loaded_catalog(engine))
            oracle.check(reply.results[0], trace, history, search)
            levels = reply.results[0].level_scores
            assert levels is not None
            np.testing.assert_allclose(levels.sum(axis=1), reply.results[0].scores, rtol=1e-5)
            if width == 1024:
                assert reply.results[0].num_valid == len(catalog.sids)


@pytest.mark.e2e
def test_catalogs_of_different_depths_in_one_engine(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "llama", TinyShape(vocab_size=48))
    catalogs, files = {}, {}
    for num_levels in (2, 5):
        tokens = scattered_tokens([8] * num_levels, 48, seed=num_levels)
        catalogs[f"{num_levels} levels"] = random_catalog(num_levels, 120, tokens)
    for name, catalog in catalogs.items():
        files[name] = write_catalog(tmp_path / f"{name}.xgr", catalog)
    with make_engine(make_config(model, files)) as engine:
        recording = record_batches(engine)
        requests, histories = [], {}
        for i in range(12):
            name = list(catalogs)[i % 2]
            histories[str(i)] = [item.item_id for item in catalogs[name].items[i : i + 3]]
            search = Search(catalog=name, beam_width=20, num_results=200)
            requests.append(request_of(str(i), histories[str(i)], search))
        for request, reply in zip(requests, engine.recommend(requests), strict=True):
            (search,) = request.searches
            oracle = Oracle(model, catalogs[search.catalog])
            trace = recording.trace(request.request_id, loaded_catalog(engine, search.catalog))
            oracle.check(reply.results[0], trace, histories[request.request_id], search)
