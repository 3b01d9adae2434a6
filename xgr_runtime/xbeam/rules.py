"""Per-request rules as exact sub-catalogues.

What passes is decided per item and carried upward: a SID is alive while one of its items is, an edge while one SID
below it is. Anding per-tag edge bits would not be exact: a node with one leaf tagged A and another tagged B has no leaf
with both. A `RuleSet` holds this for one tag expression and is shared by all requests with that expression; beside the
alive bits it keeps how many alive SIDs each edge has below it. A request's own exclusions then need no walk over the
catalogue: they count upward along the excluded leaves only, and an edge dies where the count reaches what was left.

Tags are a client's text, so what they cost is bounded: tags that the catalogue does not know change no bit and are left
out before a rule set is looked up, and a kept rule set is charged for its text as well as for its arrays.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.xbeam.trie import sum_leaves, sum_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

    from xgr_runtime.xbeam.catalog import Catalog

# What Python and numpy hold for one array and for one rule set beside their content, measured and rounded up: on a small
# catalogue that is most of it.
_ARRAY_BYTES = 160
_RULE_SET_BYTES = 1024
_MAX_NAMES = 8
_MAX_NAME_LENGTH = 80


@dataclass(frozen=True)
class TagExpression:
    """Tags an item must and must not have: one tag at least of every group of `require`, none of `exclude`."""

    require: tuple[tuple[str, ...], ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def canonical(
        cls, require: Iterable[Iterable[str]] = (), exclude: Iterable[str] = ()
    ) -> TagExpression:
        """The one expression for all ways to write it: everything sorted, nothing twice."""
        groups = {tuple(sorted(set(group))) for group in require}
        return cls(tuple(sorted(groups)), tuple(sorted(set(exclude))))

    @property
    def is_empty(self) -> bool:
        return not self.require and not self.exclude

    def known_to(self, catalog: Catalog) -> TagExpression:
        """The canonical expression of tags the catalogue knows that lets the same items pass.

        An unknown tag matches no item: excluding it takes nothing out, and in a group it adds nothing. A group without
        any known tag lets nothing pass; then the expression is one empty group, whatever else was asked.
        """
        groups = [
            tuple(tag for tag in group if catalog.tag_positions(tag) is not None)
            for group in self.require
        ]
        if not all(groups):
            return NOTHING
        known = [tag for tag in self.exclude if catalog.tag_positions(tag) is not None]
        return TagExpression.canonical(groups, known)


NOTHING = TagExpression(((),))


@dataclass(frozen=True)
class RuleSet:
    """The sub-catalogue of one tag expression. Arrays are shared between requests: never write to them.

    expression: what it holds; from a `RuleCache` without the tags the catalogue does not know. alive: per level bool
    [edges]. remaining: per level int32 [edges], alive SIDs below the edge. sid_count: int32 [num_sids], alive items of
    each SID. item_alive: bool [num_servable]. num_unknown_tags: excluded tags the catalogue
    does not know (ignored). unknown_required: required tags it does not know. reason: why nothing can be alive, else "".
    """

    expression: TagExpression
    alive: tuple[NDArray[np.bool_], ...]
    remaining: tuple[NDArray[np.int32], ...]
    sid_count: NDArray[np.int32]
    item_alive: NDArray[np.bool_]
    num_unknown_tags: int
    unknown_required: tuple[str, ...]
    reason: str

    @property
    def num_alive_sids(self) -> int:
        return int(self.remaining[0].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of memory: the arrays, shared ones counted once, the text, and an allowance for the objects themselves."""
        arrays: tuple[NDArray[Any], ...] = (
            *self.alive,
            *self.remaining,
            self.sid_count,
            self.item_alive,
        )
        texts = (*self.expression.exclude, *chain(*self.expression.require), *self.unknown_required)
        num_text_bytes = sum(map(sys.getsizeof, (*texts, self.reason)))
        by_id = {id(array): array.nbytes + _ARRAY_BYTES for array in arrays}
        return sum(by_id.values()) + num_text_bytes + _RULE_SET_BYTES


@dataclass(frozen=True)
class Cleared:
    """What a request's exclusions take out of a rule set.

    edges: per level the edges that die (sorted int32, int64 where edges could pass 2^31). item_positions: the excluded
    items that were alive (sorted int64); drop them when SIDs are expanded to items.
    """

    edges: tuple[NDArray[Any], ...]
    item_positions: NDArray[np.int64]


