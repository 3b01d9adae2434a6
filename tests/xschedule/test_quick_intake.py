"""Which thread prepares a request, and that nobody is lost between the two."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.helpers.engines import make_engine, request_of
from tests.helpers.product import watch_batches
from tests.helpers.waiting import is_idle, wait_until, wait_until_idle
from tests.xschedule.running import TIMEOUT_S, Gate, history
from xgr_runtime.errors import EngineClosed, InvalidRequest
from xgr_runtime.types import RecRequest, RecResult, Rules, Search
from xgr_runtime.xschedule import scheduler
from xgr_runtime.xschedule.intake_thread import QUICK_ENTRIES, is_quick

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.helpers.engines import Oracle
    from xgr_runtime import Engine, RuntimeConfig

LOOP, INTAKE = "xgr-engine", "xgr-intake"
IDS = np.arange(3)


@pytest.mark.parametrize(
    "options",
    [
        {"history_item_ids": IDS},
        {"prompt_token_ids": IDS},
        {"prompt_token_ids": np.zeros(QUICK_ENTRIES, np.int64)},
        {"history_item_ids": IDS, "searches": (Search(beam_width=3, rules=Rules()),)},
        {"history_item_ids": IDS, "searches": (Search(beam_widths=(3, 4, 5)),)},
    ],
)
def test_quick(options: dict[str, Any]) -> None:
    assert is_quick(RecRequest(**options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"history_item_ids": [1, 2]},
        {"history_keys": ("a",)},
        {"history_sids": np.zeros((1, 3), np.uint32)},
        {"history_item_ids": IDS, "history_keys": ("a",)},
        {"history_item_ids": IDS, "prompt_token_ids": [1] * 5},
        {"history_item_ids": IDS, "searches": (Search(beam_widths=(1,) * 100),)},
        {"history_item_ids": IDS, "searches": (Search(beam_widths=[1, 2]),)},  # type: ignore[arg-type]
        {"prompt_token_ids": np.zeros(QUICK_ENTRIES + 1, np.int64)},
        {"history_item_ids": IDS, "searches": ()},
        {"history_item_ids": IDS, "searches": None},
        {"history_item_ids": IDS, "searches": (Search(), Search())},
        {"history_item_ids": IDS, "searches": ("search",)},
        *(
            {"history_item_ids": IDS, "searches": (Search(rules=rules),)}  # type: ignore[arg-type]
            for rules in (
                None,
                Rules(require=(("tag",),)),
                Rules(exclude_tags=("tag",)),
                Rules(exclude_item_ids=(1,)),
                Rules(exclude_item_ids=np.zeros(2, np.int64)),
                Rules(exclude_keys=("key",)),
                Rules(exclude_keys="key"),  # type: ignore[arg-type]
                Rules(exclude_history=True),
                Rules(exclude_history=np.zeros(2, bool)),  # type: ignore[arg-type]
            )
        ),
    ],
    ids=str,
)
def test_not_quick(options: dict[str, Any]) -> None:
    """Also of what no check has seen yet."""
    assert not is_quick(RecRequest(**options))


@pytest.fixture
def prepared_by(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The thread that prepared each request."""
    names: dict[str, str] = {}

    def note(request: RecRequest) -> None:
        names[request.request_id] = threading.current_thread().name

    before_intake(engine, monkeypatch, note)
    return names


def before_intake(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, call: Callable[[RecRequest], None]
) -> None:
    prepare, intake = engine._intake.prepare, dataclasses.replace(engine._intake)

    def prepare_after(request: RecRequest, now: float) -> Any:
        call(request)
        return prepare(request, now)

    object.__setattr__(intake, "prepare", prepare_after)
    monkeypatch.setattr(engine, "_intake", intake)


def excluding(oracle: Oracle, name: str) -> RecRequest:
    """One that is not quick."""
    return request_of(name, history(oracle), Search(rules=Rules(exclude_history=True)))


