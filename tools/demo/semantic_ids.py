"""Semantic ids of the demo's items, from who was watched near whom.

Co-occurrence within 10 positions of a sequence, weighted 1 / distance -> positive pointwise mutual
information -> SVD to 32 dimensions -> residual k-means with 3 codebooks of 64. The last level takes
the nearest code that is still free under its prefix, so every item has an id of its own.

The ids must come out the same on every machine, yet BLAS libraries round differently and k-means
turns a last-bit difference into another cluster. Therefore the vectors are rounded to integers
right after the SVD (its error is about 1e-9 of one step, so a value on the edge between two
integers is all but impossible) and everything after that is exact integer arithmetic: squared
distances stay far below 2^63, centroids are rounded by integer division, ties go to the smaller
index.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

IntArray = NDArray[np.int64]

NUM_LEVELS = 3
NUM_CODES = 64
NUM_DIMS = 32
WINDOW = 10
STEPS_PER_UNIT = 1 << 16
NUM_ROUNDS = 50
SEED = 1


def semantic_ids(
    sequences: Mapping[int, Sequence[int]], item_ids: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """item id -> its own SID of 3 codes in [0, 64), for every id in `item_ids` (ascending).

    Items that occur in no sequence have zero vectors and share clusters, but not codes.
    Raises ValueError when a prefix holds more items than the last level has codes.
    """
    vectors = item_vectors(sequences, item_ids)
    rng = np.random.default_rng(SEED)
    prefix_codes = []
    residuals = vectors
    for _level in range(NUM_LEVELS - 1):
        centroids, codes = k_means(residuals, rng)
        residuals = residuals - centroids[codes]
        prefix_codes.append(codes)
    centroids, _ = k_means(residuals, rng)
    last_codes = nearest_free_codes(prefix_codes, squared_distances(residuals, centroids))
    rows = np.stack([*prefix_codes, last_codes], axis=1)
    return {
        item: tuple(int(code) for code in row) for item, row in zip(item_ids, rows, strict=True)
    }


def cooccurrence(
    sequences: Mapping[int, Sequence[int]], item_ids: Sequence[int]
) -> NDArray[np.float64]:
    """Symmetric float64 [items, items]: sum of 1 / distance over pairs at most WINDOW apart."""
    row_of = {item: row for row, item in enumerate(item_ids)}
    counts = np.zeros((WINDOW + 1, len(item_ids), len(item_ids)), dtype=np.int32)
    for items in sequences.values():
        rows = np.array([row_of[item] for item in items], dtype=np.int64)
        for distance in range(1, WINDOW + 1):
            np.add.at(counts[distance], (rows[:-distance], rows[distance:]), 1)
    total = np.zeros(counts.shape[1:], dtype=np.float64)
    for distance in range(1, WINDOW + 1):
        total += (counts[distance] + counts[distance].T) / distance
    return total


def item_vectors(sequences: Mapping[int, Sequence[int]], item_ids: Sequence[int]) -> IntArray:
    """int64 [items, NUM_DIMS]: U * sqrt(S) of the PPMI matrix in units of 1 / STEPS_PER_UNIT."""
    weights = cooccurrence(sequences, item_ids)
    marginal = weights.sum(axis=1)
    expected = np.outer(marginal, marginal)
    ratio = np.ones_like(weights)
    np.divide(weights * marginal.sum(), expected, out=ratio, where=weights > 0)
    ppmi = np.log(np.maximum(ratio, 1.0))
    left, singular, _ = np.linalg.svd(ppmi, hermitian=True)
    left = left[:, :NUM_DIMS]
    largest = np.abs(left).argmax(axis=0)
    signs = np.sign(left[largest, np.arange(NUM_DIMS)])
    scaled = left * signs * np.sqrt(singular[:NUM_DIMS]) * STEPS_PER_UNIT
    vectors: IntArray = np.rint(scaled).astype(np.int64)
    return vectors


def squared_distances(points: IntArray, centroids: IntArray) -> IntArray:
    """Exact int64 [points, centroids]."""
    difference = points[:, None, :] - centroids[None, :, :]
    distances: IntArray = (difference * difference).sum(axis=2)
    return distances


def k_means(points: IntArray, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Lloyd's algorithm on integers: (centroids int64 [NUM_CODES, dims], codes int64 [points]).

    Starts from k-means++ draws; a centroid that loses its last point stays where it was.
    """
    centroids = points[[int(rng.integers(len(points)))]]
    nearest = squared_distances(points, centroids)[:, 0]
    while len(centroids) < NUM_CODES:
        mass = np.cumsum(nearest)
        drawn = int(np.searchsorted(mass, int(rng.integers(int(mass[-1]))), side="right"))
        centroids = np.concatenate([centroids, points[[drawn]]])
        nearest = np.minimum(nearest, squared_distances(points, centroids[-1:])[:, 0])
    codes = squared_distances(points, centroids).argmin(axis=1)
    for _round in range(NUM_ROUNDS):
        sums = np.zeros_like(centroids)
        np.add.at(sums, codes, points)
        sizes = np.bincount(codes, minlength=NUM_CODES)
        used = sizes > 0
        centroids = centroids.copy()
        centroids[used] = sums[used] // sizes[used, None]
        moved = squared_distances(points, centroids).argmin(axis=1)
        if np.array_equal(moved, codes):
            break
        codes = moved
    return centroids, codes


def nearest_free_codes(prefix_codes: Sequence[IntArray], distances: IntArray) -> IntArray:
    """Last-level codes int64 [items], distinct under each prefix; the closest item chooses first.

    distances: int64 [items, NUM_CODES] to the last level's centroids.
    """
    taken: dict[tuple[int, ...], set[int]] = {}
    codes = np.full(len(distances), -1, dtype=np.int64)
    for row in np.argsort(distances.min(axis=1), kind="stable"):
        prefix = tuple(int(level[row]) for level in prefix_codes)
        used = taken.setdefault(prefix, set())
        if len(used) == NUM_CODES:
            raise ValueError(
                f"prefix {prefix} holds more than {NUM_CODES} items, so the last level has no free "
                f"code; use more codes or another SEED"
            )
        order = np.argsort(distances[row], kind="stable")
        codes[row] = next(int(code) for code in order if int(code) not in used)
        used.add(int(codes[row]))
    return codes


def write_items(path: Path, sids: Mapping[int, Sequence[int]]) -> None:
    """One JSON object a line, ids and codes only: {"item_id": 1, "sid": [3, 14, 15]}."""
    lines = [json.dumps({"item_id": item, "sid": list(sid)}) for item, sid in sids.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_items(path: Path) -> dict[int, tuple[int, ...]]:
    """The inverse of `write_items`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["item_id"]: tuple(row["sid"]) for row in rows}