def build_rule_set(catalog: Catalog, expression: TagExpression) -> RuleSet:
    """Evaluates a tag expression over all servable items and counts upward.

    A required tag the catalogue does not know matches no item; the other tags of its group still count. A group
    without any known tag leaves nothing alive, and `reason` says so.
    """
    num_unknown, unknown = _unknown_tags(catalog, expression)
    if expression.is_empty:
        return _everything(catalog, expression)
    item_alive = _items_alive(catalog, expression)
    is_alive: NDArray[np.bool_] = item_alive
    sid_count = item_alive.astype(np.int32)
    if not catalog.has_unique_sids:
        sid_count = sum_ranges(sid_count, catalog.sid_item_offsets)
        is_alive = sid_count > 0
    ones = sid_count if catalog.has_unique_sids else is_alive.astype(np.int32)
    remaining = sum_leaves(catalog.trie, ones)
    return RuleSet(
        expression,
        (*(below > 0 for below in remaining[:-1]), is_alive),
        remaining,
        sid_count,
        item_alive,
        num_unknown,
        tuple(sorted(unknown)),
        "" if remaining[0].any() else _reason(expression, unknown),
    )


def _everything(catalog: Catalog, expression: TagExpression) -> RuleSet:
    remaining = catalog.leaf_counts
    sid_count = remaining[-1]
    if not catalog.has_unique_sids:
        sid_count = np.diff(catalog.sid_item_offsets).astype(np.int32)
    alive = tuple(np.ones(len(below), np.bool_) for below in remaining)
    items = alive[-1] if catalog.has_unique_sids else np.ones(catalog.num_servable, np.bool_)
    return RuleSet(expression, alive, remaining, sid_count, items, 0, (), "")


def _items_alive(catalog: Catalog, expression: TagExpression) -> NDArray[np.bool_]:
    alive = np.ones(catalog.num_items, np.bool_)
    for group in expression.require:
        has_tag = np.zeros(catalog.num_items, np.bool_)
        for tag in group:
            positions = catalog.tag_positions(tag)
            if positions is not None:
                has_tag[positions] = True
        alive &= has_tag
    for tag in expression.exclude:
        positions = catalog.tag_positions(tag)
        if positions is not None:
            alive[positions] = False
    return np.ascontiguousarray(alive[: catalog.num_servable])


def _unknown_tags(catalog: Catalog, expression: TagExpression) -> tuple[int, set[str]]:
    """How many excluded tags the catalogue does not know, and which required ones."""
    num_unknown = sum(catalog.tag_positions(tag) is None for tag in expression.exclude)
    required = {tag for group in expression.require for tag in group}
    return num_unknown, {tag for tag in required if catalog.tag_positions(tag) is None}


def _reason(expression: TagExpression, unknown: set[str]) -> str:
    for group in expression.require:
        if unknown.issuperset(group):
            return f"the catalogue knows none of the required tags {_names(group)}"
    return "no servable item passes the required and excluded tags"


def _names(group: tuple[str, ...]) -> str:
    """The tags of a group for a message, however long and many they are."""
    cut = [
        tag if len(tag) <= _MAX_NAME_LENGTH else f"{tag[:_MAX_NAME_LENGTH]}..."
        for tag in group[:_MAX_NAMES]
    ]
    more = [f"... ({len(group)} in all)"] if len(group) > _MAX_NAMES else []
    return ", ".join([*cut, *more]) or "(empty group)"


def clear_exclusions(catalog: Catalog, rule_set: RuleSet, positions: ArrayLike) -> Cleared:
    """Finds the edges that die when items are excluded on top of a rule set.

    Args:
        catalog: the catalogue of the rule set.
        rule_set: what is alive before.
        positions: item positions in any order, repeats allowed; unknown (-1), not servable and dead ones are ignored.

    Returns:
        Per level the edges whose last alive SID goes, in that rule set, and the excluded items that were alive.
    """
    excluded = np.sort(np.asarray(positions, np.int64))
    first, end = np.searchsorted(excluded, [0, catalog.num_servable])
    excluded = excluded[first:end]
    excluded = excluded[_run_starts(excluded)]
    excluded = excluded[rule_set.item_alive[excluded]]
    nodes, counts = _count_runs(
        catalog.sid_of_positions(excluded), np.ones(len(excluded), np.int64)
    )
    nodes = nodes[counts == rule_set.sid_count[nodes]]
    counts = np.ones(len(nodes), np.int64)
    edges = [nodes]
    for level in range(catalog.num_levels - 1, 0, -1):
        nodes, counts = _count_runs(catalog.parents[level][nodes], counts)
        edges.append(nodes[counts == rule_set.remaining[level - 1][nodes]])
    offsets = reversed(catalog.offsets)
    small = [dead.astype(level.dtype) for dead, level in zip(edges, offsets, strict=True)]
    return Cleared(tuple(reversed(small)), excluded)


