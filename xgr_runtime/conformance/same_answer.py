"""`assert_same_answer`: the one rule by which two runs of a search are compared when their logits differ a little.

Near ties decide sub-trees, so two right runs may return different lists. What a right run may do is still exact: its
scores are the reference's within t, its order is right wherever the reference is clear by more than 2t, it never drops
a child that is clearly better than one it keeps, every row it returns could have survived, and every row that must
survive is there. The reference is a scorer, not a run: it gives the score of any prefix.

Two sets are carried from the root on. *Possible*: children of possible prefixes, unless w children of certain prefixes
beat them by more than 2t. *Certain* (safe): children of certain prefixes that fewer than w other children of possible
prefixes reach within 2t.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from xgr_runtime.conformance.difference import Difference, require

Sid: TypeAlias = tuple[int, ...]
ChildrenOf = Callable[[Sid], Sequence[int]]
ChildLogProbs = Callable[[Sequence[Sid]], Sequence[npt.NDArray[np.float64]]]


@dataclass(frozen=True)
class BeamTrace:
    """The beams that survived each round, in rank order: levels[l] holds (prefix of l + 1 codes, score)."""

    levels: Sequence[Sequence[tuple[Sid, float]]]


@dataclass(frozen=True)
class Answer:
    """One run: its final rows (distinct SIDs, best first), what it says of itself, and its trace if it has one."""

    rows: Sequence[tuple[Sid, float]]
    num_valid: int
    trace: BeamTrace | None = None

    @classmethod
    def from_trace(cls, trace: BeamTrace) -> "Answer":
        return cls(trace.levels[-1], len(trace.levels[-1]), trace)


class Reference:
    """Teacher-forced scores of prefixes, computed on demand for many prefixes at once, and kept.

    children_of(prefix): the valid codes behind a prefix under the search's rules. child_log_probs(prefixes): for each of
    them the normalised log-probabilities of those codes, in the same order, from fp32 or better.
    """

    def __init__(
        self, num_levels: int, children_of: ChildrenOf, child_log_probs: ChildLogProbs
    ) -> None:
        self.num_levels = num_levels
        self._children_of = children_of
        self._child_log_probs = child_log_probs
        self._scores: dict[Sid, float] = {(): 0.0}
        self._children: dict[Sid, list[Sid]] = {}

    def children(self, prefixes: Sequence[Sid]) -> list[Sid]:
        """All live children of the prefixes; a child at -inf does not exist."""
        missing = [p for p in dict.fromkeys(prefixes) if p not in self._children]
        if missing:
            for prefix, log_probs in zip(missing, self._child_log_probs(missing), strict=True):
                codes = self._children_of(prefix)
                require(
                    len(codes) == len(log_probs),
                    f"{len(codes)} codes behind {prefix}, {len(log_probs)} scores",
                )
                found = []
                for code, log_prob in zip(codes, log_probs, strict=True):
                    score = self._scores[prefix] + float(log_prob)
                    is_number = not math.isnan(score) and score < math.inf
                    require(is_number, f"the reference's score behind {prefix} is {score}")
                    if score > -math.inf:
                        child = (*prefix, code)
                        self._scores[child] = score
                        found.append(child)
                self._children[prefix] = found
        return [child for prefix in prefixes for child in self._children[prefix]]

    def score(self, prefix: Sid) -> float | None:
        """The score of a prefix, None when no valid path leads there."""
        if prefix in self._scores:
            return self._scores[prefix]
        for length in range(len(prefix)):
            if prefix[:length] in self._scores:
                self.children([prefix[:length]])
            else:
                return None
        return self._scores.get(prefix)

    def search(self, widths: Sequence[int]) -> BeamTrace:
        """The reference's own beam search: score, then parent rank, then code."""
        beams: list[Sid] = [()]
        levels = []
        for width in widths:
            rank = {prefix: place for place, prefix in enumerate(beams)}
            children = self.children(beams)
            children.sort(key=lambda c: (-self._scores[c], rank[c[:-1]], c[-1]))
            beams = children[:width]
            levels.append([(child, self._scores[child]) for child in beams])
        return BeamTrace(levels)


