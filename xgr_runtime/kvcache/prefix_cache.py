"""Pages of histories that were prefilled before, found again by what they hold. No torch: property-tested anywhere.

Keys and values of a token depend on the tokens up to it and on nothing else, so a full page is worth keeping under the
key of all tokens up to its end: a digest of (parent page's key, the page's own content), and at the root of (weights,
KV layout, page size). A user who returns with a longer history finds the pages of the shorter one; one whose window
dropped its oldest item finds none, since every key changed. Keys need no trust in the caller: a digest of 32 bytes has
no collisions that anybody can make.

Cached pages that no running batch reads are evicted when pages are asked for, the least recently used first. A request
touches its pages from the last to the first, so a page always leaves before the pages it continues: what is found is
always a prefix without gaps.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from xgr_runtime.kvcache.allocator import PageAllocator
from xgr_runtime.types import Int64Array

KEY_BYTES = 32


def root_key(weights: str, kv_layout: str, page_size: int) -> bytes:
    """The parent key of a history's first page: what else the keys and values depend on."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in (weights, kv_layout, str(page_size)):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def page_keys(root: bytes, token_ids: Int64Array, page_size: int) -> tuple[bytes, ...]:
    """The key of every full page of a prompt; token_ids int64 [n], the content of a page is its tokens."""
    content, width = memoryview(token_ids.tobytes()), page_size * token_ids.itemsize
    keys, parent = [], root
    for start in range(0, len(content) - width + 1, width):
        page = content[start : start + width]
        parent = hashlib.blake2b(page, key=parent, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return tuple(keys)


@dataclass
class _Entry:
    """A cached page and how many requests of running batches read it."""

    page: int
    num_users: int


class PrefixCache:
    """Hands out the pages of an allocator and keeps those with a key. The caller serialises all calls."""

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self.num_evicted = 0
        self._entries: dict[bytes, _Entry] = {}
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

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of the first pages are cached. Changes nothing."""
        for number, key in enumerate(keys):
            if key not in self._entries:
                return number
        return len(keys)

    def idle_among(self, keys: Sequence[bytes]) -> set[bytes]:
        """The keys whose pages are cached and read by nobody."""
        return {key for key in keys if key in self._idle}

    def pin(self, keys: Sequence[bytes]) -> list[int]:
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
                self._evict()
        return self.allocator.allocate(num_pages)

    def release(
        self, keys: Sequence[bytes], pages: Sequence[int], num_pinned: int, *, is_written: bool
    ) -> None:
        """Give back the pages of a request: the first `num_pinned` were pinned, the others allocated.

        keys: one for each full page, at least for the pinned ones. An allocated page with a key stays as a cached page
        where its content was written and nobody else's page has that key.
        """
        for number in range(len(pages) - 1, -1, -1):
            page = pages[number]
            key = keys[number] if number < len(keys) else None
            if number < num_pinned:
                assert key is not None, "a pinned page has a key"
                self._entries[key].num_users -= 1
            elif key is not None and is_written and key not in self._entries:
                self._entries[key] = _Entry(page, num_users=0)
            else:
                self.allocator.free((page,))
            if key is not None:
                self._touch(key)

    def reset(self) -> int:
        """Evict every idle page; how many."""
        num_pages = len(self._idle)
        for _ in range(num_pages):
            self._evict()
        return num_pages

    def check_conservation(self) -> None:
        """Assert that every page is free, cached or handed out, that keys and pages go together, and nothing is lost."""
        self.allocator.check_conservation()
        pages = [entry.page for entry in self._entries.values()]
        assert len(set(pages)) == len(pages), "a page has two keys"
        assert all(entry.num_users >= 0 for entry in self._entries.values()), "released twice"
        idle = {key for key, entry in self._entries.items() if not entry.num_users}
        assert idle == set(self._idle), "idle pages and pages without users differ"
        assert self.num_in_use >= len(self._entries) - len(idle), "a cached page is free"

    def _touch(self, key: bytes) -> None:
        entry = self._entries.get(key)
        if entry is not None and not entry.num_users:
            self._idle[key] = None
            self._idle.move_to_end(key)

    def _evict(self) -> None:
        key, _ = self._idle.popitem(last=False)
        self.allocator.free((self._entries.pop(key).page,))
        self.num_evicted += 1
