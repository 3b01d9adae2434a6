"""The collector is off inside, and afterwards as it was before."""

from __future__ import annotations

import gc

import pytest

from xgr_runtime.hal.collection import no_collection


class Cycle:
    """Garbage that only the collector finds."""

    num_freed = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Cycle.num_freed += 1


def test_nothing_is_collected_inside() -> None:
    gc.collect()
    Cycle.num_freed = 0
    with no_collection():
        for _ in range(100_000):
            Cycle()
        assert Cycle.num_freed == 0
    gc.collect()
    assert Cycle.num_freed == 100_000


def test_it_is_on_again_after_an_error_and_stays_off_where_it_was_off() -> None:
    with pytest.raises(ZeroDivisionError), no_collection():
        _ = 1 // 0
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
