"""Knows every page allocator made during a test and checks it afterwards.

Allocators made inside the test are held until its end, so that one that is already dropped is checked too; those that
outlive it (an engine of a module's fixture) are followed by weak references and checked again after every later test.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from xgr_runtime.kvcache.allocator import PageAllocator

if TYPE_CHECKING:
    from collections.abc import Iterator


class PageWatch:
    """The allocators that are alive, and those of the running test."""

    def __init__(self) -> None:
        self._of_this_test: list[PageAllocator] = []
        self._older: weakref.WeakSet[PageAllocator] = weakref.WeakSet()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this is open, every new allocator is noted."""
        original = PageAllocator.__init__

        def init(allocator: PageAllocator, num_pages: int) -> None:
            original(allocator, num_pages)
            self._of_this_test.append(allocator)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PageAllocator, "__init__", init)
            yield

    def check(self) -> None:
        """Raises for an allocator whose pages do not add up; then starts the next test's list."""
        current, self._of_this_test = self._of_this_test, []
        for allocator in [*self._older, *current]:
            allocator.check_conservation()
        self._older.update(current)
