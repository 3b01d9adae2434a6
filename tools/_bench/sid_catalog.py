"""A random catalogue of semantic ids for whole-engine benchmarks, and its prefixes as sorted arrays read off the raw ids.

`skewed`: popular codes have more items, as residual codebooks give them. First codes are drawn with a probability that falls
with their rank, pairs of the first two codes are a quarter of the items, and items share pairs with a probability that falls
with the pair's rank: most pairs have a few last codes, some have thousands. `uniform`: every code independent.

The prefixes are the oracle's view of the catalogue: numpy alone, nothing of the runtime's trie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.xbeam.catalog_build import build_catalog

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

NUM_LEVELS = 3
FIRST_CODE_SKEW = 0.4
PAIR_SKEW = 0.6
NUM_REGIONS, NUM_CATEGORIES, ADULT_SHARE = 4, 32, 0.05


@dataclass(frozen=True)
class SidItems:
    """sids int64 [items, 3]; the id of an item is its row. tags: name -> rows."""

    num_codes: int
    sids: NDArray[np.int64]
    tags: dict[str, NDArray[np.int64]]

    def passing(
        self, require: tuple[tuple[str, ...], ...], exclude: tuple[str, ...], ids: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which items pass: of every group one tag, no excluded tag, not among the ids."""
        keep = np.ones(len(self.sids), bool)
        for group in require:
            has_tag = np.zeros(len(self.sids), bool)
            for tag in group:
                has_tag[self.tags[tag]] = True
            keep &= has_tag
        for tag in exclude:
            keep[self.tags[tag]] = False
        keep[ids] = False
        return keep


def draw_items(num_items: int, num_codes: int, seed: int, *, is_skewed: bool = True) -> SidItems:
    """Random items with tags: a region, a category, and `adult` for some."""
    rng = np.random.default_rng(seed)
    sids = rng.integers(0, num_codes, (num_items, NUM_LEVELS))
    if is_skewed:
        num_pairs = max(1, num_items // 4)
        first = rng.permutation(num_codes)[_ranks(rng, num_codes, FIRST_CODE_SKEW, num_pairs)]
        pairs = np.stack([first, rng.integers(0, num_codes, num_pairs)], axis=1)
        sids[:, :2] = pairs[_ranks(rng, num_pairs, PAIR_SKEW, num_items)]
    regions = rng.integers(0, NUM_REGIONS, num_items)
    categories = rng.integers(0, NUM_CATEGORIES, num_items)
    tags = {f"region:{n}": np.flatnonzero(regions == n) for n in range(NUM_REGIONS)}
    tags |= {f"category:{n}": np.flatnonzero(categories == n) for n in range(NUM_CATEGORIES)}
    tags["adult"] = np.flatnonzero(rng.random(num_items) < ADULT_SHARE)
    return SidItems(num_codes, sids, {name: rows for name, rows in tags.items() if len(rows)})


def _ranks(rng: np.random.Generator, most: int, skew: float, count: int) -> NDArray[np.int64]:
    """Ranks below `most` with probability about rank^-skew: the inverse of its sum, which grows as rank^(1 - skew)."""
    drawn: NDArray[np.int64] = (most * rng.random(count) ** (1 / (1 - skew))).astype(np.int64)
    return np.minimum(drawn, most - 1)


def write_catalog(items: SidItems, path: Path, first_token: int) -> Path:
    """Compile the items with the runtime's own builder; the levels' tokens follow each other from first_token on."""
    offsets = [first_token + items.num_codes * level for level in range(NUM_LEVELS)]
    build_catalog(
        path,
        sids=items.sids,
        tags=items.tags,
        num_codes=[items.num_codes] * NUM_LEVELS,
        token_offsets=offsets,
    )
    return path


class Prefixes:
    """All prefixes of some items, level by level in sorted order, and the codes behind each."""

    def __init__(self, sids: NDArray[np.int64], num_codes: int) -> None:
        self.num_codes = num_codes
        keys = np.zeros(len(sids), np.int64)
        self.keys: list[NDArray[np.int64]] = []  # [prefixes of l + 1 codes], packed and sorted
        for level in range(sids.shape[1]):
            keys = keys * num_codes + sids[:, level]
            self.keys.append(np.unique(keys))

    def children(self, prefixes: NDArray[np.int64], length: int) -> tuple[Any, Any]:
        """Of packed prefixes of `length` codes: how many children each has (int64), and their packed keys, all in order."""
        keys = self.keys[length]
        first = np.searchsorted(keys, prefixes * self.num_codes)
        counts = np.searchsorted(keys, (prefixes + 1) * self.num_codes) - first
        starts = np.cumsum(counts) - counts
        place = np.arange(int(counts.sum())) + np.repeat(first - starts, counts)
        return counts, keys[place]

    def codes_of(self, packed: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """[n, length] codes of packed prefixes."""
        codes = np.empty((len(packed), length), np.int64)
        for place in range(length - 1, -1, -1):
            packed, codes[:, place] = np.divmod(packed, self.num_codes)
        return codes

    def fanouts(self) -> list[dict[str, float]]:
        """Per level: nodes and edges, and what a node has: mean, median, 99th percentile, most."""
        found = []
        before = np.zeros(1, np.int64)
        for level, keys in enumerate(self.keys):
            counts, _ = self.children(before, level)
            median, high, most = np.percentile(counts, [50, 99, 100]).tolist()
            found.append(
                {
                    "nodes": len(before),
                    "edges": len(keys),
                    "mean": round(float(counts.mean()), 2),
                    "median": median,
                    "p99": high,
                    "most": most,
                }
            )
            before = keys
        return found
