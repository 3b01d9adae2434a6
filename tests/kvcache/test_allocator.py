"""Pages are conserved, whatever is allocated and freed in whatever order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xgr_runtime.errors import Overloaded
from xgr_runtime.kvcache.allocator import PageAllocator, num_pages_of


@settings(deadline=None, max_examples=100)
@given(
    num_pages=st.integers(1, 20),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40),
)
def test_conservation(num_pages: int, steps: list[tuple[bool, int]]) -> None:
    allocator = PageAllocator(num_pages)
    held: list[list[int]] = []
    for is_free, amount in steps:
        in_use = {page for pages in held for page in pages}
        if is_free and held:
            allocator.free(held.pop(amount % len(held)))
        elif amount <= num_pages - 1 - len(in_use):
            pages = allocator.allocate(amount)
            assert len(pages) == len(set(pages)) == amount
            assert not in_use & set(pages)
            assert all(1 <= page < num_pages for page in pages)
            held.append(pages)
        else:
            with pytest.raises(Overloaded, match="free"):
                allocator.allocate(amount)
        allocator.check_conservation()
        assert allocator.num_used == sum(len(pages) for pages in held)
        assert allocator.num_free == num_pages - 1 - allocator.num_used


def test_a_refused_allocation_takes_nothing() -> None:
    allocator = PageAllocator(5)
    allocator.allocate(3)
    with pytest.raises(Overloaded, match="2 KV pages were asked for, 1 of 4 are free"):
        allocator.allocate(2)
    assert allocator.allocate(1) == [4]


def test_a_page_is_freed_once_and_the_null_page_never() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.free(pages)
    with pytest.raises(AssertionError, match="was not allocated"):
        allocator.free(pages[:1])
    with pytest.raises(AssertionError, match="was not allocated"):
        allocator.free([0])


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_num_pages_of(tokens: int, pages: int) -> None:
    assert num_pages_of(tokens, 16) == pages
