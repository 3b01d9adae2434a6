"""Two versions of a random catalogue, for benchmarks that change from one to the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from xgr_runtime.xbeam.catalog_build import build_catalog

if TYPE_CHECKING:
    from pathlib import Path

NUM_LEVELS = 3
FIRST_TOKEN = 8


def write_versions(
    folder: Path, num_items: int, num_codes: int, num_tags: int, seed: int
) -> list[Path]:
    """Two versions with ids, keys, titles, weights and tags; other SIDs and ids in each."""
    rng, n = np.random.default_rng(seed), num_items
    paths = []
    for number in (1, 2):
        path = folder / f"v{number}.xgrc"
        build_catalog(
            path,
            sids=rng.integers(0, num_codes, (n, NUM_LEVELS), np.int32),
            item_ids=number * 10 * n + rng.permutation(n),
            keys=[f"v{number}-{row:09d}" for row in range(n)],
            titles=[f"Title of the item in row {row}" for row in range(n)],
            weights=rng.random(n),
            tags={
                f"tag:{tag}": np.flatnonzero(rng.random(n) < 2 / num_tags)
                for tag in range(num_tags)
            },
            num_codes=[num_codes] * NUM_LEVELS,
            token_offsets=[FIRST_TOKEN + num_codes * level for level in range(NUM_LEVELS)],
            version=f"v{number}",
        )
        paths.append(path)
    return paths
