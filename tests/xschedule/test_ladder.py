"""The list of buckets: it holds every batch within the limits, in the cheapest of its buckets, and is short."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.strict_device import StrictDevice
from tests.xschedule.test_buckets import make_batch, make_group, make_histories
from xgr_runtime.config import (
    BucketsConfig,
    CacheConfig,
    LimitsConfig,
    RuntimeConfig,
    SchedulerConfig,
    load_config,
)
from xgr_runtime.errors import ConfigError
from xgr_runtime.kvcache.allocator import num_pages_of
from xgr_runtime.shipped import config_file
from xgr_runtime.xschedule.capacities import Capacities
from xgr_runtime.xschedule.ladder import Ladder, captured_normalizations, ladder_of

if TYPE_CHECKING:
    from xgr_runtime.xschedule.batch import Batch

LEVELS = 3


def capacities(config: RuntimeConfig) -> Capacities:
    limits, scheduler = config.limits, config.scheduler
    return Capacities(
        num_tokens=scheduler.max_batch_tokens,
        num_histories=scheduler.max_batch_histories,
        num_searches=scheduler.max_batch_histories,
        num_rows=scheduler.max_batch_rows,
        num_levels=LEVELS,
        max_history_tokens=limits.max_prompt_tokens,
        num_pages_per_history=num_pages_of(limits.max_prompt_tokens, config.cache.page_size_tokens),
    )


def gpu() -> StrictDevice:
    return StrictDevice()


def npu() -> StrictDevice:
    device = StrictDevice(is_graph_per_round=True)
    device.max_graphs = 96
    return device


def ladder(config: RuntimeConfig, device: StrictDevice) -> Ladder:
    return ladder_of(config, capacities(config), device)


def configured(
    histories: int, tokens: int, rows: int, prompt: int, width: int, buckets: BucketsConfig
) -> RuntimeConfig:
    return RuntimeConfig(
        limits=LimitsConfig(max_prompt_tokens=prompt, max_beam_width=width),
        scheduler=SchedulerConfig(
            max_batch_histories=histories, max_batch_tokens=tokens, max_batch_rows=rows
        ),
        cache=CacheConfig(page_size_tokens=8),
        buckets=buckets,
    )


@dataclass(frozen=True)
class Case:
    config: RuntimeConfig
    device: StrictDevice
    batch: Batch


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Limits, a device, sizes left open or named, and a batch that the scheduler could make under them."""
    prompt, width = draw(st.integers(1, 700)), draw(st.integers(1, 300))
    tokens = draw(st.integers(prompt, 4 * prompt))
    rows = draw(st.integers(width, 4 * width))
    histories = draw(st.integers(1, 20))

    def sizes(most: int) -> tuple[int, ...]:
        return tuple(sorted(draw(st.sets(st.integers(1, most), max_size=3))))

    named = (sizes(tokens), sizes(rows), sizes(histories), sizes(prompt))
    buckets = BucketsConfig(True, *named) if draw(st.booleans()) else BucketsConfig()
    config = configured(histories, tokens, rows, prompt, width, buckets)
    lengths, cached = list[int](), list[int]()
    widths: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, min(histories, tokens, rows)))):
        left = histories - len(lengths)
        room = min(tokens - sum(lengths) + sum(cached), rows - sum(max(w) for w in widths))
        if room < 1 or left < 1:
            break
        lengths.append(draw(st.integers(1, prompt)))
        most_new = min(lengths[-1], tokens - (sum(lengths[:-1]) - sum(cached)))
        cached.append(lengths[-1] - draw(st.integers(1, most_new)))
        most = min(width, rows - sum(max(w) for w in widths))
        widths.append(tuple(draw(st.integers(1, most)) for _ in range(LEVELS)))
    batch = make_batch(make_histories(lengths, cached), make_group(range(len(lengths)), widths))
    return Case(config, draw(st.sampled_from([gpu(), npu()])), batch)


@settings(max_examples=300)
@given(case=cases())
def test_every_batch_has_the_smallest_bucket_that_holds_it(case: Case) -> None:
    """The bucket is one of the list, holds the batch in every dimension, and no cheaper one of its rung does."""
    device = case.device
    device.max_graphs = 10_000
    found, batch = ladder(case.config, device), case.batch
    got = found.of(batch)
    (group,), (rounds,), prefill = batch.groups, got.groups, got.prefill
    lengths = batch.histories.kv_lens_H
    new = np.diff(batch.histories.q_start_H1)
    shared = prefill.shared
    rows, most = int(group.widths_SL.sum(0).max()), int(group.widths_SL.max())
    listed = set(found.rounds(LEVELS))
    assert (shared, rounds) in listed
    assert shared.num_histories == rounds.num_searches >= batch.num_histories
    assert shared.max_kv >= lengths.max()
    assert shared.num_pages * 8 >= lengths.max()
    assert rounds.rows[0] >= rows
    assert rounds.max_rows[0] >= most
    assert prefill.num_tokens >= new.sum()
    assert prefill.max_q >= new.max()
    assert prefill.max_kv >= lengths.max()
    if device.is_prefill_captured:
        prefills = [p for p in found.prefills() if p.shared.num_histories == shared.num_histories]
        assert replace(prefill, shared=prefills[0].shared) in prefills
        assert not [p for p in prefills if new.sum() <= p.num_tokens < prefill.num_tokens]
    else:
        assert prefill.num_tokens - new.sum() <= 7
    for other, bucket in listed:
        if other == shared and bucket.rows[0] >= rows and bucket.max_rows[0] >= most:
            assert (bucket.rows, bucket.max_rows) >= (rounds.rows, rounds.max_rows)


