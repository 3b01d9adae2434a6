"""An answer does not depend on its batch: mates, order, padding, or which run it is.

Bit-identical where the bucket (the padded sizes, which fix the shapes of every op) and the place are the same;
elsewhere the sums may be ordered differently, and the same-answer rule decides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.catalogs import TAGS, random_catalog, scattered_tokens
from tests.helpers.engines import (
    Oracle,
    Recording,
    items_of,
    loaded_catalog,
    make_config,
    make_engine,
    prompt_of,
    recommend_together,
    record_batches,
    same_bits,
    started_patient,
    write_catalog,
)
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from xgr_runtime.config import CacheConfig, LimitsConfig, SchedulerConfig
from xgr_runtime.types import NORMALIZATIONS, RecRequest, Rules, Search

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.helpers.oracle import Catalog
    from xgr_runtime import Engine
    from xgr_runtime.types import Normalization, RecResult

pytestmark = pytest.mark.e2e
MAX_ITEMS = 20
VOCAB = 80
TOKENS = scattered_tokens([12, 11, 13], VOCAB, seed=4, share_absent=0.1)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return random_catalog(2, 600, TOKENS, share_hidden=0.05, skew=0.3)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory, catalog: Catalog) -> Oracle:
    folder = tmp_path_factory.mktemp("model")
    return Oracle(write_tiny_model(folder, "qwen3", TinyShape(vocab_size=VOCAB)), catalog)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, catalog: Catalog) -> Path:
    return write_catalog(tmp_path_factory.mktemp("catalog") / "items.xgr", catalog)


def engine_of(oracle: Oracle, file: Path) -> Engine:
    return make_engine(
        make_config(
            oracle.folder,
            {"main": file},
            limits=LimitsConfig(
                max_prompt_tokens=1 + 3 * MAX_ITEMS, max_history_items=MAX_ITEMS, max_beam_width=600
            ),
            scheduler=SchedulerConfig(
                max_batch_histories=8,
                max_batch_tokens=512,
                max_batch_rows=4096,
            ),
            # A cached prefix makes a smaller prefill, hence another bucket.
            cache=CacheConfig(prefix_cache=False),
        )
    )


@pytest.fixture(scope="module")
def running(oracle: Oracle, file: Path) -> Iterator[tuple[Engine, Recording]]:
    """Waits until eight requests fill a batch, or as many as `recommend_together` is given."""
    with started_patient(engine_of(oracle, file)) as engine:
        yield engine, record_batches(engine)


@pytest.fixture(scope="module")
def lone(oracle: Oracle, file: Path) -> Iterator[tuple[Engine, Recording]]:
    """Waits for nobody."""
    with engine_of(oracle, file) as engine:
        yield engine, record_batches(engine)


def mixed_requests(catalog: Catalog, normalization: Normalization, seed: int) -> list[RecRequest]:
    """Eight requests that differ in everything but the normalisation, which is what groups a batch."""
    rng = np.random.default_rng(seed)
    ids = np.asarray([item.item_id for item in catalog.items])
    by_id = items_of(catalog)
    widths: list[tuple[int, ...]] = [
        (1, 1, 1), (9, 9, 9), (3, 40, 7), (12, 100, 300),
        (12, 5, 2), (600, 600, 600), (2, 2, 64), (33, 1, 33),
    ]  # fmt: skip
    lengths = [0, 1, MAX_ITEMS, 2, MAX_ITEMS + 5, 7, 1, 13]
    rules = [
        Rules(),
        Rules(exclude_history=True),
        Rules(require=((TAGS[0], TAGS[1]), (TAGS[2],))),
        Rules(exclude_tags=(TAGS[3],), exclude_history=True),
        Rules(exclude_item_ids=tuple(ids[::3].tolist())),
        Rules(exclude_keys=tuple(by_id[i].key for i in ids[1::4].tolist())),
        Rules(require=((TAGS[4],),), exclude_item_ids=tuple(ids[:50].tolist())),
        Rules(exclude_tags=TAGS[:2]),
    ]
    requests = []
    for i, (width, length, rule) in enumerate(zip(widths, lengths, rules, strict=True)):
        history = rng.choice(ids, length)
        search = Search(
            beam_widths=width,
            num_results=2 * max(width),
            normalization=normalization,
            rules=rule,
            return_level_scores=bool(i % 2),
            max_items_per_sid=(None, 1, 2)[i % 3],
        )
        request = RecRequest(f"{normalization}-{seed}-{i}", searches=(search,))
        if i % 4 == 0 or rule.exclude_history:
            request = replace(request, history_item_ids=history)
        elif i % 4 == 1:
            keys = tuple(by_id[item].key for item in history.tolist())
            request = replace(request, history_keys=keys)
        elif i % 4 == 2:
            sids = np.asarray([by_id[item].sid for item in history.tolist()], dtype=np.uint32)
            request = replace(request, history_sids=sids.reshape(-1, 3))
        else:
            prompt = prompt_of(catalog, history.tolist())
            request = replace(request, prompt_token_ids=np.asarray(prompt))
        requests.append(request)
    return requests


def history_of(request: RecRequest, catalog: Catalog) -> list[int]:
    """Item ids of a request's whole history, where it has any."""
    if request.history_item_ids is not None:
        return list(map(int, request.history_item_ids))
    if request.history_keys is not None:
        by_key = {item.key: item.item_id for item in catalog.items}
        return [by_key[key] for key in request.history_keys]
    if request.history_sids is not None:
        by_sid = {item.sid: item.item_id for item in catalog.items}
        return [by_sid[tuple(sid)] for sid in request.history_sids.tolist()]
    return []


