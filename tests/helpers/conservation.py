"""Knows every page allocator made during a test and checks it afterwards.

Allocators made inside the test are held until its end, so that one that is already dropped is checked too; those that
outlive it (an engine of a module's fixture) are followed by weak references and checked again after every later test.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xgr_runtime.kvcache.allocator import PageAllocator


class PageWatch:
    """The allocators that are alive, and those of the running test."""

    def __init__(self) -> None:
        self._of_this_test: list[PageAllocator] = []
        self._older: weakref.WeakSet[PageAllocator] = weakref.WeakSet()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this is open, every new allocator is noted."""
        if find_spec("xgr_runtime.kvcache.allocator") is None:
            yield
            return
        allocator_class = import_module("xgr_runtime.kvcache.allocator").PageAllocator
        original = allocator_class.__init__

        def init(allocator: PageAllocator, *args: object, **kwargs: object) -> None:
            original(allocator, *args, **kwargs)
            self._of_this_test.append(allocator)

        allocator_class.__init__ = init
        try:
            yield
        finally:
            allocator_class.__init__ = original

    def check(self) -> None:
        """Raises for an allocator whose pages do not add up; then starts the next test's list."""
        current, self._of_this_test = self._of_this_test, []
        for allocator in [*self._older, *current]:
            allocator.check_conservation()
        self._older.update(current)
