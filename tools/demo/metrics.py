"""Recall@k and NDCG@k where every list has exactly one right answer (leave-one-out)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def recall_at_k(ranked: Sequence[Sequence[int]], targets: Sequence[int], k: int = 10) -> float:
    """Share of lists whose target is among the first k entries."""
    _check(ranked, targets)
    hits = sum(target in items[:k] for items, target in zip(ranked, targets, strict=True))
    return hits / len(targets)


def ndcg_at_k(ranked: Sequence[Sequence[int]], targets: Sequence[int], k: int = 10) -> float:
    """Mean of 1 / log2(rank + 1), rank from 1; 0 where the target is not among the first k."""
    _check(ranked, targets)
    gains = []
    for items, target in zip(ranked, targets, strict=True):
        top = list(items[:k])
        gains.append(1.0 / math.log2(top.index(target) + 2) if target in top else 0.0)
    return math.fsum(gains) / len(targets)


def _check(ranked: Sequence[Sequence[int]], targets: Sequence[int]) -> None:
    if len(ranked) != len(targets) or not targets:
        raise ValueError(
            f"expected one list for each of at least one target, "
            f"got {len(ranked)} lists and {len(targets)} targets"
        )
