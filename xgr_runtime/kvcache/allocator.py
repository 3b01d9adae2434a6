"""Pages on the host: how many a history needs, and which are free. No torch: property-tested on any machine."""

from collections.abc import Iterable

from xgr_runtime.errors import Overloaded

NULL_PAGE = 0


def num_pages_of(num_tokens: int, page_size: int) -> int:
    """Pages that hold num_tokens."""
    return -(-num_tokens // page_size)


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1; page 0 is the null page, which padding reads and writes.

    What was freed last is taken first, and fresh pages only after that, lowest first: memory that was never written
    stays untouched, and a pool of a million pages costs nothing to make.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1, "the null page is always there"
        self.num_pages = num_pages
        self._freed: list[int] = []
        self._next_fresh = NULL_PAGE + 1
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return len(self._freed) + self.num_pages - self._next_fresh

    @property
    def num_used(self) -> int:
        """Pages handed out and not yet freed."""
        return len(self._used)

    def allocate(self, num_pages: int) -> list[int]:
        """Take num_pages pages, all or none. Raises Overloaded when fewer are free."""
        assert num_pages >= 0
        if num_pages > self.num_free:
            raise Overloaded(
                f"{num_pages} KV pages were asked for, {self.num_free} of {self.num_pages - 1} are free; "
                "wait for running requests or raise cache.num_pages"
            )
        num_fresh = max(0, num_pages - len(self._freed))
        pages = [self._freed.pop() for _ in range(num_pages - num_fresh)]
        pages += range(self._next_fresh, self._next_fresh + num_fresh)
        self._next_fresh += num_fresh
        self._used.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back, each exactly once."""
        for page in pages:
            assert page in self._used, f"page {page} is freed but was not allocated"
            self._used.remove(page)
            self._freed.append(page)

    def check_conservation(self) -> None:
        """Assert that every page but the null page is free or used, and never both."""
        freed = set(self._freed)
        assert len(freed) == len(self._freed), "a page is free twice"
        assert not freed & self._used, f"pages both free and used: {sorted(freed & self._used)}"
        expected = set(range(NULL_PAGE + 1, self._next_fresh))
        assert freed | self._used == expected, (
            f"lost pages: {sorted(expected - freed - self._used)}"
        )
        assert self._next_fresh <= self.num_pages, "more pages than there are"