@dataclass(frozen=True)
class SameAnswerStats:
    """What one comparison saw. num_safe: returned rows that had to be there. possible_checked: (iv) was applied."""

    num_rows: int
    num_safe: int
    num_possible: int
    num_common: int
    num_reference: int
    is_identical: bool
    possible_checked: bool
    max_error: float


@dataclass
class SameAnswerTotals:
    """Sums over the comparisons of a run, for the shares that a test asserts or prints."""

    stats: list[SameAnswerStats] = field(default_factory=list)

    def add(self, stats: SameAnswerStats) -> None:
        self.stats.append(stats)

    @property
    def share_safe_rows(self) -> float:
        return sum(s.num_safe for s in self.stats) / max(1, sum(s.num_rows for s in self.stats))

    @property
    def share_identical(self) -> float:
        return sum(s.is_identical for s in self.stats) / max(1, len(self.stats))

    @property
    def share_possible_checked(self) -> float:
        return sum(s.possible_checked for s in self.stats) / max(1, len(self.stats))

    @property
    def mean_overlap(self) -> float:
        """Mean share of the reference's rows that the run returned."""
        shares = [s.num_common / max(1, s.num_reference) for s in self.stats]
        return sum(shares) / max(1, len(shares))

    @property
    def max_error(self) -> float:
        return max((s.max_error for s in self.stats), default=0.0)

    def __str__(self) -> str:
        return (
            f"{len(self.stats)} lists: {self.share_identical:.1%} identical, {self.share_safe_rows:.1%} rows safe, "
            f"overlap {self.mean_overlap:.2%}, possible sets checked {self.share_possible_checked:.1%}, "
            f"largest score error {self.max_error:.2e}"
        )


def assert_same_answer(
    got: Answer,
    ref: Reference,
    t: float,
    widths: Sequence[int],
    possible_limit: int | None = None,
) -> SameAnswerStats:
    """Raises AssertionError unless `got` is a right answer of a search with `widths` when scores may differ by t.

    possible_limit: (iv) is applied only while every possible set stays within possible_limit * w (half precision: 4);
    None applies it always. num_valid has to be the reference's; where near ties decide between sub-trees of different
    size, it has to lie between what the certain and the possible prefixes give.
    """
    _check_rows(got, ref, t)
    if got.trace is not None:
        _check_trace(got, got.trace, ref, t, widths)
    possible, certain, num_valid_range, is_within_limit = _possible_and_certain(
        ref, t, widths, possible_limit
    )
    rows = [sid for sid, _ in got.rows]
    if is_within_limit:
        low, high = num_valid_range
        require(
            low <= got.num_valid <= high,
            f"num_valid: expected {low if low == high else f'{low} to {high}'}, got {got.num_valid}",
        )
        impossible = [sid for sid in rows if sid not in possible]
        require(
            not impossible,
            f"(iv) rows that cannot survive: {_named(impossible, ref)}; {len(possible)} rows are possible",
        )
        missing = sorted(certain - set(rows))
        require(not missing, f"(iv) rows that must survive are missing: {_named(missing, ref)}")
    reference = [sid for sid, _ in ref.search(widths).levels[-1]]
    return SameAnswerStats(
        num_rows=len(rows),
        num_safe=len(certain & set(rows)),
        num_possible=len(possible),
        num_common=len(set(reference) & set(rows)),
        num_reference=len(reference),
        is_identical=reference == rows,
        possible_checked=is_within_limit,
        max_error=max((abs(score - _score(ref, sid)) for sid, score in got.rows), default=0.0),
    )


def _score(ref: Reference, sid: Sid) -> float:
    score = ref.score(sid)
    if score is None:
        raise Difference(f"{sid} is not a valid prefix for this search")
    return score


def _named(sids: Sequence[Sid], ref: Reference) -> str:
    shown = ", ".join(f"{sid} ({ref.score(sid):.6f})" for sid in sids[:5])
    return shown + (f" and {len(sids) - 5} more" if len(sids) > 5 else "")


