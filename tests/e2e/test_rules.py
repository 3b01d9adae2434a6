"""Rules through the whole engine: each search equals one on the catalogue rebuilt without what they take out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.catalogs import TAGS, random_catalog, scattered_tokens
from tests.helpers.engines import (
    Oracle,
    Recording,
    assert_expanded,
    kept_by,
    loaded_catalog,
    make_config,
    make_engine,
    record_batches,
    request_of,
    write_catalog,
)
from tests.helpers.oracle import Catalog, Item
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from xgr_runtime.config import CacheConfig, SchedulerConfig
from xgr_runtime.types import NORMALIZATIONS, RecRequest, Rules, Search

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from xgr_runtime import Engine
    from xgr_runtime.types import SearchResult

pytestmark = pytest.mark.e2e
VOCAB = 48
NUM_ITEMS = 150
TOKENS = scattered_tokens([5, 6, 7], VOCAB, seed=8)
ALL_TAGS = (*TAGS, "unknown:tag")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("model")
    catalog = random_catalog(11, NUM_ITEMS, TOKENS, share_hidden=0.1, share_tagged=0.3)
    return Oracle(write_tiny_model(folder, "qwen3", TinyShape(vocab_size=VOCAB)), catalog)


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, oracle: Oracle
) -> Iterator[tuple[Engine, Recording]]:
    file = write_catalog(tmp_path_factory.mktemp("catalog") / "items.xgr", oracle.catalog)
    config = make_config(
        oracle.folder,
        {"main": file},
        scheduler=SchedulerConfig(max_batch_rows=2048, max_batch_histories=4, max_wait_ms=0.0),
        # Fewer rows than expressions: rule sets are evicted and written again all the time.
        cache=CacheConfig(rule_rows=2, rule_cache_bytes=40_000),
    )
    with make_engine(config) as engine:
        yield engine, record_batches(engine)


def tags(max_size: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(ALL_TAGS), max_size=max_size).map(tuple)


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    groups = st.lists(st.sampled_from(ALL_TAGS), min_size=1, max_size=3).map(tuple)
    return Rules(
        require=tuple(draw(st.lists(groups, max_size=2))),
        exclude_tags=draw(tags(2)),
        exclude_item_ids=tuple(draw(st.lists(st.integers(0, NUM_ITEMS * 10), max_size=30))),
        exclude_keys=tuple(
            f"key-{i}" for i in draw(st.lists(st.integers(0, NUM_ITEMS * 10), max_size=5))
        ),
        exclude_history=draw(st.booleans()),
    )


@given(data=st.data())
@settings(max_examples=40)
def test_any_rules(running: tuple[Engine, Recording], oracle: Oracle, data: st.DataObject) -> None:
    engine, recording = running
    ids = [item.item_id for item in oracle.catalog.items]
    requests: list[RecRequest] = []
    for _ in range(data.draw(st.integers(1, 4))):
        history = data.draw(st.lists(st.sampled_from(ids), max_size=6))
        excluded = data.draw(st.lists(st.sampled_from(ids), max_size=120))
        drawn = data.draw(rules())
        rule = Rules(
            drawn.require,
            drawn.exclude_tags,
            (*drawn.exclude_item_ids, *excluded),
            drawn.exclude_keys,
            drawn.exclude_history,
        )
        search = Search(
            beam_width=data.draw(st.sampled_from([1, 3, 17, 200])),
            num_results=300,
            normalization=data.draw(st.sampled_from(NORMALIZATIONS)),
            rules=rule,
        )
        name = f"rules {len(recording.batches)} {len(requests)}"
        requests.append(request_of(name, history, search))
    for request, reply in zip(requests, engine.recommend(requests), strict=True):
        assert request.history_item_ids is not None
        (search,), (result,) = request.searches, reply.results
        trace = recording.trace(request.request_id, loaded_catalog(engine))
        history = request.history_item_ids.tolist()
        oracle.check(result, trace, history, search)
        assert result.num_unknown_exclusions == num_unknown(search.rules, oracle.catalog)
        assert bool(result.reason) == (result.num_valid == 0)


def num_unknown(rules: Rules, catalog: Catalog) -> int:
    """Excluded ids and keys that no item has (each mention counts), and distinct excluded tags that none has."""
    ids = {item.item_id for item in catalog.items}
    keys = {item.key for item in catalog.items}
    return (
        sum(int(item_id) not in ids for item_id in rules.exclude_item_ids)
        + sum(key not in keys for key in rules.exclude_keys)
        + len(set(rules.exclude_tags) - set(TAGS))
    )


def only(engine: Engine, search: Search, history: list[int]) -> SearchResult:
    (reply,) = engine.recommend([request_of("one", history, search)])
    return reply.results[0]


def test_an_unknown_required_tag_is_an_empty_answer(
    running: tuple[Engine, Recording], oracle: Oracle
) -> None:
    engine, _ = running
    history = [oracle.catalog.items[0].item_id]
    result = only(engine, Search(rules=Rules(require=(("no:such",), (TAGS[0],)))), history)
    assert (result.status, result.num_valid, result.num_items) == ("ok", 0, 0)
    assert result.reason == "the catalogue knows none of the required tags no:such"
    assert result.sids.shape == (0, 3)
    assert result.keys == ()
    known = only(engine, Search(rules=Rules(require=(("no:such", TAGS[0]),))), history)
    assert known.num_items > 0
    assert known.reason == ""


def test_everything_excluded_is_an_empty_answer(
    running: tuple[Engine, Recording], oracle: Oracle
) -> None:
    engine, _ = running
    ids = tuple(item.item_id for item in oracle.catalog.items)
    history = [ids[0]]
    result = only(engine, Search(rules=Rules(exclude_item_ids=ids)), history)
    assert (result.status, result.num_valid, result.num_items) == ("ok", 0, 0)
    assert result.reason == "every item that passes the tags is excluded"
    tagged = tuple(item.item_id for item in oracle.catalog.items if TAGS[0] in item.tags)
    rule = Rules(require=((TAGS[0],),), exclude_item_ids=tagged)
    assert only(engine, Search(rules=rule), history).reason == result.reason
    contradiction = Rules(require=((TAGS[0],),), exclude_tags=(TAGS[0],))
    empty = only(engine, Search(rules=contradiction), history)
    assert empty.reason == "no servable item passes the required and excluded tags"
    assert only(engine, Search(), history).num_items == 10


@pytest.mark.parametrize("form", ["ids", "keys", "sids"])
def test_exclude_history_in_every_form(
    running: tuple[Engine, Recording], oracle: Oracle, form: str
) -> None:
    """By SID, every item of that SID is the history; otherwise the SID lives on through its other items."""
    engine, _ = running
    shared = next(
        items
        for sid in oracle.catalog.sids
        if len(items := [i for i in oracle.catalog.items if i.servable and i.sid == sid]) > 1
    )
    search = Search(beam_width=1000, num_results=1000, rules=Rules(exclude_history=True))
    first, others = shared[0], {item.item_id for item in shared[1:]}
    inputs = {
        "ids": {"history_item_ids": np.asarray([first.item_id])},
        "keys": {"history_keys": (first.key,)},
        "sids": {"history_sids": np.asarray([first.sid], dtype=np.uint32)},
    }
    (reply,) = engine.recommend([RecRequest("one", searches=(search,), **inputs[form])])  # type: ignore[arg-type]
    returned = set(reply.results[0].item_ids.tolist())
    servable = {item.item_id for item in oracle.catalog.items if item.servable}
    gone = {first.item_id} if form != "sids" else {first.item_id, *others}
    assert returned == servable - gone


def test_a_bucket_of_a_thousand_items(tmp_path: Path, oracle: Oracle) -> None:
    """One SID with 1,000 items, cut inside the bucket, with exclusions inside it."""
    rng = np.random.default_rng(0)
    many = tuple(Item(i, (1, 2, 3), float(rng.integers(3))) for i in range(1000))
    rest = tuple(Item(5000 + i, (i % 5, i % 6, i % 7), 1.0) for i in range(40))
    catalog = Catalog((*many, *rest), TOKENS)
    file = write_catalog(tmp_path / "items.xgr", catalog)
    excluded = tuple(range(0, 1000, 3))
    with make_engine(make_config(oracle.folder, {"main": file})) as engine:
        recording = record_batches(engine)
        for name, results, cap, rule in (
            ("whole", 2000, None, Rules()),
            ("cut", 500, None, Rules(exclude_item_ids=excluded)),
            ("capped", 30, 2, Rules(exclude_item_ids=excluded)),
            ("gone", 2000, None, Rules(exclude_item_ids=tuple(range(1000)))),
        ):
            search = Search(beam_width=50, num_results=results, max_items_per_sid=cap, rules=rule)
            (reply,) = engine.recommend([request_of(name, [5000, 5001], search)])
            rows = recording.trace(name, loaded_catalog(engine)).levels[-1]
            kept = kept_by(catalog, rule)
            assert_expanded(reply.results[0], rows, kept, results, cap)
            assert reply.results[0].num_valid == len(kept.sids) == len(rows)
