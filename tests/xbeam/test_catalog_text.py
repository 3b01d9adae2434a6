"""Packed strings and the key look-up."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xgr_runtime.xbeam.catalog_text import KeyIndex, index_keys, pack_strings

texts = st.text(st.characters(codec="utf-8"), max_size=5)


@given(st.lists(texts, max_size=10))
def test_pack_and_take(strings: list[str]) -> None:
    packed = pack_strings([text.encode() for text in strings])
    packed.check("strings")
    assert packed.take(range(len(packed))) == strings


@given(st.lists(texts, unique=True, max_size=10), st.lists(texts, max_size=10))
def test_find(keys: list[str], others: list[str]) -> None:
    index = index_keys(pack_strings([key.encode() for key in keys]))
    index.check(len(keys), "keys")
    position = {key: row for row, key in enumerate(keys) if key}
    queries = keys + others
    assert index.find(queries).tolist() == [position.get(key, -1) for key in queries]


def test_equal_hashes_are_told_apart() -> None:
    """The bytes decide: all hashes are forced to the one of the key that is looked for."""
    real = index_keys(pack_strings([b"one", b"two", b"three"]))
    for key, position in (("one", 0), ("two", 1), ("three", 2)):
        wanted = index_keys(pack_strings([key.encode()])).hashes[0]
        forced = KeyIndex(real.keys, np.full(3, wanted), real.order)
        assert forced.find([key]).tolist() == [position]
        assert forced.find(["four"]).tolist() == [-1]


def test_the_hash_is_part_of_the_format() -> None:
    assert index_keys(pack_strings([b"B00006IR62"])).hashes.tolist() == [11395084676919480078]