def _check_rows(got: Answer, ref: Reference, t: float) -> None:
    """Valid, distinct, finite, sorted; (i) scores within t; (ii) clear differences in the right order."""
    rows = [sid for sid, _ in got.rows]
    scores = [float(score) for _, score in got.rows]
    require(
        len(rows) == got.num_valid, f"num_valid is {got.num_valid}, the run returned {len(rows)}"
    )
    repeated = (
        sorted({sid for sid in rows if rows.count(sid) > 1}) if len(set(rows)) < len(rows) else []
    )
    require(not repeated, f"rows returned twice: {repeated}")
    require(all(map(math.isfinite, scores)), f"scores must be finite, got {scores}")
    expected = []
    for sid in rows:
        require(len(sid) == ref.num_levels, f"{sid} must have {ref.num_levels} codes")
        expected.append(_score(ref, sid))
    for place, (one, two) in enumerate(itertools.pairwise(scores)):
        require(one >= two, f"rows {place} and {place + 1} are not sorted: {one} before {two}")
    best_behind = -math.inf
    for place in range(len(rows) - 1, -1, -1):
        require(
            best_behind <= expected[place] + 2 * t,
            f"(ii) {rows[place]} ({expected[place]:.7f}) stands before a row of {best_behind:.7f}, more than 2t better",
        )
        best_behind = max(best_behind, expected[place])
    for sid, score, own in zip(rows, expected, scores, strict=True):
        require(
            abs(own - score) <= t,
            f"(i) score of {sid}: expected {score:.7f} within {t}, got {own:.7f}",
        )


def _check_trace(
    got: Answer, trace: BeamTrace, ref: Reference, t: float, widths: Sequence[int]
) -> None:
    """(iii) at every level, among the children of the run's own prefixes, nothing clearly better was dropped."""
    require(
        len(trace.levels) == len(widths) == ref.num_levels,
        f"expected {ref.num_levels} levels, got {len(trace.levels)} and {len(widths)} widths",
    )
    require(
        list(trace.levels[-1]) == list(got.rows), "the last level of the trace is not the answer"
    )
    own: list[Sid] = [()]
    for level, width in enumerate(widths):
        kept = [prefix for prefix, _ in trace.levels[level]]
        children = ref.children(own)
        stray = set(kept) - set(children)
        require(
            not stray,
            f"level {level}: kept prefixes without a surviving parent or invalid: {sorted(stray)}",
        )
        require(len(set(kept)) == len(kept), f"level {level}: a prefix was kept twice")
        require(
            len(kept) == min(width, len(children)),
            f"level {level}: expected {min(width, len(children))} beams of {len(children)} children, got {len(kept)}",
        )
        dropped = set(children) - set(kept)
        if dropped and kept:
            best = max(dropped, key=lambda child: _score(ref, child))
            worst = min(kept, key=lambda child: _score(ref, child))
            require(
                _score(ref, best) <= _score(ref, worst) + 2 * t,
                f"(iii) level {level}: dropped {best} ({_score(ref, best):.7f}) is more than 2t better than kept "
                f"{worst} ({_score(ref, worst):.7f})",
            )
        own = kept


def _possible_and_certain(
    ref: Reference, t: float, widths: Sequence[int], limit: int | None
) -> tuple[set[Sid], set[Sid], tuple[int, int], bool]:
    """The two sets after the last round, the range of num_valid, and whether every possible set kept to the limit."""
    possible: set[Sid] = {()}
    certain: set[Sid] = {()}
    num_valid = (1, 1)
    is_within_limit = True
    for width in widths:
        of_possible = ref.children(sorted(possible))
        of_certain = ref.children(sorted(certain))
        num_valid = (min(width, len(of_certain)), min(width, len(of_possible)))
        scores_certain = sorted(_score(ref, child) for child in of_certain)
        scores_possible = sorted(_score(ref, child) for child in of_possible)
        possible = {
            child
            for child in of_possible
            if len(scores_certain) - bisect_right(scores_certain, _score(ref, child) + 2 * t)
            < width
        }
        certain = {
            child
            for child in of_certain
            if len(scores_possible) - bisect_left(scores_possible, _score(ref, child) - 2 * t) - 1
            < width
        }
        if limit is not None and len(possible) > limit * width:
            is_within_limit = False
    return possible, certain, num_valid, is_within_limit
