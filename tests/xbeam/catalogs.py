"""Small catalogues for tests, and plain-Python readings of them that share no code with the runtime."""

from __future__ import annotations

import json
import struct
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hypothesis import strategies as st

from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import build_catalog

if TYPE_CHECKING:
    from collections.abc import Sequence

TAGS = ("brand:a", "brand:b", "category:shoes", "region:eu")


class Item(NamedTuple):
    """One item as the tests state it."""

    item_id: int
    sid: tuple[int, ...]
    weight: float = 0.0
    servable: bool = True
    tags: tuple[str, ...] = ()


class Source(NamedTuple):
    """A catalogue's input: items and codes per level."""

    items: list[Item]
    num_codes: tuple[int, ...]


def build_full(path: Path) -> None:
    """A catalogue with every kind of section."""
    build_catalog(
        path,
        sids=[[0, 1], [0, 1], [1, 2], [2, 0], [1, 1]],
        item_ids=[7, -3, 2**60, 4, 5],
        keys=["k7", "k-3", None, "ключ", "k5"],
        titles=["seven", "", "big", "четыре", "five"],
        weights=[0.5, 1.5, 0, 0, 0],
        servable=[True, True, True, True, False],
        tags=[["a"], ["a", "b"], [], ["c"], ["b"]],
        num_codes=[3, 3],
        token_offsets=[10, 13],
        version="v1",
    )


def build_items(path: Path, items: Sequence[Item], num_codes: Sequence[int]) -> Catalog:
    """Builds, opens and verifies; tokens start at 10 and levels do not overlap."""
    build_catalog(
        path,
        sids=[item.sid for item in items],
        item_ids=[item.item_id for item in items],
        weights=[item.weight for item in items],
        servable=[item.servable for item in items],
        tags=[item.tags for item in items],
        num_codes=num_codes,
        token_offsets=[10 + sum(num_codes[:level]) for level in range(len(num_codes))],
    )
    catalog = Catalog.open(path)
    catalog.verify()
    return catalog


def build_source(source: Source) -> Catalog:
    """Builds in a folder of its own that is gone afterwards; the mapping keeps the content."""
    with tempfile.TemporaryDirectory() as folder:
        return build_items(Path(folder) / "catalog", source.items, source.num_codes)


def position_order(items: Sequence[Item]) -> list[Item]:
    """The items by position, as specified: servable ones first, by SID, weight descending, id ascending."""
    return sorted(items, key=lambda item: (not item.servable, item.sid, -item.weight, item.item_id))


def leaves(catalog: Catalog) -> list[tuple[int, ...]]:
    """All SIDs in leaf order, by walking the arrays one element at a time."""
    prefixes: list[tuple[int, ...]] = [()]
    for offsets, codes in zip(catalog.offsets, catalog.codes, strict=True):
        prefixes = [
            (*prefix, int(codes[edge]))
            for node, prefix in enumerate(prefixes)
            for edge in range(int(offsets[node]), int(offsets[node + 1]))
        ]
    return prefixes


@st.composite
def sources(draw: st.DrawFn, max_items: int = 30) -> Source:
    """Small catalogues with shared SIDs, equal weights, tags, and at least one servable item."""
    num_codes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    item = st.builds(
        Item,
        st.integers(-(2**63), 2**63 - 1),
        st.tuples(*(st.integers(0, size - 1) for size in num_codes)),
        st.sampled_from([0.0, 1.0, -2.5]),
        st.sampled_from([True, True, True, False]),
        st.lists(st.sampled_from(TAGS), unique=True, max_size=3).map(tuple),
    )
    items = draw(
        st.lists(item, min_size=1, max_size=max_items, unique_by=lambda item: item.item_id).filter(
            lambda items: any(item.servable for item in items)
        )
    )
    return Source(items, tuple(num_codes))


def raw_header(content: bytes) -> dict[str, Any]:
    """A catalogue file's header as JSON holds it."""
    (header_bytes,) = struct.unpack("<I", content[12:16])
    header: dict[str, Any] = json.loads(content[32 : 32 + header_bytes])
    return header


def with_header(content: bytes, header: bytes) -> bytes:
    """The file with another header: sections moved to where it lets them start, prefix and checksum that fit."""
    (old_bytes,) = struct.unpack("<I", content[12:16])
    old_end, end = 32 + old_bytes, 32 + len(header)
    body = content[old_end + -old_end % 64 :]
    size = end + -end % 64 + len(body)
    prefix = struct.pack("<8sIIQ", content[:8], 1, len(header), size)
    crc = zlib.crc32(header, zlib.crc32(prefix + bytes(8)))
    return prefix + struct.pack("<II", crc, 0) + header + bytes(-end % 64) + body