def shipped(*overrides: str) -> RuntimeConfig:
    return load_config(None, overrides).config


def uniform(number: int, tokens: int, width: int) -> Batch:
    return make_batch(
        make_histories([tokens] * number), make_group(range(number), [(width,) * LEVELS] * number)
    )


LONG = ("limits.max_prompt_tokens=5000", "scheduler.max_batch_tokens=40000")


@pytest.mark.parametrize("width", [128, 256, 512, 1024])
@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize(
    ("tokens", "overrides"), [(1000, ()), (1024, ()), (3000, ()), (1000, LONG), (5000, LONG)]
)
def test_usual_batches_fit_nearly_exactly(
    number: int, tokens: int, width: int, overrides: tuple[str, ...]
) -> None:
    config = shipped(*overrides)
    if number * tokens > config.scheduler.max_batch_tokens:
        return
    got = ladder(config, gpu()).of(uniform(number, tokens, width))
    assert number * tokens <= got.prefill.num_tokens <= 1.025 * number * tokens
    assert got.groups[0].rows == (number * width,) * LEVELS
    assert got.prefill.shared.num_histories == number


@pytest.mark.parametrize("overrides", [(), LONG, ("scheduler.max_batch_histories=64",)])
def test_a_gpus_list_is_short_and_wastes_little(overrides: tuple[str, ...]) -> None:
    config = shipped(*overrides)
    found = ladder(config, gpu())
    num_rounds = len(list(found.rounds(LEVELS))) * len(captured_normalizations(config))
    assert len(list(found.prefills())) + 2 * num_rounds <= 200, "two versions of a catalogue"
    assert all(rows == most for rung in found.rungs for rows, most in rung.rows), "one bound a size"
    for number in range(512, config.scheduler.max_batch_tokens, 37):
        sizes = [size for size in found.rungs[-1].tokens if size >= number]
        assert sizes[0] <= 1.26 * number


@pytest.mark.parametrize("name", ["ascend-910b", "demo-ascend-910b"])
def test_an_npus_list_fits_its_graphs(name: str) -> None:
    config = load_config(config_file(name)).config
    found = ladder(config, npu())
    assert not list(found.prefills())
    num_graphs = LEVELS * len(list(found.rounds(LEVELS))) * len(captured_normalizations(config))
    assert 2 * num_graphs <= 96
    assert len(found.rungs) >= 2
    assert min(rows for rows, _ in found.rungs[0].rows) <= 128


def test_where_graphs_are_few_histories_of_equal_rows_are_not_padded_to_all_rows() -> None:
    config = load_config(config_file("ascend-910b")).config
    equal = ladder(config, npu()).of(uniform(16, 100, 256)).groups[0]
    assert equal.rows[0] == 16 * 256
    assert equal.max_rows[0] <= 2 * 256


def test_sizes_that_are_named_are_used_and_must_fit() -> None:
    config = shipped(
        "buckets.tokens=[100, 5000, 8190]", "buckets.rows=[50, 400]", "buckets.histories=[2]"
    )
    one, two = ladder(config, gpu()).rungs
    assert (one.num_histories, two.num_histories) == (2, 8)
    assert one.tokens == (100, 5000, 8190, 8192), "a named size may be near the largest"
    assert [rows for rows, _ in one.rows] == [50, 400, 2048]
    assert [rows for rows, _ in two.rows] == [50, 400, 8192]
    with pytest.raises(
        ConfigError, match=r"need \d+ graphs, and .* at most 96; shorten buckets\.rows"
    ):
        ladder(replace(config, buckets=BucketsConfig(rows=tuple(range(8, 800, 8)))), npu())


def test_one_history_of_few_new_tokens_has_buckets_of_its_own() -> None:
    """What a user who returns brings, 24 tokens behind 1,000: a larger bucket would be mostly padding."""
    found = ladder(shipped(), gpu())
    assert found.rungs[0].num_histories == 1
    assert found.rungs[0].tokens[:3] == (32, 64, 128)
    assert all(rung.tokens[0] >= 128 for rung in found.rungs[1:])
    hit = make_batch(make_histories([1024], [1000]), make_group([0], [(8,) * LEVELS]))
    assert found.of(hit).prefill.num_tokens == 32
    assert found.is_copying
    assert not ladder(shipped("cache.prefix_cache=false"), gpu()).is_copying
    assert not ladder(shipped("cache.page_size_tokens=1"), gpu()).is_copying


def test_lengths_may_have_classes() -> None:
    found = ladder(shipped("buckets.history_tokens=[512]"), gpu())
    short, long = (found.of(uniform(1, n, 8)).prefill for n in (512, 513))
    assert (short.shared.max_kv, long.shared.max_kv) == (512, 4096)
    assert short.max_kv == long.max_kv == 4096, "a prefill has a graph for all lengths"


def test_lengths_of_histories_that_are_named_must_fit_too() -> None:
    named = list(range(1, 100))
    with pytest.raises(ConfigError, match=r"shorten .*buckets\.history_tokens"):
        ladder(shipped(f"buckets.history_tokens={named}"), npu())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("buckets.tokens=[9000]", r"buckets\.tokens must ascend .* scheduler\.max_batch_tokens \(8192\)"),
        ("buckets.rows=[8, 8]", r"buckets\.rows must ascend .* got 8 behind 8"),
        ("buckets.histories=[0]", r"buckets\.histories must ascend"),
        ("buckets.history_tokens=[a]", r"buckets\.history_tokens\[0\] must be a whole number"),
        ("buckets.normalizations=[softmax]", r"buckets\.normalizations\[0\] must be one of"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [option])
