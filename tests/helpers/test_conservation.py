"""The check that runs after every test sees lost and doubled pages, in allocators of this test and of earlier ones."""

import pytest

from tests.helpers.conservation import PageWatch
from xgr_runtime.kvcache.allocator import PageAllocator


def lose_a_page(allocator: PageAllocator) -> None:
    allocator._used.discard(allocator.allocate(1)[0])


def test_a_lost_page_is_seen() -> None:
    watch = PageWatch()
    with watch.watching():
        allocator = PageAllocator(4)
    lose_a_page(allocator)
    with pytest.raises(AssertionError, match="lost pages"):
        watch.check()
    allocator._free.append(1)  # the session's own watch looks at it too


def test_an_allocator_that_lives_on_is_checked_again() -> None:
    watch = PageWatch()
    with watch.watching():
        allocator = PageAllocator(4)
    watch.check()
    lose_a_page(allocator)
    with pytest.raises(AssertionError, match="lost pages"):
        watch.check()
    allocator._free.append(1)


def test_pages_in_use_are_no_loss() -> None:
    watch = PageWatch()
    with watch.watching():
        allocator = PageAllocator(4)
        allocator.allocate(2)
    watch.check()
    assert allocator.num_used == 2
