"""Batches on a GPU overlap: issued beside each other, without a wait and without an allocation, each lane for itself."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from tests.cuda.waiting import no_waiting
from tests.helpers.catalogs import random_catalog, scattered_tokens
from tests.helpers.engines import make_config, make_engine, write_catalog
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from tests.xschedule.test_worker import (
    CASES,
    CODES,
    PAGE,
    VOCAB,
    assert_same_bits,
    make_batch,
    make_hit,
)
from xgr_runtime.config import CacheConfig, LimitsConfig, SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xgr_runtime import Engine
    from xgr_runtime.hal.device import Device

pytestmark = pytest.mark.device("cuda")
BUSY_CYCLES = 400_000_000  # about a fifth of a second
ONE, OTHER = CASES["two catalogues"][:1], CASES["two catalogues"][1:]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Iterator[Engine]:
    """Not started: its worker is used directly. Graphs are captured when a bucket comes first.

    On the tests' own Device: another one of the same GPU has other streams, and is not busy when that one is.
    """
    folder, files = tmp_path_factory.mktemp("overlap"), {}
    for seed, (name, codes) in enumerate(CODES.items()):
        catalog = random_catalog(seed, 600, scattered_tokens(codes, VOCAB, seed, 0.1), skew=0.3)
        files[name] = write_catalog(folder / f"{name}.xgr", catalog)
    config = make_config(
        write_tiny_model(folder / "model", "qwen3", TinyShape(vocab_size=VOCAB)),
        files,
        limits=LimitsConfig(max_prompt_tokens=32, max_beam_width=64),
        scheduler=SchedulerConfig(
            max_batch_histories=4, max_batch_tokens=64, max_batch_rows=128, max_wait_ms=0.0
        ),
        cache=CacheConfig(page_size_tokens=PAGE),
    )
    with closing(make_engine(config, device)) as engine:
        for groups in (ONE, OTHER):
            engine.worker.run(make_batch(engine, groups))
        yield engine


@contextmanager
def busy(device: Device) -> Iterator[None]:
    """The compute lane has something else to do first."""
    with device.segment("busy"):
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    yield


def test_the_next_batch_is_issued_before_the_first_is_done(engine: Engine, device: Device) -> None:
    batches = [make_batch(engine, groups) for groups in (ONE, OTHER)]
    alone = [engine.worker.run(batch) for batch in batches]
    with busy(device):
        first, second = (engine.worker.submit(batch) for batch in batches)
        assert not first.is_done()
        with device.on("inputs"):
            inputs = device.record_event()
        inputs.wait()
        assert not first.is_done(), "inputs and rule rows of both came beside the work before them"
        outputs = [first.wait(), second.wait()]
    for batch, got, expected in zip(batches, outputs, alone, strict=True):
        for group, one, two in zip(batch.groups, got.groups, expected.groups, strict=True):
            assert_same_bits(one, two, group)


def test_nothing_is_allocated_and_nothing_waits_between_issue_and_answer(
    engine: Engine, device: Device
) -> None:
    """torch raises where an operation of its own would wait, and counts what it allocates, on the device and pinned."""
    batches = [make_batch(engine, groups) for groups in (ONE, OTHER)]
    device.synchronize()
    before = allocations()
    with no_waiting():
        with busy(device):
            pending = [engine.worker.submit(batch) for batch in batches]
            assert not pending[0].is_done()
        between = allocations()
    for one in pending:
        one.wait()
    assert between == before
    assert allocations() == before
    assert engine.worker.graphs.num_captures == 3, "a prefill and the rounds of both were replayed"


def test_copies_of_cached_tokens_allocate_nothing_and_wait_for_nothing(
    engine: Engine, device: Device
) -> None:
    """Two batches that copy from the pages of the one before, in flight behind each other."""
    engine.worker.run(make_batch(engine, ONE))
    hit = make_hit(engine, ONE)
    alone = engine.worker.run(hit)
    num_captures = engine.worker.graphs.num_captures
    device.synchronize()
    before = allocations()
    with no_waiting():
        with busy(device):
            pending = [engine.worker.submit(hit) for _ in range(2)]
            assert not pending[0].is_done()
        between = allocations()
    for one in pending:
        for group, got, expected in zip(hit.groups, one.wait().groups, alone.groups, strict=True):
            assert_same_bits(got, expected, group)
    assert between == before
    assert allocations() == before
    assert engine.worker.graphs.num_captures == num_captures


def allocations() -> dict[str, int]:
    """How often memory of the device and of the host was asked for, and how often the driver was."""
    device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    counted = {name: device[name] for name in ("allocation.all.allocated", "num_alloc_retries")}
    counted["num_device_alloc"] = device["num_device_alloc"]
    return counted | {f"host {name}": n for name, n in host.items() if name.startswith("num_")}


def test_times_of_a_graph_that_the_next_batch_has_begun_are_unknown(
    engine: Engine, device: Device
) -> None:
    """The next batch has recorded into the graph's events; the batch's own borders are still right."""
    batch = make_batch(engine, ONE)
    with busy(device):
        first, second = engine.worker.submit(batch), engine.worker.submit(batch)
        times, later = first.wait().times, second.wait().times
    assert times.rounds_s == ((None,) * 4,)
    assert times.selects_s == ((None,) * 4,)
    known = [seconds for seconds in later.rounds_s[0] if seconds is not None]
    assert len(known) == 4
    assert later.all_rounds_s[0] == pytest.approx(sum(known))
    for found in (times, later):
        assert 0 < found.prefill_s < found.span_s
        assert 0 < found.all_rounds_s[0] < found.span_s
        assert found.to_device_s > 0
        assert found.to_host_s > 0