def _run_starts(values: NDArray[Any]) -> NDArray[np.int64]:
    """Where each distinct value of sorted `values` appears first."""
    is_first = np.ones(len(values), np.bool_)
    is_first[1:] = values[1:] != values[:-1]
    return np.flatnonzero(is_first)


def _count_runs(
    nodes: NDArray[Any], counts: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Distinct values of sorted `nodes` and the sum of `counts` of each."""
    starts = _run_starts(nodes)
    return nodes[starts], np.add.reduceat(counts, starts) if len(starts) else counts


@dataclass(frozen=True)
class RuleCacheStats:
    """Counters since the cache was made, and what it holds now."""

    num_hits: int
    num_misses: int
    num_evictions: int
    num_rule_sets: int
    num_bytes: int


class RuleCache:
    """Rule sets by (catalogue content, expression), least recently used out first, within a budget of bytes.

    The budget covers arrays, text and objects; 0 keeps nothing. A rule set larger than the whole budget is built and returned but not kept. Safe to use from several threads; two of
    them may build the same rule set at once, then one copy is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rule_sets: OrderedDict[tuple[str, TagExpression], RuleSet] = OrderedDict()
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._num_hits = 0
        self._num_misses = 0
        self._num_evictions = 0

    def get(self, catalog: Catalog, expression: TagExpression) -> RuleSet:
        """The rule set of a canonical expression, built when it is not kept.

        Expressions that differ in tags the catalogue does not know share one; what is said about those tags
        (`num_unknown_tags`, `unknown_required`, `reason`) is the given expression's, `expression` is the shared one.
        """
        kept = self._kept((catalog.digest, expression))
        if kept is not None:  # then the catalogue knows all of its tags
            return kept
        known = expression.known_to(catalog)
        rule_set = self._get(catalog, known)
        if known == expression:
            return rule_set
        num_unknown, unknown = _unknown_tags(catalog, expression)
        return replace(
            rule_set,
            num_unknown_tags=num_unknown,
            unknown_required=tuple(sorted(unknown)),
            reason=_reason(expression, unknown) if rule_set.reason else "",
        )

    def _get(self, catalog: Catalog, expression: TagExpression) -> RuleSet:
        key = (catalog.digest, expression)
        found = self._kept(key)
        if found is not None:
            return found
        with self._lock:
            self._num_misses += 1
        built = build_rule_set(catalog, expression)
        with self._lock:
            self._forget(key)
            if built.nbytes <= self._max_bytes:
                self._rule_sets[key] = built
                self._num_bytes += built.nbytes
            while self._num_bytes > self._max_bytes:
                self._forget(next(iter(self._rule_sets)))
                self._num_evictions += 1
        return built

    def _kept(self, key: tuple[str, TagExpression]) -> RuleSet | None:
        with self._lock:
            found = self._rule_sets.get(key)
            if found is not None:
                self._rule_sets.move_to_end(key)
                self._num_hits += 1
            return found

    def drop(self, catalog: Catalog) -> None:
        """Forgets every rule set of a catalogue; works on a closed one too."""
        with self._lock:
            for key in [key for key in self._rule_sets if key[0] == catalog.digest]:
                self._forget(key)

    @property
    def stats(self) -> RuleCacheStats:
        with self._lock:
            return RuleCacheStats(
                self._num_hits,
                self._num_misses,
                self._num_evictions,
                len(self._rule_sets),
                self._num_bytes,
            )

    def _forget(self, key: tuple[str, TagExpression]) -> None:
        old = self._rule_sets.pop(key, None)
        if old is not None:
            self._num_bytes -= old.nbytes
