"""Users who return are found to the token, whatever the size of a page, and their answers are those without a cache.

What has to be found is read off the prompts alone: the longest beginning in common with any that was answered.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.e2e.test_prefix_reuse import MAX_ITEMS, MAX_TOKENS, T, is_row_by_row_equal
from tests.helpers.catalogs import random_catalog, scattered_tokens
from tests.helpers.engines import (
    Oracle,
    loaded_catalog,
    make_config,
    make_engine,
    prompt_of,
    record_batches,
    request_of,
    started_patient,
    write_catalog,
)
from tests.helpers.strict_device import StrictDevice
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from xgr_runtime.config import BucketsConfig, CacheConfig, LimitsConfig, SchedulerConfig
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.types import Search

if TYPE_CHECKING:
    from pathlib import Path

    from xgr_runtime import Engine

pytestmark = pytest.mark.e2e
VOCAB = 80
TOKENS = scattered_tokens([12, 11, 13], VOCAB, seed=4, share_absent=0.1)
LEAST = 8  # behind no full page fewer tokens are no find


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("model")
    model = write_tiny_model(folder, "qwen3", TinyShape(vocab_size=VOCAB))
    return Oracle(model, random_catalog(2, 300, TOKENS, skew=0.3))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Path:
    return write_catalog(tmp_path_factory.mktemp("catalog") / "items.xgr", oracle.catalog)


def engine_of(
    oracle: Oracle, file: Path, page_size: int, *, prefix_cache: bool = True, num_pages: int = 0
) -> Engine:
    """With pages of 16 on a device that captures graphs, with the rules of one."""
    config = make_config(
        oracle.folder,
        {"main": file},
        limits=LimitsConfig(
            max_prompt_tokens=MAX_TOKENS, max_history_items=MAX_ITEMS, max_beam_width=64
        ),
        scheduler=SchedulerConfig(max_batch_histories=2, max_batch_tokens=80, max_batch_rows=64),
        cache=CacheConfig(
            page_size_tokens=page_size, prefix_cache=prefix_cache, num_pages=num_pages
        ),
        buckets=BucketsConfig(rows=(32,), tokens=(16,), normalizations=()),
        allow_reference=True,
    )
    return make_engine(config, StrictDevice() if page_size == 16 else CpuDevice())


def num_common(one: list[int], two: list[int]) -> int:
    number = 0
    while number < min(len(one), len(two)) and one[number] == two[number]:
        number += 1
    return number


def expected(prompt: list[int], answered: list[list[int]], page_size: int) -> int:
    most = max((num_common(prompt[:-1], other) for other in answered), default=0)
    return most if most >= min(page_size, LEAST) else 0


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_every_token_in_common_is_found_and_answers_are_the_same(
    oracle: Oracle, file: Path, page_size: int
) -> None:
    rng, search = np.random.default_rng(page_size), Search(beam_width=16, num_results=32)
    every = [item.item_id for item in oracle.catalog.items]
    answered: list[list[int]] = []
    num_partial = 0
    with ExitStack() as stack:
        cached = stack.enter_context(started_patient(engine_of(oracle, file, page_size)))
        plain = stack.enter_context(engine_of(oracle, file, page_size, prefix_cache=False))
        recording = record_batches(cached)
        start = rng.choice(every, 4).tolist()
        users = {user: start[: int(rng.integers(2, 5))] for user in range(4)}
        num_captures = cached.worker.graphs.num_captures
        for turn in range(14):
            # Two in one batch: what one computes is not found by the other yet.
            pair = rng.choice(4, 2, replace=False).tolist()
            requests = []
            for user in pair:
                if len(users[user]) > MAX_ITEMS - 3:
                    users[user] = users[user][: int(rng.integers(1, 6))]  # parts with his own past
                users[user] += rng.choice(every, int(rng.integers(1, 4))).tolist()
                requests.append(request_of(f"{turn} {user}", users[user], search))
            replies = cached.recommend(requests)
            prompts = [prompt_of(oracle.catalog, users[user]) for user in pair]
            for number, reply in enumerate(replies):
                found = expected(prompts[number], answered, page_size)
                assert reply.num_cached_tokens == found
                num_partial += found % page_size > 0
                if not is_row_by_row_equal(reply, plain.recommend([requests[number]])[0]):
                    trace = recording.trace(reply.request_id, loaded_catalog(cached))
                    history, prompt = users[pair[number]], prompts[number]
                    oracle.check(reply.results[0], trace, history, search, prompt, T)
            answered += prompts
            cached.pages.check_conservation()
        assert num_partial > 8 or page_size == 1
        graphs = cached.worker.graphs
        assert (graphs.num_captures, graphs.num_eager) == (num_captures, 0)
        assert cached.stats().totals.num_prefix_hits > 10


def test_a_failed_batch_leaves_what_it_copied_from_and_nothing_of_its_own(
    oracle: Oracle, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [item.item_id for item in oracle.catalog.items][:9]
    search = Search(beam_width=8)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the device lost its mind")

    with engine_of(oracle, file, 16) as engine:
        engine.recommend([request_of("first", ids[:7], search)])
        num_cached = engine.pages.num_cached
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner.state, "copy_to_host", broken)
            with pytest.raises(RuntimeError, match="lost its mind"):
                engine.recommend([request_of("fails", ids, search)])
        assert engine.pages.num_cached == num_cached
        (hit,) = engine.recommend([request_of("again", ids, search)])
        assert hit.num_cached_tokens == len(prompt_of(oracle.catalog, ids[:7]))
        engine.reset_prefix_cache()
        (miss,) = engine.recommend([request_of("anew", ids, search)])
        assert miss.num_cached_tokens == 0
        assert is_row_by_row_equal(hit, miss)


def test_where_there_is_no_page_to_keep_a_source_its_tokens_are_computed(
    oracle: Oracle, file: Path
) -> None:
    """Pages for one of the longest histories and no more: such a request has to run, and evicts what it would copy."""
    ids = [item.item_id for item in oracle.catalog.items][:MAX_ITEMS]
    search = Search(beam_width=8)
    num_pages = -(-MAX_TOKENS // 16)
    with engine_of(oracle, file, 16, num_pages=1 + num_pages) as engine:
        replies = [
            engine.recommend([request_of(f"{n}", ids[:n], search)])[0]
            for n in (MAX_ITEMS - 1, MAX_ITEMS, MAX_ITEMS)
        ]
        lengths = [reply.num_prompt_tokens for reply in replies]
        in_pages = [0, *(length // 16 * 16 for length in lengths[:2])]
        assert [reply.num_cached_tokens for reply in replies] == in_pages
        assert is_row_by_row_equal(*replies[1:])
