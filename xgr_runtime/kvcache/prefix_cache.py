"""Pages of histories that were prefilled before, found again by what they hold. No torch: property-tested anywhere.

Keys and values of a token depend on the tokens up to it and on nothing else, so a page is worth keeping under the key of all
tokens up to its end: a digest of (parent page's key, the page's own content), and at the root of (weights, KV layout, page
size). A user who returns with a longer history finds the pages of the shorter one; one whose window dropped its oldest item
finds none, since every key changed.

Reuse is exact to the token. Full pages are read where they lie, by any number of requests. Behind them a page that only
begins like the prompt, the last one of a shorter history or one where two histories part, is a *source*: its first tokens
are copied on the device into a page of the request's own. So nobody ever writes into a page that others can find, and a page
that is not full is kept like any other. A page that another one begins with is not kept: whatever finds it finds the other.

Cached pages that no running batch reads or copies are evicted when pages are asked for, the least recently used first. A
request touches its source and then its pages from the last to the first, so a page always leaves before the pages it
continues: what is found is always a prefix without gaps.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xgr_runtime.kvcache.allocator import PageAllocator
from xgr_runtime.kvcache.prefix_index import PrefixIndex
from xgr_runtime.kvcache.prefix_keys import PrefixKeys

# Behind no page at all fewer tokens are no find: what a template begins with is everybody's, and computed as soon as copied.
LEAST_FIRST_TOKENS = 8


@dataclass(frozen=True)
class Found:
    """What of a prompt is cached: the full pages of `keys`, then the first num_copied tokens of the page `source`, if any."""

    keys: tuple[bytes, ...] = ()
    source: bytes | None = None
    num_copied: int = 0

    @property
    def all_keys(self) -> tuple[bytes, ...]:
        """Of all pages that are read, the source last."""
        return self.keys if self.source is None else (*self.keys, self.source)

    def num_tokens(self, page_size: int) -> int:
        """Tokens that need not be computed."""
        return len(self.keys) * page_size + self.num_copied

    def without_copy(self) -> "Found":
        """The full pages alone."""
        return Found(self.keys)


NOTHING_FOUND = Found()


@dataclass
class _Entry:
    """A cached page, how many requests of running batches read it, and where the index has it."""

    page: int
    num_users: int
    parent: bytes
    content: bytes


class PrefixCache:
    """Hands out the pages of an allocator and keeps those with a key. The caller serialises all calls."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self.num_evicted = 0
        self._entries: dict[bytes, _Entry] = {}
        self._index = PrefixIndex()
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first

    @property
    def num_cached(self) -> int:
        """Pages that can be found by a key, in use or not."""
        return len(self._entries)

    @property
    def num_idle(self) -> int:
        """Cached pages that nobody reads, hence can be evicted."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now."""
        return self.allocator.num_free + len(self._idle)

    @property
    def num_in_use(self) -> int:
        """Pages that requests of running batches hold."""
        return self.allocator.num_used - len(self._idle)

    def find(self, keys: PrefixKeys, num_tokens: int) -> Found:
        """What is cached of the first num_tokens of a prompt. Changes nothing."""
        full = keys.pages[: num_tokens // keys.page_size]
        number = next((n for n, key in enumerate(full) if key not in self._entries), len(full))
        wanted = keys.content_of(number, num_tokens)
        source, num_bytes = self._index.longest(keys.parent_of(number), wanted)
        num_copied = num_bytes // keys.token_bytes
        least = 1 if number else min(LEAST_FIRST_TOKENS, max(2, keys.page_size // 2))
        if num_copied < least:
            return Found(full[:number])
        return Found(full[:number], source, num_copied)

    def idle_among(self, keys: Iterable[bytes]) -> set[bytes]:
        """The keys whose pages are cached and read by nobody."""
        return {key for key in keys if key in self._idle}

    def pin(self, keys: Iterable[bytes]) -> list[int]:
        """The cached pages of these keys, kept from eviction until they are released."""
        pages = []
        for key in keys:
            entry = self._entries[key]
            entry.num_users += 1
            self._idle.pop(key, None)
            pages.append(entry.page)
        return pages

    def allocate(self, num_pages: int) -> list[int]:
        """Take pages, evicting idle ones where too few are free. Raises Overloaded when those do not suffice."""
        missing = num_pages - self.allocator.num_free
        if 0 < missing <= len(self._idle):
            for _ in range(missing):
                self._drop(next(iter(self._idle)))
                self.num_evicted += 1
        return self.allocator.allocate(num_pages)

    def release(
        self, keys: PrefixKeys | None, pages: Sequence[int], found: Found, *, is_written: bool
    ) -> None:
        """Give back the pages of a request: all of `found` was pinned, its pages come first; the others were allocated.

        keys: of all its pages; None for those that nobody is to find. An allocated page stays as a cached one where its content
        was written and no cached page begins with that.
        """
        if found.source is not None:
            self._unpin(found.source)
            self._drop_if_needless(found.source)
        for number in range(len(pages) - 1, -1, -1):
            if number < len(found.keys):
                self._unpin(found.keys[number])
            elif keys is not None and is_written:
                self._keep(keys, number, pages[number])
            else:
                self.allocator.free((pages[number],))
                if keys is not None:
                    self._touch(keys.pages[number])

    def reset(self) -> int:
        """Evict every idle page; how many."""
        pages = [self._entries.pop(key).page for key in self._idle]
        self._idle.clear()
        # At once: one by one takes as long for each as there are beside it.
        self._index.retain(self._entries)
        self.allocator.free(pages)
        self.num_evicted += len(pages)
        return len(pages)

    def check_conservation(self) -> None:
        """Assert that every page is free, cached or handed out, that keys and pages go together, and nothing is lost."""
        self.allocator.check_conservation()
        pages = [entry.page for entry in self._entries.values()]
        assert len(set(pages)) == len(pages), "a page has two keys"
        assert all(entry.num_users >= 0 for entry in self._entries.values()), "released twice"
        idle = {key for key, entry in self._entries.items() if not entry.num_users}
        assert idle == set(self._idle), "idle pages and pages without users differ"
        assert self.num_in_use >= len(self._entries) - len(idle), "a cached page is free"
        assert len(self._index) == len(self._entries), "the index has other pages"
        for key, entry in self._entries.items():
            known = self._index.longest(entry.parent, entry.content)
            assert known == (key, len(entry.content)), "the index does not find a page"

    def _keep(self, keys: PrefixKeys, number: int, page: int) -> None:
        """Have a written page found from now on, unless one is that holds as much; those that hold less make room."""
        key, parent, content = keys.pages[number], keys.parent_of(number), keys.content_of(number)
        known = key if key in self._entries else self._index.longer(parent, content)
        if known is not None:
            self.allocator.free((page,))
            self._touch(known)
            return
        shorter = self._index.shorter(parent, content)
        self._entries[key] = _Entry(page, 0, parent, content)
        self._index.add(parent, content, key)
        self._touch(key)
        if shorter is not None:
            self._drop_if_needless(shorter)

    def _drop_if_needless(self, key: bytes) -> None:
        """Drop a page that another one begins with, unless somebody reads it: then it is dropped when he has."""
        entry = self._entries[key]
        if key in self._idle and self._index.longer(entry.parent, entry.content) is not None:
            self._drop(key)

    def _unpin(self, key: bytes) -> None:
        self._entries[key].num_users -= 1
        self._touch(key)

    def _touch(self, key: bytes) -> None:
        entry = self._entries.get(key)
        if entry is not None and not entry.num_users:
            self._idle[key] = None
            self._idle.move_to_end(key)

    def _drop(self, key: bytes) -> None:
        """Forget an idle page and free it."""
        del self._idle[key]
        entry = self._entries.pop(key)
        self._index.remove(entry.parent, entry.content)
        self.allocator.free((entry.page,))