def test_the_loop_prepares_what_is_quick_while_it_waits(
    engine: Engine, gate: Gate, oracle: Oracle, prepared_by: dict[str, str]
) -> None:
    wait_until(lambda: engine._is_taking)
    futures = [engine.submit_future(request_of("waiting", history(oracle)))]
    gate.wait_for_batch()  # the loop is held there
    futures.append(engine.submit_future(request_of("at work", history(oracle))))
    wait_until(lambda: engine._scheduler.num_queued == 1)
    gate.open()
    for future in futures:
        future.result(TIMEOUT_S)
    wait_until(lambda: engine._is_taking)
    engine.submit_future(excluding(oracle, "rules")).result(TIMEOUT_S)
    assert prepared_by == {"waiting": LOOP, "at work": INTAKE, "rules": INTAKE}


def test_a_quick_request_overtakes_one_that_takes_long(
    engine: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_free, is_busy = threading.Event(), threading.Event()

    def hold(request: RecRequest) -> None:
        if request.request_id == "long":
            is_busy.set()
            assert is_free.wait(TIMEOUT_S)

    before_intake(engine, monkeypatch, hold)
    slow = engine.submit_future(excluding(oracle, "long"))
    assert is_busy.wait(TIMEOUT_S)
    wait_until(lambda: engine._is_taking)
    assert engine.submit_future(request_of("quick", history(oracle))).result(TIMEOUT_S)
    assert not slow.done()
    is_free.set()
    assert slow.result(TIMEOUT_S)


def test_quick_requests_that_come_together_share_a_batch(
    engine: Engine,
    gate: Gate,
    oracle: Oracle,
    prepared_by: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with no patience at all, and with one among them that is refused."""
    monkeypatch.setattr(scheduler, "COMPANY_S", TIMEOUT_S)  # however long the other thread takes
    wait_until(lambda: engine._is_taking)
    with engine._wake:  # the loop wakes up when all of them are there
        first = engine.submit_future(request_of("a", history(oracle)))
        bad = engine.submit_future(request_of("bad", [-1], on_unknown="error"))
        second = engine.submit_future(request_of("b", history(oracle, 5)))
    gate.open()
    assert first.result(TIMEOUT_S).request_id == "a"
    assert second.result(TIMEOUT_S).request_id == "b"
    assert isinstance(bad.exception(TIMEOUT_S), InvalidRequest)
    assert [batch.request_ids for batch in gate.batches] == [("a", "b")]
    # The loop is given as many as a batch may hold, which is two.
    assert prepared_by == {"a": LOOP, "bad": LOOP, "b": INTAKE}
    wait_until_idle(engine)


def test_a_burst_is_not_prepared_before_the_first_batch_is_issued(
    config: RuntimeConfig, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is given a batch; who comes behind goes to the other thread."""
    large = dataclasses.replace(config.scheduler, max_queue=400, max_batch_histories=4)
    with make_engine(dataclasses.replace(config, scheduler=large)) as engine:
        by_loop, at_issue = list[str](), list[int]()

        def note(request: RecRequest) -> None:
            if threading.current_thread().name == LOOP:
                by_loop.append(request.request_id)

        before_intake(engine, monkeypatch, note)
        watch_batches(engine, before=lambda _: at_issue.append(len(by_loop)))
        wait_until(lambda: engine._is_taking)
        requests = [request_of(str(number), history(oracle)) for number in range(300)]
        with engine._wake:
            futures = [engine.submit_future(request) for request in requests]
        assert [f.result(TIMEOUT_S).request_id for f in futures] == [r.request_id for r in requests]
        assert 0 < at_issue[0] <= 4


def test_the_loop_prepares_no_more_than_a_batch_at_once(
    config: RuntimeConfig, oracle: Oracle
) -> None:
    """However many come meanwhile: nothing is issued while it does."""
    engine = make_engine(config)  # not started: its steps are called here
    most = config.scheduler.max_batch_histories
    futures = [Future[RecResult]() for _ in range(most + 1)]
    for future in futures:
        future.cancel()
        engine._given.append(([request_of("r", history(oracle))], future, 0.0))
    engine._num_coming = len(futures)
    engine._prepare_given()
    assert (len(engine._given), engine._num_coming) == (1, 1)
    engine._prepare_given()
    assert (len(engine._given), engine._num_coming) == (0, 0)
    engine.close()


@pytest.mark.parametrize("what", [None, {"history_item_ids": [1]}, "request"])
def test_what_is_no_request_counts_for_nothing(engine: Engine, oracle: Oracle, what: Any) -> None:
    wait_until(lambda: engine._is_taking)
    assert engine.submit_future(what).exception(TIMEOUT_S)
    wait_until_idle(engine)
    assert (engine._num_waiting, engine._num_coming) == (0, 0)
    assert engine.submit_future(request_of("next", history(oracle))).result(TIMEOUT_S)


def test_cancelled_before_the_loop_comes_to_it(
    engine: Engine, oracle: Oracle, prepared_by: dict[str, str]
) -> None:
    wait_until(lambda: engine._is_taking)
    with engine._wake:
        gone = engine.submit_future(request_of("gone", history(oracle)))
        mate = engine.submit_future(request_of("mate", history(oracle)))
        assert gone.cancel()
    assert mate.result(TIMEOUT_S)
    assert prepared_by == {"mate": LOOP}
    wait_until_idle(engine)
    assert engine._num_coming == 0


def test_closing_refuses_what_the_loop_was_given(engine: Engine, oracle: Oracle) -> None:
    wait_until(lambda: engine._is_taking)
    with engine._wake:
        futures = [engine.submit_future(request_of("r", history(oracle))) for _ in range(3)]
        assert engine._given, "the loop has them"
        engine._is_draining = engine._is_closed = True  # as `close` does, before it joins the loop
    engine.close()
    for future in futures:
        assert isinstance(future.exception(TIMEOUT_S), EngineClosed)
    assert not engine._given
    assert is_idle(engine)


def test_a_loop_that_dies_refuses_what_it_was_given(
    engine: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the scheduler is broken")

    wait_until(lambda: engine._is_taking)
    with engine._wake:
        monkeypatch.setattr(engine._scheduler, "expire", fail)
        futures = [engine.submit_future(request_of("r", history(oracle))) for _ in range(2)]
    for future in futures:
        assert isinstance(future.exception(TIMEOUT_S), EngineClosed)
    with pytest.raises(EngineClosed):
        engine.submit_future(request_of("late", history(oracle)))


def test_what_a_preparation_should_not_raise_reaches_the_caller(
    engine: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the threads go on."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_prepare", fail)  # of the loop; the other thread keeps the method
        wait_until(lambda: engine._is_taking)
        broken = engine.submit_future(request_of("broken", history(oracle)))
        assert isinstance(broken.exception(TIMEOUT_S), ZeroDivisionError)
    engine._expect_company(-1)  # what the broken one did not get to
    assert engine.submit_future(request_of("next", history(oracle))).result(TIMEOUT_S)


@pytest.mark.parametrize("is_quick_one", [True, False])
def test_a_callback_that_raises_anything_stops_no_thread(
    engine: Engine, oracle: Oracle, caplog: pytest.LogCaptureFixture, *, is_quick_one: bool
) -> None:
    """A future catches Exception alone, and whoever settles it is a thread of the engine."""

    def give_up(_: object) -> None:
        raise asyncio.CancelledError

    wait_until(lambda: engine._is_taking)
    ids = np.array([-1]) if is_quick_one else [1.5]
    with engine._wake:  # before anybody comes to it
        request = RecRequest(history_item_ids=ids, on_unknown="error")  # type: ignore[arg-type]
        refused = engine.submit_future(request)
        refused.add_done_callback(give_up)
    assert isinstance(refused.exception(TIMEOUT_S), InvalidRequest)
    for request in (request_of("quick", history(oracle)), excluding(oracle, "not")):
        assert engine.submit_future(request).result(TIMEOUT_S)
    wait_until_idle(engine)
    assert engine._num_coming == 0
    assert "a callback of a request's future failed" in caplog.text


class Lazy(Sequence[int]):
    """Ids that somebody else has to fetch, in vain."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        raise SystemExit(2)


def test_ids_that_raise_anything_when_they_are_read(engine: Engine, oracle: Oracle) -> None:
    broken = engine.submit_future(RecRequest(history_item_ids=Lazy()))  # type: ignore[arg-type]
    assert isinstance(broken.exception(TIMEOUT_S), SystemExit)
    assert engine.submit_future(excluding(oracle, "next")).result(TIMEOUT_S)
    wait_until_idle(engine)
    assert (engine._num_waiting, engine._num_coming) == (0, 0)
