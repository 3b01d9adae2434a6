"""From ranked semantic ids to ranked items: rank order, then weight descending, then item id ascending.

The catalogue stores the items of a SID in that order, so expansion is concatenating ranges. Items that a rule or an
exclusion removed are dropped here again, because their SID may live on through another item.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xgr_runtime.types import Int64Array

_LEAVES_AT_ONCE = 512


@dataclass(frozen=True)
class RankedItems:
    """positions: int64 [n] item positions in the catalogue; ranks: int64 [n] rank of each item's SID."""

    positions: Int64Array
    ranks: Int64Array


def rank_items(
    leaves: npt.NDArray[np.integer],
    sid_item_offsets: npt.NDArray[np.integer],
    item_alive: npt.NDArray[np.bool_] | None,
    excluded_positions: npt.NDArray[np.integer],
    num_results: int,
    max_items_per_sid: int | None,
) -> RankedItems:
    """Expand `leaves` (SID indices, best first) into at most `num_results` items.

    item_alive: bool [num_servable], or None when every item passes the tags. excluded_positions: sorted positions.
    """
    if item_alive is None and not len(excluded_positions):
        return _all_items(leaves, sid_item_offsets, num_results, max_items_per_sid)
    positions: list[Int64Array] = []
    ranks: list[Int64Array] = []
    found = 0
    for first in range(0, len(leaves), _LEAVES_AT_ONCE):
        position, rank = _expanded(
            *_ranges(leaves[first : first + _LEAVES_AT_ONCE], sid_item_offsets)
        )
        rank += first
        keep = _kept(position, item_alive, excluded_positions)
        position, rank = position[keep], rank[keep]
        if max_items_per_sid is not None:
            first_of_rank = np.searchsorted(rank, rank)
            capped = np.arange(len(rank)) - first_of_rank < max_items_per_sid
            position, rank = position[capped], rank[capped]
        positions.append(position)
        ranks.append(rank)
        found += len(position)
        if found >= num_results:
            break
    empty = np.zeros(0, np.int64)
    return RankedItems(
        np.concatenate([empty, *positions])[:num_results],
        np.concatenate([empty, *ranks])[:num_results],
    )


def _all_items(
    leaves: npt.NDArray[np.integer],
    sid_item_offsets: npt.NDArray[np.integer],
    num_results: int,
    max_items_per_sid: int | None,
) -> RankedItems:
    """As `rank_items` where no item is dropped, which is most often and can be told without looking at items."""
    begin, counts = _ranges(leaves[:num_results], sid_item_offsets)  # every SID has an item
    most = num_results if max_items_per_sid is None else min(num_results, max_items_per_sid)
    positions, ranks = _expanded(begin, np.minimum(counts, most))
    return RankedItems(positions[:num_results], ranks[:num_results])


def _ranges(
    leaves: npt.NDArray[np.integer], sid_item_offsets: npt.NDArray[np.integer]
) -> tuple[Int64Array, Int64Array]:
    """Of each SID the position of its first item, and how many items it has."""
    begin = sid_item_offsets.take(leaves).astype(np.int64)
    return begin, sid_item_offsets.take(leaves + 1) - begin


def _expanded(begin: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The items of these ranges, one after the other, and the number of the range that each is in."""
    ends = counts.cumsum()
    number = int(ends[-1]) if len(ends) else 0
    if number == len(ends):  # an item each, as no range is empty
        return begin, np.arange(number)
    ranks = np.arange(len(counts)).repeat(counts)
    first_of_range = begin - ends + counts  # less the place of the range's first item
    return np.arange(number) + first_of_range.take(ranks), ranks


def _kept(
    positions: Int64Array,
    item_alive: npt.NDArray[np.bool_] | None,
    excluded_positions: npt.NDArray[np.integer],
) -> npt.NDArray[np.bool_]:
    keep = np.ones(len(positions), dtype=bool) if item_alive is None else item_alive.take(positions)
    if len(excluded_positions):
        at = np.searchsorted(excluded_positions, positions)
        at = np.minimum(at, len(excluded_positions) - 1)
        keep = keep & (excluded_positions[at] != positions)
    return keep
