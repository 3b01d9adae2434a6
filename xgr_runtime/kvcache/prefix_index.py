"""Which of the pages that continue a page begins most like given tokens. No torch: property-tested anywhere.

The pages behind one parent are sorted by content. In any sorted list what has the longest beginning in common with a text
stands next to where that text would: so two comparisons of content find it, however many users' first pages have the same
parent. What is compared is the content itself.
"""

from bisect import bisect_left
from collections.abc import Container

import numpy as np

_Child = tuple[bytes, bytes]  # content, key


class PrefixIndex:
    """The children of each key. Contents of one parent's children differ."""

    def __init__(self) -> None:
        self._children: dict[bytes, list[_Child]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._children.values()))

    def add(self, parent: bytes, content: bytes, key: bytes) -> None:
        """A page of that content behind `parent` is known as `key`."""
        children = self._children.setdefault(parent, [])
        children.insert(bisect_left(children, (content,)), (content, key))

    def remove(self, parent: bytes, content: bytes) -> None:
        """Forget a page that was added."""
        children = self._children[parent]
        place = bisect_left(children, (content,))
        assert children[place][0] == content
        del children[place]
        if not children:
            del self._children[parent]

    def retain(self, keys: Container[bytes]) -> None:
        """Forget every page but those."""
        kept = {
            parent: [child for child in children if child[1] in keys]
            for parent, children in self._children.items()
        }
        self._children = {parent: children for parent, children in kept.items() if children}

    def longest(self, parent: bytes, content: bytes) -> tuple[bytes | None, int]:
        """The child with the longest beginning in common with `content`, and the bytes of that; (None, 0) where there is none."""
        children = self._children.get(parent, [])
        place = bisect_left(children, (content,))
        best: bytes | None = None
        most = 0
        for other, key in children[max(0, place - 1) : place + 1]:
            common = _num_common(content, other)
            if common > most:
                best, most = key, common
        return best, most

    def longer(self, parent: bytes, content: bytes) -> bytes | None:
        """A child that begins with all of `content` and goes on."""
        children = self._children.get(parent, [])
        place = bisect_left(children, (content,))
        if place < len(children) and children[place][0] == content:
            place += 1
        if place < len(children) and children[place][0].startswith(content):
            return children[place][1]
        return None

    def shorter(self, parent: bytes, content: bytes) -> bytes | None:
        """A child that is a shorter beginning of `content`, if it stands next to it: it does where nothing longer than it is there."""
        children = self._children.get(parent, [])
        place = bisect_left(children, (content,))
        if place and content.startswith(children[place - 1][0]):
            return children[place - 1][1]
        return None


def _num_common(one: bytes, two: bytes) -> int:
    """Bytes that both begin with."""
    size = min(len(one), len(two))
    if one[:size] == two[:size]:
        return size
    differs = np.frombuffer(one, np.uint8, size) != np.frombuffer(two, np.uint8, size)
    return int(differs.argmax())
