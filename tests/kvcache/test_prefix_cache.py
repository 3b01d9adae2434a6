"""The prefix cache against a plain list of what was asked for, and its keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgr_runtime.errors import Overloaded
from xgr_runtime.kvcache.allocator import PageAllocator, num_pages_of
from xgr_runtime.kvcache.prefix_cache import PrefixCache, page_keys, root_key

PAGE = 2
ROOT = root_key("weights", "layout", PAGE)


def keys_of(text: str) -> tuple[bytes, ...]:
    """One token a letter."""
    return page_keys(ROOT, np.asarray([ord(c) for c in text], dtype=np.int64), PAGE)


def test_a_key_names_everything_up_to_the_end_of_its_page() -> None:
    assert len(keys_of("abcde")) == 2
    assert keys_of("abcd") == keys_of("abcdx")[:2]
    assert keys_of("") == keys_of("a") == ()
    assert keys_of("abcd")[1] != keys_of("xbcd")[1], "the same page behind another one"
    assert keys_of("abab")[0] != keys_of("abab")[1]
    every = {key for text in ("abcd", "abdc", "bacd", "cdab") for key in keys_of(text)}
    assert len(every) == 7, "only 'ab' of the first two is common"
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
    assert page_keys(root_key("w", "l", 2), tokens, 2) != page_keys(
        root_key("v", "l", 2), tokens, 2
    )


@dataclass
class Held:
    """What one running request holds."""

    text: str
    pages: list[int]
    num_pinned: int


class Model:
    """A cache and what each page holds, by its own bookkeeping: the text up to the page's end."""

    def __init__(self, num_pages: int) -> None:
        self.cache = PrefixCache(PageAllocator(num_pages))
        self.content: dict[int, str] = {}

    def start(self, text: str) -> Held | None:
        keys, needed = keys_of(text), num_pages_of(len(text), PAGE)
        matched = keys[: self.cache.match(keys)]
        num_new = needed - len(matched)
        if num_new > self.cache.num_available - len(self.cache.idle_among(matched)):
            before = (self.cache.num_in_use, self.cache.num_cached)
            pinned = self.cache.pin(matched)
            with pytest.raises(Overloaded):
                self.cache.allocate(num_new)
            self.cache.release(keys, pinned, len(pinned), is_written=False)
            assert (self.cache.num_in_use, self.cache.num_cached) == before
            return None
        pages = self.cache.pin(matched)
        for number, page in enumerate(pages):
            assert self.content[page] == text[: (number + 1) * PAGE]
        pages += self.cache.allocate(num_new)
        for number in range(len(matched), needed):
            self.content[pages[number]] = text[: (number + 1) * PAGE]
        return Held(text, pages, len(matched))

    def end(self, held: Held, *, is_written: bool) -> None:
        if not is_written:
            for page in held.pages[held.num_pinned :]:
                self.content[page] = "rubbish"
        self.cache.release(keys_of(held.text), held.pages, held.num_pinned, is_written=is_written)


TEXTS = st.text("ab", min_size=1, max_size=9)


@given(
    num_pages=st.integers(2, 12),
    steps=st.lists(st.tuples(TEXTS, st.integers(0, 3), st.booleans()), max_size=40),
)
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
        assert model.cache.num_in_use == len({page for held in running for page in held.pages})
        for known in seen:
            # What is found is a prefix without gaps: behind the first page that is missing there is none.
            keys = keys_of(known)
            is_cached = [model.cache.match([key]) == 1 for key in keys]
            assert is_cached == sorted(is_cached, reverse=True)
            assert model.cache.match(keys) == sum(is_cached)
    for held in running:
        model.end(held, is_written=True)
    assert model.cache.num_in_use == 0
    assert model.cache.num_available == num_pages - 1
    num_cached = model.cache.num_cached
    assert model.cache.reset() == num_cached
    assert model.cache.allocator.num_free == num_pages - 1


def test_the_least_recently_used_leaves_first_and_from_its_end() -> None:
    model = Model(1 + 6)
    for text in ("abab", "cdcd", "abab"):
        held = model.start(text)
        assert held is not None
        model.end(held, is_written=True)
    assert model.cache.num_cached == 4
    pages = model.cache.allocate(3)
    assert [model.cache.match(keys_of(text)) for text in ("abab", "cdcd")] == [2, 1]
    pages += model.cache.allocate(2)
    assert [model.cache.match(keys_of(text)) for text in ("abab", "cdcd")] == [1, 0]
    assert model.cache.num_evicted == 3
    model.cache.allocator.free(pages)


def test_a_pinned_page_is_not_evicted() -> None:
    model = Model(1 + 2)
    held = model.start("ab")
    assert held is not None
    model.end(held, is_written=True)
    first, second = model.start("ab"), model.start("ab")
    assert first is not None
    assert second is not None
    assert first.pages == second.pages
    with pytest.raises(Overloaded, match="2 KV pages were asked for, 1 of 2 are free"):
        model.cache.allocate(2)
    assert model.cache.reset() == 0
    model.end(first, is_written=True)
    assert model.cache.num_idle == 0
    model.end(second, is_written=True)
    assert model.cache.num_idle == 1
