"""The check that runs after every test sees lost and doubled pages, in allocators of this test and of earlier ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers import conservation
from tests.helpers.conservation import PageWatch
from tests.helpers.oracle import Catalog, Item
from tests.helpers.product import compile_catalog, prompt_request, table_engine
from tests.helpers.table_model import LogitTable
from xgr_runtime.kvcache.allocator import PageAllocator

if TYPE_CHECKING:
    from pathlib import Path


def lose_a_page(allocator: PageAllocator) -> None:
    allocator._used.discard(allocator.allocate(1)[0])


def test_a_lost_page_is_seen() -> None:
    watch = PageWatch()
    with watch.watching():
        allocator = PageAllocator(4)
    lose_a_page(allocator)
    with pytest.raises(AssertionError, match="lost pages"):
        watch.check()
    allocator._freed.append(1)  # the session's own watch looks at it too


def test_an_allocator_that_lives_on_is_checked_again() -> None:
    watch = PageWatch()
    with watch.watching():
        allocator = PageAllocator(4)
    watch.check()
    lose_a_page(allocator)
    with pytest.raises(AssertionError, match="lost pages"):
        watch.check()
    allocator._freed.append(1)


def test_pages_in_use_are_no_loss() -> None:
    watch = PageWatch()
    with watch.watching():
        allocator = PageAllocator(4)
        allocator.allocate(2)
    watch.check()
    assert allocator.num_used == 2


def test_what_an_idle_engine_holds_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compile_catalog(Catalog((Item(1, (0,)),), ((0,),)), tmp_path / "one.xgr")
    watch = PageWatch()
    with watch.watching(), table_engine(LogitTable(4), {"main": path}) as engine:
        engine.recommend([prompt_request([1])])
        watch.check()
        monkeypatch.setattr(conservation, "REST_S", 0.02)  # nothing runs any more
        pages = engine.pages.allocate(2)
        with pytest.raises(AssertionError, match="2 pages are held by no request"):
            watch.check()
        engine.pages.allocator.free(pages)
        loaded = engine.catalogs.pin("main")
        with pytest.raises(AssertionError, match=r"an idle engine still holds .*pins of main"):
            watch.check()
        engine.catalogs.release(loaded)
        watch.check()
