"""Two batches in flight: issued beside each other, answered in order, ended one by one, whatever happens to either.

Time decides nothing here: a batch stays on the device until the test releases it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.helpers.catalogs import TAGS
from tests.helpers.engines import make_engine, request_of, same_bits
from tests.helpers.product import watch_batches
from tests.helpers.waiting import is_idle, wait_until, wait_until_idle
from tests.xschedule.running import TIMEOUT_S, Held
from xgr_runtime.errors import DeviceLost, EngineClosed
from xgr_runtime.types import Rules, Search
from xgr_runtime.xbeam.slot import CatalogSlot
from xgr_runtime.xschedule.worker import PendingBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from tests.helpers.engines import Oracle
    from xgr_runtime import Engine, RuntimeConfig
    from xgr_runtime.types import RecRequest, RecResult
    from xgr_runtime.xschedule.batch import Batch


@pytest.fixture(autouse=True)
def rows_of_one_tensor_are_apart(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake NPU minds who writes a tensor that others read. Not its rows: that those differ is asserted below."""
    if not request.config.getoption("fake_npu"):
        return

    def beside_readers(write: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            torch.ops.xgr_fake_npu.set_flag("order", False)
            try:
                write(*args)
            finally:
                torch.ops.xgr_fake_npu.set_flag("order", True)

        return call

    for name in ("write_rule_set", "copy_row", "clear"):
        monkeypatch.setattr(CatalogSlot, name, beside_readers(getattr(CatalogSlot, name)))


@pytest.fixture
def held(engine: Engine) -> Iterator[Held]:
    held = Held(engine)
    yield held
    held.open()


def with_in_flight(config: RuntimeConfig, number: int, **options: int) -> RuntimeConfig:
    scheduler = replace(config.scheduler, max_batches_in_flight=number, max_queue=64, **options)
    return replace(config, scheduler=scheduler)


def requests_of(oracle: Oracle, number: int, name: str = "r") -> list[RecRequest]:
    """Different histories, lengths, widths and rules, so that nothing of one batch fits another."""
    rng = np.random.default_rng(number)
    ids = [item.item_id for item in oracle.catalog.items]
    rules = (
        Rules(),
        Rules(exclude_history=True),
        *(Rules(require=((tag,),), exclude_history=True) for tag in TAGS),
    )
    return [
        request_of(
            f"{name}{i}",
            rng.choice(ids, 1 + i % 7, replace=False).tolist(),
            Search(beam_width=1 + 5 * i % 23, num_results=100, rules=rules[i % len(rules)]),
        )
        for i in range(number)
    ]


def pair(engine: Engine, oracle: Oracle, name: str) -> list[Future[RecResult]]:
    """Two requests, which fill a batch."""
    ids = [item.item_id for item in oracle.catalog.items][:3]
    return [engine.submit_future(request_of(f"{name} {i}", ids)) for i in range(2)]


def fill(engine: Engine, oracle: Oracle, held: Held) -> list[list[Future[RecResult]]]:
    """Two batches in flight, with one or two requests each; returns their futures by batch."""
    first = pair(engine, oracle, "first")
    held.wait_for(1)
    wait_until(lambda: held.batches[0].num_histories == 2 or len(held.batches) == 2)
    by_id = {f"first {i}": future for i, future in enumerate(first)}
    if len(held.batches) == 1:
        by_id |= {f"second {i}": f for i, f in enumerate(pair(engine, oracle, "second"))}
    held.wait_for(2)
    return [[by_id[name] for name in batch.request_ids] for batch in held.batches[:2]]


def wait_until_queued(engine: Engine) -> None:
    """Until something is in the queue and nothing on its way there: of a pair, the second may be there alone."""
    wait_until(lambda: engine._scheduler.num_queued >= 1 and not engine._num_coming)


def test_a_batch_is_issued_while_the_one_before_runs_and_no_third_one(
    engine: Engine, held: Held, oracle: Oracle
) -> None:
    batches = fill(engine, oracle, held)
    later = engine.submit_future(request_of("later", [oracle.catalog.items[0].item_id]))
    in_flight = sum(map(len, batches))
    wait_until(lambda: engine.stats().num_running == in_flight)
    wait_until_queued(engine)
    stats = engine.stats()
    largest = max(len(futures) for futures in batches)
    assert stats.num_rows_in_use == largest * engine.config.search.beam_width
    page_size = engine.config.cache.page_size_tokens
    lengths = np.concatenate([batch.histories.kv_lens_H for batch in held.batches[:2]])
    assert stats.num_pages_in_use == int((-(-lengths // page_size)).sum())
    assert len(held.pending) == 2
    held.pending[0].release()
    held.wait_for(3)
    assert all(future.result(TIMEOUT_S) for future in batches[0])
    assert not any(future.done() for future in batches[1])
    held.open()
    assert all(future.result(TIMEOUT_S) for future in [*batches[1], later])
    wait_until_idle(engine)


def test_one_at_a_time_where_that_is_asked_for(config: RuntimeConfig, oracle: Oracle) -> None:
    with make_engine(with_in_flight(config, 1)) as engine:
        held = Held(engine)
        futures = [engine.submit_future(request) for request in requests_of(oracle, 3)]
        held.wait_for(1)
        wait_until(lambda: engine.stats().num_waiting == 3 - held.batches[0].num_histories)
        time.sleep(0.01)
        assert len(held.pending) == 1
        held.open()
        assert [future.result(TIMEOUT_S).request_id for future in futures] == ["r0", "r1", "r2"]


def rows_written(batch: Batch) -> set[int]:
    """The rows of rule sets that a batch writes; rows for exclusions are its entry's own."""
    return {row for group in batch.groups for row, _ in group.rule_loads}


def rows_read(batch: Batch) -> set[int]:
    return {rule.row for group in batch.groups for rule in group.rules}


@pytest.mark.parametrize("number", [2, 3])
def test_the_answers_are_those_of_one_batch_at_a_time(
    config: RuntimeConfig, oracle: Oracle, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many in flight as may be, all the time. On the fake NPU under its rules about streams and late copies."""
    requests, answers, depths = requests_of(oracle, 24), [], list[int]()
    for most in (1, number):
        with make_engine(with_in_flight(config, most, max_batch_histories=1)) as engine:
            has_begun = threading.Event()

            def before(
                batch: Batch, engine: Engine = engine, has_begun: threading.Event = has_begun
            ) -> None:
                if batch.request_ids == ("r0",):
                    has_begun.set()
                    wait_until(lambda: engine._scheduler.num_queued == len(requests) - 1)
                depths.append(len(engine._in_flight))
                others = [issued.scheduled.batch for issued in engine._in_flight._issued]
                assert not rows_written(batch) & {row for one in others for row in rows_read(one)}

            def is_done(_: object, engine: Engine = engine) -> bool:
                """A device that is slower than the host: nothing is done while there is more to issue."""
                return engine._scheduler.num_queued == 0

            with monkeypatch.context() as patch:
                patch.setattr(PendingBatch, "is_done", is_done)
                watch_batches(engine, before)
                # The others are sent when it runs: two threads prepare them, and it has to be the first.
                futures = [engine.submit_future(requests[0])]
                assert has_begun.wait(TIMEOUT_S)
                futures += map(engine.submit_future, requests[1:])
                answers.append([future.result(TIMEOUT_S) for future in futures])
    assert depths == [0] * 24 + [*range(number - 1)] + [number - 1] * (25 - number)
    for one, two in zip(*answers, strict=True):
        assert one.results[0].num_items > 0
        assert same_bits(one, two)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_batch_that_fails_on_the_device_fails_alone(
    engine: Engine, held: Held, oracle: Oracle, failing: int
) -> None:
    batches = fill(engine, oracle, held)
    held.pending[failing].release(ArithmeticError("a batch of its own"))
    held.open()
    for number, futures in enumerate(batches):
        for future in futures:
            if number == failing:
                with pytest.raises(ArithmeticError, match="of its own"):
                    future.result(TIMEOUT_S)
            else:
                assert future.result(TIMEOUT_S).results[0].num_items == 10
    wait_until_idle(engine)
    assert engine.stats().totals.num_failed_batches == 1
    assert all(f.result(TIMEOUT_S) for f in pair(engine, oracle, "after"))


def test_a_batch_that_cannot_be_issued_leaves_the_one_before_alone(
    engine: Engine, held: Held, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine.submit_future(request_of("first", [oracle.catalog.items[0].item_id]))
    held.wait_for(1)

    def broken(*_: object) -> None:
        raise ArithmeticError("half-way")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.state, "keep", broken)
        second = engine.submit_future(request_of("second", [oracle.catalog.items[1].item_id]))
        with pytest.raises(ArithmeticError, match="half-way"):
            second.result(TIMEOUT_S)
    assert not first.done()
    held.open()
    assert first.result(TIMEOUT_S).results[0].num_items == 10
    wait_until_idle(engine)


def test_a_lost_device_fails_both_and_holds_nothing(config: RuntimeConfig, oracle: Oracle) -> None:
    with make_engine(config) as engine:
        held = Held(engine)
        batches = fill(engine, oracle, held)
        queued = engine.submit_future(request_of("queued", [oracle.catalog.items[0].item_id]))
        wait_until_queued(engine)
        held.pending[0].release(DeviceLost("gone for good"))
        for future in [*batches[0], *batches[1], queued]:
            with pytest.raises(EngineClosed, match="gone for good"):
                future.result(TIMEOUT_S)
        wait_until_idle(engine)
        assert engine.stats().num_running == 0


def test_closing_answers_both_and_refuses_the_queue(
    engine: Engine, held: Held, oracle: Oracle
) -> None:
    batches = fill(engine, oracle, held)
    queued = engine.submit_future(request_of("queued", [oracle.catalog.items[0].item_id]))
    wait_until_queued(engine)
    closer = threading.Thread(target=engine.close)
    closer.start()
    wait_until(lambda: engine._is_closed)
    held.open()
    closer.join(TIMEOUT_S)
    assert all(future.result(TIMEOUT_S) for futures in batches for future in futures)
    with pytest.raises(EngineClosed, match="closed before the request could run"):
        queued.result(TIMEOUT_S)
    assert is_idle(engine)


def test_draining_waits_for_both(engine: Engine, held: Held, oracle: Oracle) -> None:
    batches = fill(engine, oracle, held)
    assert not engine.drain(0.01)
    held.pending[0].release()
    assert all(future.result(TIMEOUT_S) for future in batches[0])
    assert not engine.drain(0.01)
    held.open()
    assert engine.drain(TIMEOUT_S)
    assert all(future.done() for futures in batches for future in futures)


def test_pages_are_found_by_others_when_their_batch_has_ended(
    engine: Engine, held: Held, oracle: Oracle
) -> None:
    ids = [item.item_id for item in oracle.catalog.items][:14]  # more than a page of tokens
    first = engine.submit_future(request_of("first", ids))
    held.wait_for(1)
    second = engine.submit_future(request_of("second", ids))
    held.wait_for(2)
    third = engine.submit_future(request_of("third", ids))
    wait_until(lambda: engine._scheduler.num_queued == 1)
    held.pending[0].release()
    held.wait_for(3)
    held.open()
    cached = [future.result(TIMEOUT_S).num_cached_tokens for future in (first, second, third)]
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


def test_the_usual_time_includes_the_wait_behind_others(
    engine: Engine, held: Held, oracle: Oracle
) -> None:
    assert engine._scheduler.usual_run_s == 0.0
    fill(engine, oracle, held)
    time.sleep(0.05)
    held.open()
    wait_until_idle(engine)
    assert engine._scheduler.usual_run_s > 0.2 * 0.05
