"""Requests that are cancelled before the intake thread comes to them leave no trace, however many and however long it is busy."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.helpers.waiting import wait_until_idle
from tests.xschedule.running import TIMEOUT_S
from xgr_runtime.types import RecRequest, Rules, Search

if TYPE_CHECKING:
    import pytest

    from xgr_runtime import Engine


def test_cancelled_requests_are_let_go_while_the_intake_is_busy(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_free, is_busy, prepare = threading.Event(), threading.Event(), engine._intake.prepare
    seen: list[str] = []

    def slow(request: RecRequest, now: float) -> Any:
        seen.append(request.request_id)
        is_busy.set()
        assert is_free.wait(TIMEOUT_S)
        return prepare(request, now)

    intake = dataclasses.replace(engine._intake)
    object.__setattr__(intake, "prepare", slow)
    monkeypatch.setattr(engine, "_intake", intake)
    excluding = Search(rules=Rules(exclude_history=True))  # none that the loop would prepare itself
    first = engine.submit_future(
        RecRequest("first", history_item_ids=np.zeros(0, np.int64), searches=(excluding,))
    )
    assert is_busy.wait(TIMEOUT_S)
    held = []
    for number in range(500):  # many more than the queue holds at once
        request = RecRequest(f"r{number}", history_item_ids=np.zeros(10_000, np.int64))
        held.append(weakref.ref(request))
        assert engine.submit_future(request).cancel()
        del request
    gc.collect()
    assert not [ref for ref in held if ref() is not None]
    is_free.set()
    assert first.result(TIMEOUT_S)
    wait_until_idle(engine)
    last = engine.submit_future(RecRequest("last", history_item_ids=np.zeros(0, np.int64)))
    assert last.result(TIMEOUT_S)
    assert seen == ["first", "last"]
