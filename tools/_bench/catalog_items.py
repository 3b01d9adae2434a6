"""Random items with tags, and a plain numpy reading of which of them a tag expression lets pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.xbeam.rules import TagExpression

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Items:
    """Random items: sids int32 [n, levels], ids int64 [n] distinct, tags int64 [n, tags_per_item]."""

    sids: NDArray[np.int32]
    ids: NDArray[np.int64]
    tags: NDArray[np.int64]


def tag_rows(items: Items, num_tags: int) -> dict[str, NDArray[np.int64]]:
    """Tag name -> the rows that have it."""
    rows = ((items.tags == tag).any(axis=1) for tag in range(num_tags))
    return {f"tag:{tag}": np.flatnonzero(has_tag) for tag, has_tag in enumerate(rows)}


def expressions(num_tags: int) -> dict[str, TagExpression]:
    """A usual combination, and one whose tag lists cover the catalogue more than once."""
    names = [f"tag:{tag}" for tag in range(num_tags)]
    half, fifth = num_tags // 2, num_tags // 5
    return {
        "tags": TagExpression.canonical([names[:fifth], names[fifth : 2 * fifth]], names[-2:]),
        "tags_wide": TagExpression.canonical([names[:-fifth], names[fifth:]], names[half:-fifth]),
    }


def passes(items: Items, expression: TagExpression) -> NDArray[np.bool_]:
    """Which rows pass, read off the tag numbers."""

    def has_any(names: tuple[str, ...]) -> Any:
        wanted = [int(name.split(":")[1]) for name in names]
        return np.isin(items.tags, wanted).any(axis=1)

    keep: NDArray[np.bool_] = ~has_any(expression.exclude)
    for group in expression.require:
        keep &= has_any(group)
    return keep