def check(
    request: RecRequest, reply: RecResult, recording: Recording, engine: Engine, oracle: Oracle
) -> None:
    """One reply against transformers on the rebuilt catalogue."""
    history = history_of(request, oracle.catalog)
    prompt = prompt_of(oracle.catalog, history[-MAX_ITEMS:])
    if request.prompt_token_ids is not None:
        prompt = request.prompt_token_ids.tolist()
    assert reply.num_prompt_tokens == len(prompt)
    trace = recording.trace(request.request_id, loaded_catalog(engine))
    (search,) = request.searches
    oracle.check(reply.results[0], trace, history, search, prompt)


def again(requests: Sequence[RecRequest], suffix: str) -> list[RecRequest]:
    return [replace(r, request_id=f"{r.request_id}{suffix}") for r in requests]


def bucket(engine: Engine, recording: Recording, request_id: str) -> object:
    return engine.runner.sizes.of(recording.batch_of(request_id))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_mixed_batch(
    running: tuple[Engine, Recording],
    lone: tuple[Engine, Recording],
    catalog: Catalog,
    oracle: Oracle,
    normalization: Normalization,
) -> None:
    engine, recording = running
    requests = mixed_requests(catalog, normalization, 1)
    together = engine.recommend(requests)
    batches = {recording.batch_of(r.request_id).batch_id for r in requests}
    assert len(batches) == 1, "eight requests of one group fill a batch"
    permuted = [requests[i] for i in (5, 2, 7, 0, 3, 6, 1, 4)]
    for request, reply in zip(requests, together, strict=True):
        check(request, reply, recording, engine, oracle)
    repeated = engine.recommend(again(requests, " repeated"))
    for one, two in zip(together, repeated, strict=True):
        assert same_bits(one, two)
    other_order = again(permuted, " permuted")
    for request, reply in zip(other_order, engine.recommend(other_order), strict=True):
        check(request, reply, recording, engine, oracle)
    engine, recording = lone
    for request in again(requests, " alone"):
        (reply,) = engine.recommend([request])
        check(request, reply, recording, engine, oracle)
        (twice,) = engine.recommend([replace(request, request_id=f"{request.request_id} twice")])
        assert same_bits(reply, twice)


def test_mates_of_the_same_bucket_change_no_bit(
    running: tuple[Engine, Recording], catalog: Catalog
) -> None:
    engine, recording = running
    ids = [item.item_id for item in catalog.items]
    search = Search(beam_widths=(8, 24, 16), num_results=64, return_level_scores=True)

    def request(name: str, history: Sequence[int], search: Search = search) -> RecRequest:
        return RecRequest(name, history_item_ids=np.asarray(history), searches=(search,))

    first = request("first", ids[:6])
    other = replace(search, rules=Rules(exclude_tags=TAGS[:1], exclude_item_ids=tuple(ids[:100])))
    results = []
    for name, mates in (
        ("a", [request("mate a", ids[10:16])]),
        ("b", [request("mate b", ids[40:46], other)]),
        ("c", [request("mate c", ids[7:13], replace(other, max_items_per_sid=1))]),
    ):
        batch = [*again([first], f" {name}"), *mates]
        results.append(recommend_together(engine, batch)[0])
        assert recording.of(f"first {name}")[0].num_searches == 2
    assert len({bucket(engine, recording, f"first {name}") for name in "abc"}) == 1
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def test_normalisations_never_share_a_batch(
    running: tuple[Engine, Recording], catalog: Catalog, oracle: Oracle
) -> None:
    engine, recording = running
    requests = [
        request
        for trio in zip(*(mixed_requests(catalog, n, 2) for n in NORMALIZATIONS), strict=True)
        for request in trio
    ]
    for request, reply in zip(requests, engine.recommend(requests), strict=True):
        check(request, reply, recording, engine, oracle)
    for batch, _ in recording.batches[-3:]:
        (group,) = batch.groups
        assert {request_id.split("-")[0] for request_id in batch.request_ids} == {
            group.normalization
        }


def test_the_loop_counts_only_real_rows(
    running: tuple[Engine, Recording], catalog: Catalog
) -> None:
    """Three searches in a bucket of four: the padded one has no live root row."""
    engine, recording = running
    history = np.asarray([catalog.items[0].item_id])
    search = Search(beam_width=5)
    requests = [
        RecRequest(f"count {i}", history_item_ids=history, searches=(search,)) for i in range(3)
    ]
    recommend_together(engine, requests)
    group, output, _ = recording.of("count 0")
    assert group.num_searches == 3
    assert output.num_live_rows == 3 * (1 + 5 + 5)
