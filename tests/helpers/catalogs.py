"""Small random catalogues for the oracles and, as JSONL and token tables, for the product."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from tests.helpers.oracle import Catalog, Item

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TAGS = ("category:shoes", "category:hats", "region:eu", "region:us", "new")


def contiguous_tokens(num_codes: Sequence[int], first: int = 0) -> tuple[tuple[int, ...], ...]:
    """Ranges one behind the other, the first starting at `first`."""
    tables = []
    for count in num_codes:
        tables.append(tuple(range(first, first + count)))
        first += count
    return tuple(tables)


def scattered_tokens(
    num_codes: Sequence[int], vocab_size: int, seed: int, share_absent: float = 0.0
) -> tuple[tuple[int, ...], ...]:
    """Tokens in no order, overlapping between levels; `share_absent` of the codes have none."""
    rng = np.random.default_rng(seed)
    tables = []
    for count in num_codes:
        tokens = rng.permutation(vocab_size)[:count]
        absent = rng.random(count) < share_absent
        absent[rng.integers(count)] = False
        tables.append(tuple(np.where(absent, -1, tokens).tolist()))
    return tuple(tables)


def random_catalog(
    seed: int,
    num_items: int,
    token_of: Sequence[Sequence[int]],
    *,
    share_hidden: float = 0.0,
    share_tagged: float = 0.4,
    skew: float = 0.0,
) -> Catalog:
    """Items on random mapped codes. skew > 0 prefers small codes (long buckets, hubs)."""
    rng = np.random.default_rng(seed)
    mapped = [[code for code, token in enumerate(table) if token >= 0] for table in token_of]
    item_ids = rng.choice(num_items * 10, num_items, replace=False)
    items = []
    for item_id in item_ids.tolist():
        sid = tuple(
            codes[int(len(codes) * rng.random() ** (1.0 + skew)) % len(codes)] for codes in mapped
        )
        items.append(
            Item(
                item_id,
                sid,
                weight=float(rng.integers(4)),
                tags=frozenset(tag for tag in TAGS if rng.random() < share_tagged),
                servable=bool(rng.random() >= share_hidden),
                key=f"key-{item_id}",
            )
        )
    return Catalog(tuple(items), tuple(tuple(table) for table in token_of))


@st.composite
def catalogs(
    draw: st.DrawFn,
    *,
    max_levels: int = 4,
    max_codes: int = 6,
    max_items: int = 24,
    vocab_size: int = 32,
    may_hide: bool = True,
) -> Catalog:
    """Any small catalogue: shared SIDs, hubs, chains, overlapping and scattered tokens, hidden items, tags."""
    num_levels = draw(st.integers(1, max_levels))
    token_of = []
    for _ in range(num_levels):
        count = draw(st.integers(1, max_codes))
        tokens = draw(
            st.lists(st.integers(0, vocab_size - 1), min_size=count, max_size=count, unique=True)
        )
        absent = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        absent[draw(st.integers(0, count - 1))] = False
        token_of.append(
            tuple(-1 if gone else token for token, gone in zip(tokens, absent, strict=True))
        )
    codes = [st.sampled_from([c for c, t in enumerate(table) if t >= 0]) for table in token_of]
    rows = draw(
        st.lists(
            st.tuples(
                st.tuples(*codes),
                st.integers(0, 2),
                st.frozensets(st.sampled_from(TAGS[:4]), max_size=2),
                st.integers(0, 4),
            ),
            min_size=1,
            max_size=max_items,
        )
    )
    ids = draw(
        st.lists(
            st.integers(-5, 10 * max_items), min_size=len(rows), max_size=len(rows), unique=True
        )
    )
    items = [
        Item(item_id, sid, float(weight), tags, not may_hide or hidden > 0, f"key-{item_id}")
        for item_id, (sid, weight, tags, hidden) in zip(ids, rows, strict=True)
    ]
    if not any(item.servable for item in items):
        items[0] = Item(items[0].item_id, items[0].sid, items[0].weight, items[0].tags)
    return Catalog(tuple(items), tuple(token_of))


def write_jsonl(catalog: Catalog, path: Path) -> Path:
    """Writes the items as the lines that `xgr catalog build` reads; the tokens stay in `catalog.token_of`."""
    with path.open("w", encoding="utf-8") as file:
        for item in catalog.items:
            line = {
                "item_id": item.item_id,
                "sid": list(item.sid),
                "weight": item.weight,
                "tags": sorted(item.tags),
                "servable": item.servable,
            }
            if item.key:
                line["key"] = item.key
            file.write(json.dumps(line) + "\n")
    return path
