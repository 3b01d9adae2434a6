"""The prefix tree of semantic ids in compressed rows (CSR), its structural check and its walks.

Level l has `offsets[l]` (one entry per node plus one) and `codes[l]` (the children's codes, node after node, strictly
increasing inside a node). A child's node id at level l + 1 is its position in `codes[l]`, so the children of a node
are contiguous on every level, node ids need no storage, an edge and the node below it share one number, and the nodes
below the last level are the SID indices in sorted order. Parents are found by a binary search in the offsets, which
costs nothing to store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.errors import CatalogError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Trie:
    """CSR trie: per level `offsets` (int32 or int64, [nodes + 1]) and `codes` (uint16 or uint32, [edges])."""

    offsets: tuple[NDArray[Any], ...]
    codes: tuple[NDArray[Any], ...]

    @property
    def num_levels(self) -> int:
        return len(self.codes)


def index_dtype(largest: int) -> type[np.int32] | type[np.int64]:
    """int32 where it holds `largest`, else int64."""
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


def code_dtype(num_codes: int) -> type[np.uint16] | type[np.uint32]:
    """The stored type of the codes of a level with `num_codes` codes."""
    return np.uint16 if num_codes <= 1 << 16 else np.uint32


def build_trie(columns: Sequence[NDArray[Any]]) -> tuple[Trie, NDArray[Any]]:
    """Builds the trie of sorted rows.

    Args:
        columns: the codes of each level ([rows], of `code_dtype`); rows sorted, duplicates allowed, at least one.

    Returns:
        The trie, and the first row of each distinct semantic id (int64 [num_sids]).
    """
    rows = len(columns[0])
    is_first = np.zeros(rows, np.bool_)
    is_first[0] = True
    previous_starts = np.zeros(1, np.int64)
    offsets, codes = [], []
    for column in columns:
        is_first[1:] |= column[1:] != column[:-1]
        starts = np.flatnonzero(is_first)
        level = np.empty(len(previous_starts) + 1, index_dtype(rows))
        level[:-1] = np.searchsorted(starts, previous_starts)
        level[-1] = len(starts)
        offsets.append(level)
        codes.append(column[starts])
        previous_starts = starts
    return Trie(tuple(offsets), tuple(codes)), previous_starts


def max_fanout(trie: Trie) -> tuple[int, ...]:
    """The largest number of children of one node, per level."""
    return tuple(int(np.diff(level).max()) for level in trie.offsets)


def check_trie(trie: Trie, num_codes: Sequence[int], where: str) -> None:
    """Checks what a search relies on: shapes, monotone offsets, codes in range, sorted children.

    Raises:
        CatalogError: names `where`, the level and the first node that is wrong.
    """
    nodes = 1
    for level, (offsets, codes) in enumerate(zip(trie.offsets, trie.codes, strict=True)):
        at = f"{where}: level {level}"
        if len(offsets) != nodes + 1 or offsets[0] != 0 or offsets[-1] != len(codes):
            raise CatalogError(f"{at}: {nodes + 1} offsets from 0 to {len(codes)} expected")
        bad = offsets[1:] <= offsets[:-1]
        if bad.any():
            raise CatalogError(
                f"{at}: node {int(bad.argmax())} has no child or a decreasing offset"
            )
        if int(codes.max()) >= num_codes[level]:
            raise CatalogError(f"{at}: code {int(codes.max())} is outside [0, {num_codes[level]})")
        is_sorted = codes[1:] > codes[:-1]
        is_sorted[offsets[1:-1] - 1] = True
        if not is_sorted.all():
            raise CatalogError(f"{at}: the codes at edge {int(is_sorted.argmin())} are not sorted")
        nodes = len(codes)


def parents(trie: Trie, level: int, edges: NDArray[Any]) -> NDArray[Any]:
    """The node of `level` that each edge of that level starts at (int64)."""
    offsets = trie.offsets[level]
    return np.searchsorted(offsets, edges.astype(offsets.dtype, copy=False), side="right") - 1


def find_children(
    trie: Trie, level: int, nodes: NDArray[Any], codes: NDArray[Any]
) -> NDArray[np.int64]:
    """The child of each node under each code, -1 where there is none; all searches advance together."""
    offsets, level_codes = trie.offsets[level], trie.codes[level]
    low = offsets[nodes].astype(np.int64)
    end = offsets[nodes + 1].astype(np.int64)
    high = end.copy()
    for _ in range(int((end - low).max(initial=0)).bit_length()):
        middle = (low + high) >> 1
        is_open = low < high
        is_left = level_codes[np.minimum(middle, len(level_codes) - 1)] < codes
        low = np.where(is_open & is_left, middle + 1, low)
        high = np.where(is_open & ~is_left, middle, high)
    found = low < end
    found &= level_codes[np.minimum(low, len(level_codes) - 1)] == codes
    return np.where(found, low, -1)


def find_leaves(trie: Trie, sids: NDArray[Any]) -> NDArray[np.int64]:
    """The SID index of each row of `sids` (integer [n, levels]), -1 for rows that are not in the trie."""
    result = np.full(len(sids), -1, np.int64)
    rows = np.arange(len(sids))
    nodes = np.zeros(len(sids), np.int64)
    for level in range(trie.num_levels):
        nodes = find_children(trie, level, nodes, sids[rows, level])
        is_found = nodes >= 0
        rows, nodes = rows[is_found], nodes[is_found]
    result[rows] = nodes
    return result


def leaf_sids(
    trie: Trie, leaves: NDArray[Any], parents_of: Sequence[NDArray[Any]] | None = None
) -> NDArray[np.uint32]:
    """The codes of each SID index: uint32 [n, levels].

    parents_of: per level the node that each edge starts at, where somebody has computed it: a fifth of the time of a search in
    the offsets.
    """
    sids = np.empty((len(leaves), trie.num_levels), np.uint32)
    edges = leaves
    for level in range(trie.num_levels - 1, -1, -1):
        sids[:, level] = trie.codes[level].take(edges)
        if level and parents_of is not None:
            edges = parents_of[level].take(edges)
        elif level:
            edges = parents(trie, level, edges)
    return sids


def range_numbers(offsets: NDArray[Any]) -> NDArray[Any]:
    """Which range each place is in: i for offsets[i] <= place < offsets[i + 1], no range being empty; of the offsets' type.

    As `np.repeat` of the numbers, which keeps the interpreter's lock for its whole time; this does not.
    """
    numbers = np.zeros(int(offsets[-1]), offsets.dtype)
    numbers[offsets[1:-1]] = 1
    return np.cumsum(numbers, dtype=offsets.dtype, out=numbers)


def sum_ranges(values: NDArray[np.int32], offsets: NDArray[Any]) -> NDArray[np.int32]:
    """The sum of values[offsets[i] : offsets[i + 1]] for every i (int32); twice as fast here as add.reduceat."""
    before = np.zeros(len(values) + 1, np.int32)
    np.cumsum(values, out=before[1:])
    at_borders: NDArray[np.int32] = before[offsets]
    return np.diff(at_borders)


def sum_leaves(trie: Trie, leaf_values: NDArray[Any]) -> tuple[NDArray[np.int32], ...]:
    """Adds up a value per SID below each edge: one int32 array [edges] per level, the last being the values."""
    values = leaf_values.astype(np.int32, copy=False)
    result = [values]
    for level in range(trie.num_levels - 1, 0, -1):
        values = sum_ranges(values, trie.offsets[level])
        result.append(values)
    return tuple(reversed(result))
