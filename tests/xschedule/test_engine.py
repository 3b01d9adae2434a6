"""The engine's ends: overload, deadlines, cancellation, draining, closing, failure, from threads and from asyncio.

Time does not decide anything here: the worker's `submit` is held at a gate until the test has seen what it wants to see.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.catalogs import TAGS
from tests.helpers.engines import (
    Oracle,
    loaded_catalog,
    make_engine,
    record_batches,
    request_of,
    same_bits,
)
from xgr_runtime.config import TemplateConfig
from xgr_runtime.errors import (
    ConfigError,
    DeadlineExceeded,
    DeviceError,
    EngineClosed,
    InvalidRequest,
    NotFound,
    Overloaded,
)
from xgr_runtime.hal.collection import no_collection
from xgr_runtime.types import RecRequest, RecResult, Rules, Search

if TYPE_CHECKING:
    from xgr_runtime import Engine, RuntimeConfig
    from xgr_runtime.xschedule.batch import Batch
    from xgr_runtime.xschedule.scheduler import Scheduled

from tests.helpers.product import watch_batches
from tests.helpers.waiting import is_idle, wait_until, wait_until_idle
from tests.xschedule.running import QUEUE, TIMEOUT_S, VOCAB, Gate, history


def test_a_request_that_is_refused_costs_nothing(engine: Engine, oracle: Oracle) -> None:
    with pytest.raises(InvalidRequest, match="exactly one of"):
        engine.submit_future(RecRequest()).result(TIMEOUT_S)
    with pytest.raises(NotFound, match="'other' is not loaded"):
        engine.recommend([request_of("", history(oracle), Search(catalog="other"))])
    wait_until_idle(engine)


def test_a_configuration_built_by_hand_is_checked(config: RuntimeConfig) -> None:
    """A prompt that no batch could hold would wait for ever; such a configuration starts no engine."""
    for part, message in (
        ({"cache": replace(config.cache, num_pages=3)}, "cache.num_pages must be 0 or at least 5"),
        (
            {"scheduler": replace(config.scheduler, max_batch_tokens=16)},
            "limits.max_prompt_tokens must not exceed scheduler.max_batch_tokens",
        ),
        (
            {"scheduler": replace(config.scheduler, max_wait_ms=float("inf"))},
            "scheduler.max_wait_ms must be in",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make_engine(replace(config, **part))


def test_overload_is_refused_at_once_and_passes(engine: Engine, gate: Gate, oracle: Oracle) -> None:
    futures = [engine.submit_future(request_of(str(i), history(oracle))) for i in range(QUEUE)]
    with pytest.raises(Overloaded, match=rf"{QUEUE} requests are waiting, scheduler\.max_queue"):
        engine.submit_future(request_of("one more", history(oracle)))
    gate.open()
    for future in futures:
        assert future.result(TIMEOUT_S).results[0].num_items == 10
    wait_until_idle(engine)
    assert engine.recommend([request_of("later", history(oracle))])


def test_recommend_takes_more_requests_than_the_queue_holds(engine: Engine, oracle: Oracle) -> None:
    ids = [item.item_id for item in oracle.catalog.items]
    requests = [
        request_of(str(i), ids[i : i + 1 + i % 5], Search(beam_width=1 + i % 20))
        for i in range(5 * QUEUE + 1)
    ]
    with ThreadPoolExecutor(3) as pool:
        # Three callers share one queue: each waits for room, none is refused.
        answers = list(pool.map(engine.recommend, [requests] * 3))
    for replies in answers:
        assert [reply.request_id for reply in replies] == [r.request_id for r in requests]
    wait_until_idle(engine)


def test_a_deadline_passes_in_the_queue(engine: Engine, gate: Gate, oracle: Oracle) -> None:
    running = engine.submit_future(request_of("running", history(oracle)))
    gate.wait_for_batch()
    late = engine.submit_future(
        request_of("late", history(oracle), deadline_s=time.monotonic() + 0.02)
    )
    patient = engine.submit_future(
        request_of("patient", history(oracle), deadline_s=time.monotonic() + 1000.0)
    )
    wait_until(lambda: engine._scheduler.num_queued == 2)
    time.sleep(0.03)
    gate.open()
    with pytest.raises(DeadlineExceeded, match=r"the deadline passed after \d+ ms in the queue"):
        late.result(TIMEOUT_S)
    assert running.result(TIMEOUT_S).request_id == "running"
    assert patient.result(TIMEOUT_S).request_id == "patient"
    assert all("late" not in batch.request_ids for batch in gate.batches)
    wait_until_idle(engine)


def test_a_deadline_of_the_past_is_told_without_running(engine: Engine, oracle: Oracle) -> None:
    request = request_of("past", history(oracle), deadline_s=time.monotonic() - 1.0)
    with pytest.raises(DeadlineExceeded):
        engine.recommend([request])
    wait_until_idle(engine)


def test_drain_finishes_what_was_accepted(engine: Engine, gate: Gate, oracle: Oracle) -> None:
    futures = [engine.submit_future(request_of(str(i), history(oracle))) for i in range(4)]
    gate.wait_for_batch()
    assert not engine.drain(0.01)
    with pytest.raises(EngineClosed, match="accepts no requests"):
        engine.submit_future(request_of("late", history(oracle)))
    gate.open()
    assert engine.drain(TIMEOUT_S)
    assert all(future.done() for future in futures)
    assert all(future.result().results[0].num_items == 10 for future in futures)
    assert is_idle(engine)


def test_close_answers_everyone(engine: Engine, gate: Gate, oracle: Oracle) -> None:
    running = engine.submit_future(request_of("running", history(oracle)))
    gate.wait_for_batch()
    queued = [engine.submit_future(request_of(str(i), history(oracle))) for i in range(3)]
    closer = threading.Thread(target=engine.close)
    closer.start()
    wait_until(lambda: engine._is_closed)
    gate.open()
    closer.join(TIMEOUT_S)
    assert running.result(TIMEOUT_S).results[0].num_items == 10, "a running batch is finished"
    for future in queued:
        with pytest.raises(EngineClosed, match="closed before the request could run"):
            future.result(TIMEOUT_S)
    with pytest.raises(EngineClosed):
        engine.recommend([request_of("late", history(oracle))])
    engine.close()
    assert is_idle(engine)


def test_submitting_while_another_thread_closes(config: RuntimeConfig, oracle: Oracle) -> None:
    """Every call ends: refused with EngineClosed, or its future ends."""
    for _ in range(5):
        with make_engine(config) as engine:
            futures: list[Future[RecResult]] = []
            started = threading.Event()

            def submit(engine: Engine = engine, futures: list[Future[RecResult]] = futures) -> None:
                while True:
                    try:
                        futures.append(engine.submit_future(request_of("", history(oracle))))
                    except Overloaded:
                        continue
                    except EngineClosed:
                        return
                    finally:
                        started.set()  # noqa: B023 - this turn's event

            thread = threading.Thread(target=submit)
            thread.start()
            assert started.wait(TIMEOUT_S)
            engine.close()
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
            for future in futures:
                error = future.exception(TIMEOUT_S)
                assert error is None or isinstance(error, EngineClosed)
            assert is_idle(engine)


def test_a_start_waits_for_no_company(config: RuntimeConfig) -> None:
    """It runs a request for each catalogue, and nobody else can ask yet: each is a batch at the first look at the queue."""
    patient = replace(config.scheduler, max_wait_ms=60_000.0)
    engine = make_engine(replace(config, scheduler=patient))
    scheduler, num_looks = engine._scheduler, 0
    schedule = scheduler.schedule

    def watched(now: float, *, is_draining: bool = False) -> Scheduled | None:
        nonlocal num_looks
        num_queued = scheduler.num_queued
        num_looks += num_queued > 0
        scheduled = schedule(now, is_draining=is_draining)
        assert num_queued == 0 or scheduled is not None, "the start's request is held back"
        return scheduled

    scheduler.schedule = watched  # type: ignore[method-assign]
    with engine:
        assert not engine._is_starting
    assert num_looks == len(config.catalogs)


def test_before_it_is_started(config: RuntimeConfig, oracle: Oracle) -> None:
    engine = make_engine(config)
    with pytest.raises(EngineClosed, match="not started"):
        engine.submit_future(request_of("", history(oracle)))
    engine.start()
    engine.start()
    assert engine.recommend([request_of("", history(oracle))])
    engine.close()


def test_a_failing_batch_fails_only_its_own_requests(
    engine: Engine, gate: Gate, oracle: Oracle
) -> None:
    held = engine.submit_future(request_of("held", history(oracle)))
    gate.wait_for_batch()

    def fail_one(batch: Batch) -> None:
        if "bad" in batch.request_ids:
            raise DeviceError("the device lost its mind")

    watch_batches(engine, before=fail_one)
    others = {name: request_of(name, history(oracle)) for name in ("bad", "mate", "c", "d")}
    futures = {name: engine.submit_future(request) for name, request in others.items()}
    wait_until(lambda: engine._scheduler.num_queued == 4)
    gate.open()
    for name in ("bad", "mate"):
        with pytest.raises(DeviceError, match="lost its mind"):
            futures[name].result(TIMEOUT_S)
    for future in (held, futures["c"], futures["d"]):
        assert future.result(TIMEOUT_S).results[0].num_items == 10
    wait_until_idle(engine)


def test_rules_of_a_failed_batch_are_written_again(engine: Engine, oracle: Oracle) -> None:
    """The batch that should have written a rule set's row died before; the next one must not trust the row."""
    recording = record_batches(engine)
    submit = engine.worker.submit
    search = Search(beam_width=60, num_results=500, rules=Rules(require=((TAGS[0],),)))

    def fail(batch: Batch) -> None:
        raise DeviceError("out of memory")

    watch_batches(engine, before=fail)
    with pytest.raises(DeviceError):
        engine.recommend([request_of("dies", history(oracle), search)])
    engine.worker.submit = submit  # type: ignore[method-assign]
    (reply,) = engine.recommend([request_of("lives", history(oracle), search)])
    trace = recording.trace("lives", loaded_catalog(engine))
    oracle.check(reply.results[0], trace, history(oracle), search)


