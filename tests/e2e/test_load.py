"""Storms of requests on engines whose pools are as small as they may be: every answer right or a proper status.

The pools are pages, rows, tokens, rows for rule sets and places in the queue. The configuration refuses pools that a single
request could exceed, so a request that could never run is refused when it is submitted, by the name of its limit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.leavers import Leavers, with_leavers
from tests.helpers.load import (
    MAX_WIDTH,
    Alone,
    Content,
    Shot,
    TickWatch,
    assert_at_rest,
    check_outcomes,
    hold_until_refused,
    make_contents,
    make_shots,
    storm,
)
from tests.service.world import World, make_world
from tests.xschedule.running import TIMEOUT_S, Gate
from xgr_runtime import Engine, RuntimeConfig
from xgr_runtime.errors import ConfigError, InvalidRequest
from xgr_runtime.types import RecRequest, Search

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e
ROOMY = ("scheduler.max_queue=4096",)
# The smallest of each that the limits allow: prompts of 128 tokens, beams of 64 rows.
POOLS = {
    "all roomy": (),
    "pages for one history": ("cache.page_size_tokens=4", "cache.num_pages=33"),
    "rows for one search": ("scheduler.max_batch_rows=64",),
    "tokens for one history": ("scheduler.max_batch_tokens=128",),
    "one history, one rule row": ("scheduler.max_batch_histories=1", "cache.rule_rows=1"),
    "all at once": (
        "cache.page_size_tokens=128",
        "cache.num_pages=2",
        "scheduler.max_batch_rows=64",
        "scheduler.max_batch_tokens=128",
        "cache.rule_rows=1",
        "cache.rule_cache_bytes=0",
    ),
    "no prefix cache": ("cache.prefix_cache=false", "cache.num_pages=9"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def alone(world: World) -> Iterator[Alone]:
    with Engine.from_config(config_of(world, "scheduler.max_wait_ms=0")) as engine:
        yield Alone(world, engine)


@pytest.fixture(scope="module")
def contents(world: World) -> list[Content]:
    return make_contents(world, np.random.default_rng(1), 120)


def config_of(world: World, *overrides: str) -> RuntimeConfig:
    return RuntimeConfig.from_yaml(world.config, [*ROOMY, *overrides])


def run_storm(
    config: RuntimeConfig,
    contents: list[Content],
    alone: Alone,
    count: int,
    seed: int,
    *,
    is_patient: bool = False,
    num_refused: int = 0,
    num_leavers: int = 0,
) -> Counter[str]:
    """A storm on an engine of its own, checked to the last request; counts by outcome.

    is_patient: no caller gives up. num_refused: nothing is answered before the queue was full for so many. num_leavers: so many
    more whose deadline passes in the queue, and as many whose caller goes while they are there.
    """
    shots = make_shots(contents, np.random.default_rng(seed), count)
    if is_patient:
        shots = [dataclasses.replace(s, deadline_s=None, cancel_after_s=None) for s in shots]
    shots = with_leavers(shots, contents, num_leavers)
    with Engine.from_config(config) as engine:
        ticks = TickWatch.on(engine)
        if num_refused:
            hold_until_refused(engine, num_refused)
        leavers = Leavers(engine, shots) if num_leavers else None
        start_s = time.monotonic()
        outcomes = asyncio.run(storm(engine, shots, leavers.on_arrival if leavers else None))
        seconds = time.monotonic() - start_s
        counts = check_outcomes(shots, outcomes, alone)
        if leavers:
            leavers.check(outcomes)
        assert_at_rest(engine)
        assert ticks.num_skipped == 0, "the scheduler had requests and ran none of them"
        idle_ticks = ticks.num_ticks
        time.sleep(0.1)
        assert ticks.num_ticks - idle_ticks <= 1, "an idle engine spins"
        evicted = engine.describe()["num_prefix_evicted_pages"]
    sys.stdout.write(
        f"{count} at once in {seconds:.1f} s: {dict(counts)}, {evicted} pages evicted\n"
    )
    return counts


@pytest.mark.parametrize("count", [800, pytest.param(2000, marks=pytest.mark.slow)])
def test_hundreds_of_requests_at_once(
    world: World, alone: Alone, contents: list[Content], count: int
) -> None:
    counts = run_storm(config_of(world), contents, alone, count, seed=2, num_leavers=20)
    assert counts["RecResult"] > 0.4 * count
    assert min(counts["CancelledError"], counts["DeadlineExceeded"]) > 20, "and others"
    assert counts["NotFound"] > 5
    assert counts["InvalidRequest"] > 20
    assert counts["Overloaded"] == 0
    assert alone.num_identical >= 0.95 * alone.num_compared


@pytest.mark.parametrize("pool", list(POOLS))
def test_small_pools(world: World, alone: Alone, contents: list[Content], pool: str) -> None:
    counts = run_storm(config_of(world, *POOLS[pool]), contents, alone, 120, seed=3)
    assert counts["RecResult"] > 60


@pytest.mark.parametrize("max_queue", [1, 50])
def test_a_small_queue_rejects_the_rest(
    world: World, alone: Alone, contents: list[Content], max_queue: int
) -> None:
    config = config_of(world, f"scheduler.max_queue={max_queue}", *POOLS["pages for one history"])
    counts = run_storm(config, contents, alone, 400, seed=4, is_patient=True, num_refused=101)
    assert counts["RecResult"] >= max_queue, (
        "whoever found a place in the queue waits for an answer"
    )
    assert counts["Overloaded"] > 100
    run_storm(config, contents, alone, 100, seed=4)  # and callers that give up, answered or not


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize("pool", list(POOLS))
def test_2000_requests_on_small_pools(
    world: World, alone: Alone, contents: list[Content], pool: str, seed: int
) -> None:
    run_storm(config_of(world, *POOLS[pool]), contents, alone, 2000, seed)
    run_storm(
        config_of(world, *POOLS[pool], "scheduler.max_queue=300"), contents, alone, 2000, seed
    )


def test_what_can_never_fit_is_refused_at_once_and_blocks_nobody(world: World) -> None:
    """Ahead of it, behind it and in its batch everything is answered, while it hears of its limit before any of them."""
    never = {
        "beam_widths[1]": RecRequest(
            history_item_ids=np.array([1]), searches=(Search(beam_widths=(1, 65, 1)),)
        ),
        "limits.max_prompt_tokens": RecRequest(prompt_token_ids=np.ones(129, np.int64)),
    }
    fits = RecRequest(
        prompt_token_ids=np.ones(128, np.int64), searches=(Search(beam_width=MAX_WIDTH),)
    )
    config = config_of(world, *POOLS["all at once"])
    with Engine.from_config(config) as engine:
        gate = Gate(engine)
        with engine._wake:  # all of them are there before any runs
            ahead = [engine.submit_future(fits) for _ in range(3)]
            refused = {name: engine.submit_future(request) for name, request in never.items()}
            behind = [engine.submit_future(fits) for _ in range(3)]
        try:
            for name, future in refused.items():
                with pytest.raises(InvalidRequest) as caught:
                    future.result(TIMEOUT_S)
                assert name in str(caught.value)
            assert not any(future.done() for future in (*ahead, *behind))
        finally:
            gate.open()
        for answered in (*ahead, *behind):
            assert answered.result(TIMEOUT_S).results[0].num_valid == MAX_WIDTH
        assert_at_rest(engine)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("cache.num_pages=8", "cache.num_pages"),
        ("scheduler.max_batch_rows=63", "limits.max_beam_width"),
        ("scheduler.max_batch_tokens=127", "limits.max_prompt_tokens"),
        ("scheduler.max_batch_histories=0", "scheduler.max_batch_histories"),
        ("scheduler.max_queue=0", "scheduler.max_queue"),
        ("cache.rule_rows=0", "cache.rule_rows"),
    ],
)
def test_pools_too_small_for_one_request_are_refused(
    world: World, override: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        config_of(world, override)


def test_callers_that_all_give_up_leave_nothing_behind(
    world: World, alone: Alone, contents: list[Content]
) -> None:
    good = [content for content in contents if not content.is_bad]
    shots = [Shot(good[i % len(good)], None, 0.3 * (i % 7) / 7) for i in range(300)]
    with Engine.from_config(config_of(world, *POOLS["pages for one history"])) as engine:
        outcomes = asyncio.run(storm(engine, shots))
        check_outcomes(shots, outcomes, alone)
        assert_at_rest(engine)
        assert engine.recommend([good[0].request])
