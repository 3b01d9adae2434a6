"""The whole product in seconds: a checkpoint, a catalogue file, an engine, requests with every option, the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.catalogs import random_catalog, scattered_tokens
from tests.helpers.engines import (
    Oracle,
    Recording,
    loaded_catalog,
    make_config,
    make_engine,
    record_batches,
    request_of,
    write_catalog,
)
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from tests.helpers.waiting import wait_until_idle
from xgr_runtime import Engine, Rules, Search

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.helpers.oracle import Catalog

VOCAB = 64
WIDTHS = (4, 30, 12)
TOKENS = scattered_tokens([10, 12, 14], VOCAB, seed=1, share_absent=0.2)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return random_catalog(0, 400, TOKENS, share_hidden=0.1, skew=0.5)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory, catalog: Catalog) -> Oracle:
    folder = write_tiny_model(
        tmp_path_factory.mktemp("model"), "qwen3", TinyShape(vocab_size=VOCAB)
    )
    return Oracle(folder, catalog)


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, catalog: Catalog, oracle: Oracle
) -> Iterator[tuple[Engine, Recording]]:
    file = write_catalog(tmp_path_factory.mktemp("catalog") / "items.xgr", catalog)
    with make_engine(make_config(oracle.folder, {"main": file})) as engine:
        yield engine, record_batches(engine)


SEARCHES = {
    "defaults": Search(),
    "greedy": Search(beam_width=1),
    "everything": Search(beam_width=1000, num_results=1000),
    "growing and shrinking": Search(beam_widths=WIDTHS, num_results=100),
    "level": Search(beam_width=20, normalization="level"),
    "valid": Search(beam_width=20, normalization="valid"),
    "one item a SID": Search(beam_width=30, num_results=20, max_items_per_sid=1),
    "rules": Search(
        beam_width=25,
        num_results=50,
        normalization="valid",
        rules=Rules(
            require=(("category:shoes", "category:hats"),),
            exclude_tags=("region:us",),
            exclude_history=True,
        ),
    ),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_the_answer_is_the_specified_one(
    running: tuple[Engine, Recording], catalog: Catalog, oracle: Oracle, name: str
) -> None:
    engine, recording = running
    rng = np.random.default_rng(len(name))
    history = rng.choice([item.item_id for item in catalog.items], 6).tolist()
    search = SEARCHES[name]
    (reply,) = engine.recommend([request_of(name, history, search)])
    trace = recording.trace(name, loaded_catalog(engine))
    stats = oracle.check(reply.results[0], trace, history, search)
    assert stats.num_rows > 0
    assert (reply.num_history_used, reply.num_history_unknown) == (6, 0)
    assert reply.num_prompt_tokens == 1 + 6 * 3


def test_all_at_once_is_the_same(
    running: tuple[Engine, Recording], catalog: Catalog, oracle: Oracle
) -> None:
    engine, _ = running
    history = [item.item_id for item in catalog.items[:5]]
    requests = [request_of(f"{name} again", history, search) for name, search in SEARCHES.items()]
    for reply, search in zip(engine.recommend(requests), SEARCHES.values(), strict=True):
        if search.num_results == 1000:
            oracle.check(reply.results[0], None, history, search)
        assert reply.results[0].num_items > 0
        assert np.isfinite(reply.results[0].scores).all()


def test_a_description_names_what_runs(running: tuple[Engine, Recording]) -> None:
    engine, _ = running
    wait_until_idle(engine)  # also when nothing but its start has run
    described = engine.describe()
    (versions,) = [c["versions"] for c in described["catalogs"].values()]
    assert described["catalogs"]["main"]["active"] in versions
    assert described["num_unanswered"] == 0
    assert described["num_free_pages"] == engine.pages.allocator.num_pages - 1