@pytest.mark.parametrize("where", ["schedule", "complete"])
def test_a_loop_that_dies_says_so(
    config: RuntimeConfig, oracle: Oracle, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Before a batch, and after one: whoever waits hears of it."""
    engine = make_engine(config)
    engine.start()
    try:
        original = getattr(engine._scheduler, where)

        def broken(*args: Any, **options: Any) -> object:
            if where == "schedule" and not engine._scheduler.num_queued:
                return original(*args, **options)
            if where == "complete":  # all is given back, nobody has been told
                original(*args, **options)
                for state in args[0].states:
                    engine._release(state)
            raise SystemError("beyond repair")

        setattr(engine._scheduler, where, broken)
        future = engine.submit_future(request_of("", history(oracle)))
        with pytest.raises(EngineClosed, match="beyond repair"):
            future.result(TIMEOUT_S)
        with pytest.raises(EngineClosed, match=r"the engine stopped: .*beyond repair"):
            engine.submit_future(request_of("", history(oracle)))
        wait_until_idle(engine)  # whoever settles a future counts afterwards
        assert engine.drain(TIMEOUT_S), "nobody waits any more"
        asyncio.run(asyncio.wait_for(engine.wait_stopped(), TIMEOUT_S))
    finally:
        engine.close()
    assert [r.message for r in caplog.records if r.levelname == "ERROR"] == [
        "the engine loop failed"
    ]


def test_whoever_waits_for_the_end_hears_of_it(config: RuntimeConfig) -> None:
    """A close from another thread ends the wait; one that was cancelled, or whose loop is gone, disturbs nobody."""

    async def main(engine: Engine) -> None:
        cancelled = asyncio.ensure_future(engine.wait_stopped())
        waits = [asyncio.ensure_future(engine.wait_stopped()) for _ in range(2)]
        await asyncio.sleep(0)
        cancelled.cancel()
        done, _ = await asyncio.wait([cancelled, *waits], timeout=0.05)
        assert done == {cancelled}
        threading.Thread(target=engine.close).start()
        await asyncio.wait_for(asyncio.gather(*waits), TIMEOUT_S)
        await asyncio.wait_for(engine.wait_stopped(), TIMEOUT_S)

    async def give_up(engine: Engine) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(engine.wait_stopped(), 0.01)

    with make_engine(config) as engine:
        asyncio.run(give_up(engine))
        asyncio.run(main(engine))


def test_asyncio(engine: Engine, oracle: Oracle) -> None:
    async def main() -> list[RecResult]:
        results = []
        for first in range(0, 12, QUEUE):
            tasks = [
                engine.submit(request_of(str(i), history(oracle, i % 3)))
                for i in range(first, first + QUEUE)
            ]
            results += await asyncio.gather(*tasks)
            while engine.describe()["num_unanswered"]:
                await asyncio.sleep(0.001)
        return results

    results = asyncio.run(main())
    assert [r.request_id for r in results] == [str(i) for i in range(12)]
    for i in range(3):
        (alone,) = engine.recommend([request_of("", history(oracle, i))])
        assert results[i].results[0].item_ids.tolist() == alone.results[0].item_ids.tolist()


def test_the_same_request_again_is_the_same_bits(engine: Engine, oracle: Oracle) -> None:
    request = request_of("", history(oracle), Search(return_level_scores=True))
    (one,) = engine.recommend([request])
    engine.reset_prefix_cache()  # else the second has other products
    (two,) = engine.recommend([request])
    assert same_bits(one, two)
    assert one.timings.total_ms >= one.timings.run_ms > 0


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (TemplateConfig(prefix_token_ids=(VOCAB,)), "template token ids must be in"),
        (TemplateConfig(suffix_token_ids=(-1,)), r"template\.suffix_token_ids\[0\] must be"),
        (TemplateConfig(prefix_token_ids=(1,) * 65), "has 65 tokens without any item"),
    ],
)
def test_a_template_that_cannot_work(
    config: RuntimeConfig, template: TemplateConfig, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        make_engine(replace(config, template=template))


def test_configurations_that_name_nothing(config: RuntimeConfig) -> None:
    with pytest.raises(ConfigError, match="at least one compiled catalogue file"):
        make_engine(replace(config, catalogs={}))
    with pytest.raises(ConfigError, match=r"model\.path must name"):
        make_engine(replace(config, model=replace(config.model, path="")))


@pytest.mark.parametrize("is_chained", [False, True])
def test_a_failed_batch_leaves_nothing_on_the_device(
    config: RuntimeConfig, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, is_chained: bool
) -> None:
    """Not even while the error is kept and no cycle is collected: a server out of memory would stay out of memory."""
    left: list[weakref.ref[torch.Tensor]] = []

    def fail(*args: object) -> None:
        activations = torch.zeros(8)
        left.append(weakref.ref(activations))
        if not is_chained:
            raise RuntimeError("no room")
        try:
            raise RuntimeError("no room")
        except RuntimeError as error:
            raise MemoryError("no room") from error

    with make_engine(config) as engine, no_collection():
        monkeypatch.setattr(engine.runner.inputs, "fill", fail)
        with pytest.raises((RuntimeError, MemoryError), match="no room") as caught:
            engine.recommend([request_of("one", history(oracle))])
        assert [ref() for ref in left] == [None]
        assert "in fail" in "".join(traceback.format_exception(caught.value))


def test_describe_counts_rows_dead_beams_and_providers(
    config: RuntimeConfig, oracle: Oracle
) -> None:
    """Five SIDs for eight beams leave three beams dead; they are counted, and so is what was expanded."""
    kept = sorted({item.sid for item in oracle.catalog.items if item.servable})[:5]
    others = tuple(item.item_id for item in oracle.catalog.items if item.sid not in kept)
    search = Search(beam_width=8, num_results=5, rules=Rules(exclude_item_ids=others))
    with make_engine(config) as engine:
        before = engine.describe()
        result = engine.recommend([request_of("few", history(oracle), search)])[0].results[0]
        after = engine.describe()
    assert result.num_valid == 5
    assert after["num_dead_beams"] - before["num_dead_beams"] == 3
    assert after["num_batches"] - before["num_batches"] == 1
    assert after["num_live_rows"] > before["num_live_rows"]
    own = {
        "cpu": {"numpy"},
        "npu": {"aten"},
        "cuda": {"triton", "triton-pdl"},
    }  # -pdl: from Hopper on
    (select,) = after["ops"]["select_beams"]
    assert select in own.get(config.device, {"reference"})
    assert after["num_reference_ops"] == sum("reference" in p for p in after["ops"].values())
