"""What must add up after every test: the pages of every allocator, and what idle engines hold.

Allocators made inside the test are held until its end, so that one that is already dropped is checked too; those that
outlive it (an engine of a module's fixture) are followed by weak references and checked again after every later test.
An engine's last requests may still be ending when a test returns, so it is given time to come to rest.
"""

from __future__ import annotations

import time
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from xgr_runtime.kvcache.allocator import PageAllocator
from xgr_runtime.xschedule.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xgr_runtime.kvcache.prefix_cache import PrefixCache

REST_S = 60.0


class PageWatch:
    """The allocators and engines that are alive, and those of the running test."""

    def __init__(self) -> None:
        self._of_this_test: list[PageAllocator] = []
        self._of_engines: list[PrefixCache] = []
        self._older: weakref.WeakSet[PageAllocator] = weakref.WeakSet()
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this is open, every new allocator and engine is noted."""
        make_allocator, make_engine = PageAllocator.__init__, Engine.__init__

        def init_allocator(allocator: PageAllocator, num_pages: int) -> None:
            make_allocator(allocator, num_pages)
            self._of_this_test.append(allocator)

        def init_engine(engine: Engine, *args: object, **kwargs: object) -> None:
            make_engine(engine, *args, **kwargs)  # type: ignore[arg-type]
            self._engines.add(engine)
            self._of_engines.append(engine.pages)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PageAllocator, "__init__", init_allocator)
            patch.setattr(Engine, "__init__", init_engine)
            yield

    def check(self) -> None:
        """Raises for pages that do not add up or are still held; then starts the next test's lists."""
        current, self._of_this_test = self._of_this_test, []
        of_engines, self._of_engines = self._of_engines, []
        self._older.update(current)
        engines = list(self._engines)
        pools = [*of_engines, *(engine.pages for engine in engines)]
        end_s = time.monotonic() + REST_S
        while any(map(_held_by, engines)) or any(pool.num_in_use for pool in pools):
            if time.monotonic() > end_s:
                break
            time.sleep(0.005)
        with ExitStack() as stack:
            for engine in engines:  # none is just about to put a page back
                stack.enter_context(engine._wake)
            for allocator in list(self._older):
                allocator.check_conservation()
            for pool in pools:
                pool.check_conservation()
                assert not pool.num_in_use, f"{pool.num_in_use} pages are held by no request"
        for engine in engines:
            assert not _held_by(engine), f"an idle engine still holds {_held_by(engine)}"


def _held_by(engine: Engine) -> dict[str, int]:
    """What an engine holds for requests: empty when it is at rest."""
    catalogs = list(engine.catalogs.by_slot.values())
    held = {f"pins of {loaded.name} {loaded.version}": loaded.num_pins for loaded in catalogs}
    held["waiting requests"] = engine.describe()["num_unanswered"]
    return {name: count for name, count in held.items() if count}
