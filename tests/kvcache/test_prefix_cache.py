"""The prefix cache against plain texts: what was written, what of it must be found, and its keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgr_runtime.errors import Overloaded
from xgr_runtime.kvcache.allocator import PageAllocator, num_pages_of
from xgr_runtime.kvcache.prefix_cache import Found, PrefixCache
from xgr_runtime.kvcache.prefix_index import PrefixIndex
from xgr_runtime.kvcache.prefix_keys import PrefixKeys, prefix_keys, root_key

PAGE = 4
LEAST = 2  # behind no page: what the cache says, half of so small a page
ROOT = root_key("weights", "layout", PAGE)


def keys_of(text: str, page_size: int = PAGE) -> PrefixKeys:
    """One token a letter."""
    return prefix_keys(ROOT, np.asarray([ord(c) for c in text], dtype=np.int64), page_size)


def test_a_key_names_everything_up_to_the_end_of_its_page() -> None:
    assert len(keys_of("abcdefghi").pages) == 3
    assert keys_of("abcdefgh").pages == keys_of("abcdefghx").pages[:2]
    assert keys_of("").pages == ()
    assert keys_of("abcdefgh").pages[1] != keys_of("xbcdefgh").pages[1], "behind another page"
    assert keys_of("abababab").pages[0] != keys_of("abababab").pages[1]
    every = {key for text in ("abcd", "abc", "ab", "abcde", "bcd") for key in keys_of(text).pages}
    assert len(every) == 5, (
        "'abcd' is the one page of two texts, and every end has a key of its own"
    )
    assert {len(key) for key in every} == {32}


def test_keys_depend_on_weights_layout_and_page_size() -> None:
    parts = [
        ("w", "l", 2),
        ("w", "l", 4),
        ("w", "k", 2),
        ("v", "l", 2),
        ("wl", "", 2),
        ("", "wl", 2),
    ]
    assert len({root_key(*part) for part in parts}) == len(parts)
    tokens = np.arange(4, dtype=np.int64)
    of_weights = [prefix_keys(root_key(name, "l", 2), tokens, 2).pages for name in "wv"]
    assert not set(of_weights[0]) & set(of_weights[1])


def num_common(one: str, two: str) -> int:
    """Letters that both begin with."""
    number = 0
    while number < min(len(one), len(two)) and one[number] == two[number]:
        number += 1
    return number


TEXTS = st.text("ab", min_size=1, max_size=14)


@given(texts=st.sets(TEXTS, max_size=12), removed=st.sets(TEXTS, max_size=4), wanted=TEXTS)
def test_the_index_finds_the_longest_common_beginning(
    texts: set[str], removed: set[str], wanted: str
) -> None:
    index = PrefixIndex()
    for text in texts | removed:
        index.add(b"parent", text.encode(), f"key {text}".encode())
    index.add(b"other", wanted.encode(), b"other")
    for text in removed:
        index.remove(b"parent", text.encode())
    texts -= removed
    assert len(index) == len(texts) + 1
    most = max((num_common(text, wanted) for text in texts), default=0)
    key, num_bytes = index.longest(b"parent", wanted.encode())
    assert num_bytes == most
    assert (key is None) == (most == 0)
    if key is not None:
        assert key.decode().removeprefix("key ")[:most] == wanted[:most]
    longer = index.longer(b"parent", wanted.encode())
    assert (longer is not None) == any(t.startswith(wanted) for t in texts - {wanted})
    shorter = index.shorter(b"parent", wanted.encode())
    if shorter is not None:
        assert shorter.decode().removeprefix("key ") in {t for t in texts if t != wanted}
        assert wanted.startswith(shorter.decode().removeprefix("key "))
    assert index.longest(b"nobody", wanted.encode()) == (None, 0)


@dataclass
class Held:
    """What one running request holds."""

    text: str
    pages: list[int]
    found: Found


class Model:
    """A cache and what each page holds, by its own bookkeeping: for each token of a page the text up to it."""

    def __init__(self, num_pages: int) -> None:
        self.cache = PrefixCache(PageAllocator(num_pages))
        self.content: dict[int, list[str]] = {}

    def find(self, text: str) -> Found:
        """What a request of that prompt may read: its last token is computed."""
        return self.cache.find(keys_of(text), len(text) - 1)

    def start(self, text: str) -> Held | None:
        found, needed = self.find(text), num_pages_of(len(text), PAGE)
        num_new = needed - len(found.keys)
        if num_new > self.cache.num_available - len(self.cache.idle_among(found.all_keys)):
            before = (self.cache.num_in_use, self.cache.num_cached)
            pinned = self.cache.pin(found.all_keys)
            with pytest.raises(Overloaded):
                self.cache.allocate(num_new)
            self.cache.release(keys_of(text), pinned[: len(found.keys)], found, is_written=False)
            assert (self.cache.num_in_use, self.cache.num_cached) == before
            return None
        pages = self.cache.pin(found.all_keys)
        source = [] if found.source is None else self.content[pages.pop()][: found.num_copied]
        pages += self.cache.allocate(num_new)
        whole = [text[: end + 1] for end in range(len(text))]
        for number in range(len(found.keys), needed):
            self.content[pages[number]] = whole[number * PAGE : (number + 1) * PAGE]
        read = [held for page in pages[: len(found.keys)] for held in self.content[page]] + source
        assert read == whole[: found.num_tokens(PAGE)], "a page holds something else"
        assert len(read) < len(text)
        return Held(text, pages, found)

    def end(self, held: Held, *, is_written: bool) -> None:
        if not is_written:
            for page in held.pages[len(held.found.keys) :]:
                self.content[page] = ["rubbish"] * PAGE
        self.cache.release(keys_of(held.text), held.pages, held.found, is_written=is_written)

    def run(self, text: str) -> Found:
        """A request from its start to its end."""
        held = self.start(text)
        assert held is not None
        self.end(held, is_written=True)
        return held.found


STEPS = st.lists(st.tuples(TEXTS, st.integers(0, 3), st.booleans()), max_size=40)


@given(num_pages=st.integers(2, 12), steps=STEPS)
def test_whatever_runs_and_ends(num_pages: int, steps: list[tuple[str, int, bool]]) -> None:
    model = Model(num_pages)
    running: list[Held] = []
    seen = {""}
    for text, number, is_written in steps:
        if len(running) > number:
            model.end(running.pop(number), is_written=is_written)
        elif (held := model.start(text)) is not None:
            running.append(held)
            seen |= {text[: end * PAGE] for end in range(1, len(text) // PAGE + 1)}
        model.cache.check_conservation()
        pinned = [key for held in running for key in held.found.all_keys]
        own = [page for held in running for page in held.pages[len(held.found.keys) :]]
        assert model.cache.num_in_use == len(set(pinned)) + len(own)
        for known in seen:
            # What is found is a prefix without gaps: behind the first page that is missing there is none.
            keys = keys_of(known).pages
            is_cached = [key in model.cache._entries for key in keys]
            assert is_cached == sorted(is_cached, reverse=True)
        for entry in model.cache._entries.values():
            roots = (ROOT, *model.cache._entries)
            assert entry.parent in roots, "a page outlived the page that it continues"
    for held in running:
        model.end(held, is_written=True)
    assert model.cache.num_in_use == 0
    assert model.cache.num_available == num_pages - 1
    num_cached = model.cache.num_cached
    assert model.cache.reset() == num_cached
    assert model.cache.allocator.num_free == num_pages - 1


@given(steps=STEPS, wanted=TEXTS)
def test_with_room_the_longest_common_beginning_of_all_texts_is_found(
    steps: list[tuple[str, int, bool]], wanted: str
) -> None:
    """To the token, of those that were written to their end; of those that still run, or failed, nothing."""
    model = Model(1000)
    running: list[Held] = []
    written: list[str] = []
    for text, number, is_written in steps:
        if len(running) > number:
            held = running.pop(number)
            model.end(held, is_written=is_written)
            written += [held.text] * is_written
        else:
            started = model.start(text)
            assert started is not None
            running.append(started)
        expected = max((num_common(w, wanted[:-1]) for w in written), default=0)
        found = model.find(wanted).num_tokens(PAGE)
        assert found == (expected if expected >= LEAST else 0)
    assert model.cache.num_evicted == 0
    for held in running:
        model.end(held, is_written=False)


@given(texts=st.lists(TEXTS, max_size=30))
def test_no_page_is_kept_that_another_begins_with(texts: list[str]) -> None:
    model = Model(1000)
    for text in texts:
        model.run(text)
    ends = [held[-1] for page, held in model.content.items() if page in pages_of(model.cache)]
    starts = {text[:end] for text in texts for end in range(len(text) + 1)}
    needed = {e for e in starts if e in texts or len(e) % PAGE == 0} - {""}
    # A text that ends inside a page that others fill further leaves none of its own.
    last = {
        e for e in needed
        if len(e) % PAGE == 0 or not any(
            o != e and o.startswith(e) and len(o) <= num_pages_of(len(e), PAGE) * PAGE for o in starts
        )
    }  # fmt: skip
    assert sorted(ends) == sorted(last)


def pages_of(cache: PrefixCache) -> set[int]:
    return {entry.page for entry in cache._entries.values()}


def test_a_returning_user_pays_for_what_is_new() -> None:
    model = Model(100)
    found = [model.run(text) for text in ("abcdefg", "abcdefghi", "abcdefghi", "abcdx", "abxx")]
    assert [one.num_tokens(PAGE) for one in found] == [0, 7, 8, 4, 2]
    # abcd | efgh | i; of the first visit's own last page nothing is left; abcd | x; abxx
    assert model.cache.num_cached == 5


def test_what_every_history_begins_with_is_no_find() -> None:
    for page_size, least in ((1, 0), (2, 0), (4, 2), (16, 8), (128, 8)):
        cache = PrefixCache(PageAllocator(9))
        text = "abcdefghijklmnop"[: max(1, page_size - 1)]
        keys = keys_of(text, page_size)
        cache.release(keys, cache.allocate(1), Found(), is_written=True)
        found = [
            cache.find(keys_of(text[:n] + "xyz", page_size), n + 2).num_tokens(page_size)
            for n in range(len(text) + 1)
        ]
        if page_size == 1:
            assert found == [0, 1]
            continue
        assert found == [n if least and n >= least else 0 for n in range(len(text) + 1)]


def test_two_that_part_copy_the_same_page_and_leave_it_as_it_is() -> None:
    model = Model(100)
    model.run("abcdef")
    one, two = model.start("abcdefgx"), model.start("abcdefgy")
    assert one is not None
    assert two is not None
    assert one.found == two.found
    assert one.found.num_tokens(PAGE) == 6
    assert one.pages[0] == two.pages[0]
    assert len({*one.pages, *two.pages}) == 3
    model.end(one, is_written=True)
    assert model.cache.num_cached == 3, "what the second copies from is still in use"
    model.end(two, is_written=True)
    assert model.cache.num_cached == 3, "abcd, efgx and efgy hold all there is of ef"
    assert model.find("abcdefgyz").num_tokens(PAGE) == 8


def test_a_failed_request_leaves_its_source_and_nothing_else() -> None:
    model = Model(100)
    model.run("abcdef")
    held = model.start("abcdefghij")
    assert held is not None
    model.end(held, is_written=False)
    assert model.cache.num_cached == 2
    assert model.find("abcdefghij").num_tokens(PAGE) == 6


def test_the_least_recently_used_leaves_first_and_from_its_end() -> None:
    model = Model(1 + 6)
    for text in ("aaaabb", "ccccdddd", "aaaabb"):
        model.run(text)
    assert model.cache.num_cached == 4

    def found() -> list[int]:
        return [model.find(text + "x").num_tokens(PAGE) for text in ("aaaabb", "ccccdddd")]

    pages = model.cache.allocate(3)
    assert found() == [6, 4]
    pages += model.cache.allocate(2)
    assert found() == [4, 0]
    assert model.cache.num_evicted == 3
    model.cache.allocator.free(pages)


def test_a_pinned_page_is_not_evicted() -> None:
    model = Model(1 + 4)
    model.run("abcdef")
    first, second = model.start("abcdefg"), model.start("abcdefh")
    assert first is not None
    assert second is not None
    assert first.pages[0] == second.pages[0]
    with pytest.raises(Overloaded, match="1 KV pages were asked for, 0 of 4 are free"):
        model.cache.allocate(1)
    assert model.cache.reset() == 0
    model.end(first, is_written=True)
    assert model.cache.num_idle == 1, "efg; abcd and ef are read by the second"
    model.end(second, is_written=True)
    assert model.cache.num_idle == 3


def test_a_look_up_among_thousands_compares_a_few() -> None:
    """Every history's first page has the same parent: what is compared does not grow with them."""
    rng = np.random.default_rng(0)
    cache = PrefixCache(PageAllocator(5001))
    prompts = [np.concatenate([[1], rng.integers(2, 99, 119)]) for _ in range(5000)]
    for prompt in prompts:
        keys = prefix_keys(ROOT, prompt, 128)
        cache.release(keys, cache.allocate(1), Found(), is_written=True)
    for prompt in prompts[::500]:
        longer = prefix_keys(ROOT, np.concatenate([prompt, [100, 101, 102]]), 128)
        assert cache.find(longer, 122).num_tokens(128) == 120
