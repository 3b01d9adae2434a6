"""The search, written down a second time: brute force in float64 and a beam search in plain Python.

Nothing of the product is imported here. A catalogue is a list of items and a token table; the model is a callable that
gives the logits behind a prefix of codes. Rules are a predicate on items: the catalogue is rebuilt without the rest,
which is what an exact sub-catalogue search has to equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Sid: TypeAlias = "tuple[int, ...]"
Logits: TypeAlias = "npt.NDArray[np.floating[Any]]"
LogitsOf: TypeAlias = Callable[[Sid], Logits]
Normalization = Literal["vocab", "level", "valid"]
Precision = Literal["float32", "float64"]


@dataclass(frozen=True)
class Item:
    """One item of a catalogue."""

    item_id: int
    sid: Sid
    weight: float = 0.0
    tags: frozenset[str] = frozenset()
    servable: bool = True
    key: str = ""


@dataclass(frozen=True)
class Catalog:
    """Items and the token of every code of every level (-1 = the code has none)."""

    items: tuple[Item, ...]
    token_of: tuple[tuple[int, ...], ...]

    @property
    def num_levels(self) -> int:
        return len(self.token_of)

    @cached_property
    def children(self) -> Mapping[Sid, tuple[int, ...]]:
        """The sorted codes that continue each prefix to a servable item."""
        found: dict[Sid, set[int]] = {(): set()}
        for item in self.items:
            if item.servable:
                for level, code in enumerate(item.sid):
                    found.setdefault(item.sid[:level], set()).add(code)
        return {prefix: tuple(sorted(codes)) for prefix, codes in found.items()}

    @property
    def sids(self) -> list[Sid]:
        """The distinct SIDs of servable items, in order of their codes."""
        return sorted({item.sid for item in self.items if item.servable})

    def mapped_tokens(self, level: int) -> list[int]:
        return [token for token in self.token_of[level] if token >= 0]

    def keep(self, is_kept: Callable[[Item], bool]) -> Catalog:
        """The catalogue rebuilt with the items that pass; the tokens stay."""
        return replace(self, items=tuple(item for item in self.items if is_kept(item)))


@dataclass(frozen=True)
class Rules:
    """The rules of one search in plain Python; calling it says whether an item is kept."""

    require: Sequence[Sequence[str]] = ()
    exclude_tags: Sequence[str] = ()
    exclude_item_ids: Sequence[int] = ()
    exclude_keys: Sequence[str] = ()

    def __call__(self, item: Item) -> bool:
        return (
            all(any(tag in item.tags for tag in group) for group in self.require)
            and not any(tag in item.tags for tag in self.exclude_tags)
            and item.item_id not in self.exclude_item_ids
            and not (item.key and item.key in self.exclude_keys)
        )


def logsumexp(values: npt.ArrayLike) -> float:
    """float64; -inf for nothing or only -inf; NaN and +inf pass through."""
    array = np.asarray(values, np.float64)
    if not array.size:
        return -math.inf
    largest = float(array.max())
    if not math.isfinite(largest):
        return largest
    return largest + math.log(float(np.exp(array - largest).sum()))


def read_by_normalizer(
    catalog: Catalog, prefix: Sid, logits: Logits, normalization: Normalization
) -> Logits:
    """The logits behind `prefix` that its normaliser reads."""
    level = len(prefix)
    if normalization == "vocab":
        return logits
    if normalization == "level":
        return logits[catalog.mapped_tokens(level)]
    return logits[[catalog.token_of[level][code] for code in catalog.children.get(prefix, ())]]


def step_score(parent: float, logit: float, lse: float, precision: Precision) -> float:
    """parent + (logit - lse), each operation rounded to `precision`; -inf where it cannot be reached."""
    if -math.inf in (parent, logit, lse):
        return -math.inf
    if precision == "float64":
        return parent + (logit - lse)
    with np.errstate(over="ignore"):
        return float(np.float32(parent) + (np.float32(logit) - np.float32(lse)))


@dataclass(frozen=True)
class BeamAnswer:
    """Per round the surviving (prefix, score) in rank order. failed_round: where a bad number was met, then no rows."""

    levels: tuple[tuple[tuple[Sid, float], ...], ...]
    failed_round: int | None = None

    @property
    def rows(self) -> tuple[tuple[Sid, float], ...]:
        return self.levels[-1] if self.failed_round is None else ()

    @property
    def num_valid(self) -> int:
        return len(self.rows)

    @property
    def sids(self) -> list[Sid]:
        return [sid for sid, _ in self.rows]


def beam_search(
    catalog: Catalog,
    logits_of: LogitsOf,
    widths: int | Sequence[int],
    normalization: Normalization = "vocab",
    precision: Precision = "float64",
    lse_of: Callable[[Sid], float] | None = None,
) -> BeamAnswer:
    """Expands every live beam by all its children and keeps the best: score, then parent rank, then code.

    `lse_of(prefix)` replaces the normaliser (exact float32 comparisons take the product's own); NaN and +inf in what the
    normaliser reads are still found.
    """
    widths = [widths] * catalog.num_levels if isinstance(widths, int) else list(widths)
    assert len(widths) == catalog.num_levels
    beams: list[tuple[Sid, float]] = [((), 0.0)]
    levels: list[tuple[tuple[Sid, float], ...]] = []
    for level, width in enumerate(widths):
        candidates: list[tuple[float, int, int]] = []
        for rank, (prefix, score) in enumerate(beams):
            logits = np.asarray(logits_of(prefix))
            read = read_by_normalizer(catalog, prefix, logits, normalization)
            if np.isnan(read).any() or np.isposinf(read).any():
                return BeamAnswer((*levels, *[()] * (catalog.num_levels - level)), level)
            lse = logsumexp(read) if lse_of is None else lse_of(prefix)
            for code in catalog.children.get(prefix, ()):
                logit = float(logits[catalog.token_of[level][code]])
                child = step_score(score, logit, lse, precision)
                if child > -math.inf:
                    candidates.append((-child, rank, code))
        best = sorted(candidates)[:width]
        beams = [((*beams[rank][0], code), -negative) for negative, rank, code in best]
        levels.append(tuple(beams))
    return BeamAnswer(tuple(levels))


def brute_force(
    catalog: Catalog, logits_of: LogitsOf, normalization: Normalization = "vocab"
) -> list[tuple[Sid, float]]:
    """Every SID with a finite score, in float64, in the order of a search that is wide enough to cut nothing.

    Scores every SID on its own path. Without a cut a parent's rank is its own place in the same order one level up,
    so the key of a row is its score, then the key of its parent, then its code.
    """
    ranked = []
    for sid in catalog.sids:
        score = 0.0
        key: tuple[float, ...] = ()
        for level, code in enumerate(sid):
            logits = np.asarray(logits_of(sid[:level]), np.float64)
            lse = logsumexp(read_by_normalizer(catalog, sid[:level], logits, normalization))
            score = step_score(score, float(logits[catalog.token_of[level][code]]), lse, "float64")
            key = (-score, *key, code)
        if score > -math.inf:
            ranked.append((key, sid, score))
    return [(sid, score) for _, sid, score in sorted(ranked)]


@dataclass(frozen=True)
class ItemRow:
    """One returned item."""

    item_id: int
    sid: Sid
    score: float


def expand_items(
    rows: Iterable[tuple[Sid, float]],
    catalog: Catalog,
    num_results: int,
    max_items_per_sid: int | None = None,
) -> list[ItemRow]:
    """Items of ranked SIDs: inside one by weight descending, then id ascending; cut after num_results items."""
    result: list[ItemRow] = []
    for sid, score in rows:
        bucket = [item for item in catalog.items if item.servable and item.sid == sid]
        bucket.sort(key=lambda item: (-item.weight, item.item_id))
        result += [ItemRow(item.item_id, sid, score) for item in bucket[:max_items_per_sid]]
    return result[:num_results]


@dataclass
class TableModel:
    """Logits drawn once for every prefix: a model without a network. The same prefix always gives the same array."""

    vocab_size: int
    seed: int
    scale: float = 3.0
    fixed: dict[Sid, Logits] = field(default_factory=dict)

    def __call__(self, prefix: Sid) -> Logits:
        if prefix not in self.fixed:
            rng = np.random.default_rng([self.seed, len(prefix), *prefix])
            drawn = rng.standard_normal(self.vocab_size) * self.scale
            self.fixed[prefix] = drawn.astype(np.float32)
        return self.fixed[prefix]
