"""Candidates of a round on the CPU: exactly the living children of the rows asked for, as parallel numpy arrays.

Everything is a zero-copy view of the tensors of `xgr_runtime.hal.ops.beam`, sized by the data. A level offers two ways
to its candidates. `expand` lists all living children of rows: its cost follows the number of children. `search` looks
only for children that may reach a score: one contiguous comparison over the row's logits, then the few hits are looked
up in the trie, so that a hub is never gathered child by child.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from xgr_runtime.hal.ops.beam import BeamRows, LevelTrie

Floats: TypeAlias = "NDArray[np.float32]"
Ints: TypeAlias = "NDArray[np.int64]"

# Relative width of the band below a wanted score in which logits are still looked at: each of the two roundings of
# `parent + (logit - lse)` is at most 2**-24, so this is generous; the exact score decides afterwards.
_SLACK = 2.0**-20


@dataclass(frozen=True)
class Candidates:
    """Living children: score, packed parent row, code, and edge (CSR position, or node * C + code of a dense level)."""

    scores: Floats
    rows: Ints
    codes: Ints
    edges: Ints

    def __len__(self) -> int:
        return len(self.scores)

    def take(self, index: NDArray[Any] | slice) -> Candidates:
        """The candidates at `index`, in that order."""
        return Candidates(
            self.scores[index], self.rows[index], self.codes[index], self.edges[index]
        )

    @staticmethod
    def join(parts: list[Candidates]) -> Candidates:
        """All parts, one after the other."""
        return Candidates(
            np.concatenate([p.scores for p in parts]),
            np.concatenate([p.rows for p in parts]),
            np.concatenate([p.codes for p in parts]),
            np.concatenate([p.edges for p in parts]),
        )


class LevelView:
    """The rows of one round and the level they expand into, as numpy views. N parent rows, C codes."""

    def __init__(
        self, logits_NC: Tensor, parents: BeamRows, rule_row_S: Tensor, trie: LevelTrie
    ) -> None:
        rule_row_S1 = np.append(rule_row_S.numpy(), 0).astype(np.int64)
        self.num_codes = trie.num_codes
        self.logits_NC = logits_NC.numpy()
        self.alive_RE = trie.alive_RE.numpy()
        self.is_row_N = parents.search_of_row_N.numpy() < len(rule_row_S)
        self.parent_N = parents.scores_N.numpy() + np.float32(0.0)
        self.is_live_N = (self.parent_N > -np.inf) & self.is_row_N
        self.node_N = np.where(self.is_row_N, parents.nodes_N.numpy(), 0).astype(np.int64)
        self.rule_N = rule_row_S1[parents.search_of_row_N.numpy()]
        rules = self.rule_N[self.is_live_N]
        self._one_rule = int(rules[0]) if len(rules) and (rules == rules[0]).all() else None
        self._logits_tensor = logits_NC
        self._offsets = None if trie.offsets is None else trie.offsets.numpy()
        self._codes = None if trie.codes is None else trie.codes.numpy()
        self._flat_logits = (
            self.logits_NC.reshape(-1) if self.logits_NC.flags.c_contiguous else None
        )

    def num_candidates(self) -> Ints:
        """int64 [N]: an upper bound of each row's candidates (CSR: children, alive or not; dense: all codes)."""
        if self._offsets is None:
            return np.full(len(self.node_N), self.num_codes, np.int64)
        counts: Ints = self._offsets[self.node_N + 1] - self._offsets[self.node_N]
        return counts.astype(np.int64)

    def children(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """(row, code, edge) of every living child of `rows`, in the order of `rows`, then of codes."""
        if self._offsets is None or self._codes is None:
            return self._dense_children(rows)
        nodes = self.node_N[rows]
        begins = self._offsets[nodes].astype(np.int64)
        counts = self._offsets[nodes + 1] - begins
        ends = np.cumsum(counts)
        edges = np.repeat(begins - ends + counts, counts)
        edges += np.arange(len(edges))
        child_rows = np.repeat(rows, counts)
        is_alive = self._is_alive(child_rows, edges)
        if not is_alive.all():
            child_rows, edges = child_rows[is_alive], edges[is_alive]
        return child_rows, self._codes[edges].astype(np.int64), edges

    def expand(self, rows: Ints, lse_N: Floats) -> Candidates:
        """Every candidate of `rows`, in the order of `rows`, then of codes."""
        return self._scored(*self.children(rows), lse_N)

    def search(self, rows: Ints, lse_N: Floats, least: float) -> Candidates:
        """The candidates of `rows` whose score is at least `least` (finite); the order is that of `expand`."""
        parent, lse = self.parent_N[rows].astype(np.float64), lse_N[rows].astype(np.float64)
        wanted = least - parent + lse
        wanted -= _SLACK * (abs(least) + abs(parent) + abs(lse) + abs(wanted))
        limit = np.finfo(np.float32).max
        limits = np.clip(wanted, -limit, limit).astype(np.float32)
        span = np.arange(rows[0], rows[-1] + 1)
        if len(rows) * 2 >= len(span):
            # Rows close together are read where they lie; nothing reaches the NaN of those between them.
            span_limits = np.full(len(span), np.nan, np.float32)
            span_limits[rows - rows[0]] = limits
            rows, limits = span, span_limits
            logits = self.logits_NC[rows[0] : rows[-1] + 1]
        else:
            logits = self.logits_NC[rows]
        hits = np.flatnonzero(logits >= limits[:, None])
        at = hits // self.num_codes
        codes = hits - at * self.num_codes
        hit_rows = rows[at]
        if self._offsets is None or self._codes is None:
            edges = self.node_N[hit_rows] * self.num_codes + codes
        else:
            edges = self._find_edges(hit_rows, codes)
            is_child = edges >= 0
            hit_rows, codes, edges = hit_rows[is_child], codes[is_child], edges[is_child]
        is_alive = self._is_alive(hit_rows, edges)
        found = self._scored(hit_rows[is_alive], codes[is_alive], edges[is_alive], lse_N)
        return found.take(np.flatnonzero(found.scores >= least))

    def bounds(self, rows: Ints, lse_N: Floats) -> Floats:
        """No candidate of a row scores more than this; `rows` are ascending and close together."""
        first, last = int(rows[0]), int(rows[-1]) + 1
        peaks = self._logits_tensor[first:last].amax(dim=1).numpy()[rows - first]
        result: Floats = self.parent_N[rows] + (peaks - lse_N[rows])
        result[np.isnan(result)] = np.inf
        return result

    def logits(self, rows: Ints, codes: Ints) -> Floats:
        """The logit of each (row, code) pair."""
        if self._flat_logits is None:
            result: Floats = self.logits_NC[rows, codes]
            return result
        return self._flat_logits.take(rows * self.num_codes + codes)

    def _scored(self, rows: Ints, codes: Ints, edges: Ints, lse_N: Floats) -> Candidates:
        scores = self.logits(rows, codes)
        scores -= lse_N[rows]
        scores += self.parent_N[rows]
        found = Candidates(scores, rows, codes, edges)
        is_finite = np.isfinite(scores)
        return found if is_finite.all() else found.take(is_finite)

    def _is_alive(self, rows: Ints, edges: Ints) -> NDArray[np.bool_]:
        if self._one_rule is not None:
            alive_E: NDArray[np.bool_] = self.alive_RE[self._one_rule]
            return alive_E.take(edges)
        is_alive: NDArray[np.bool_] = self.alive_RE[self.rule_N[rows], edges]
        return is_alive

    def _dense_children(self, rows: Ints) -> tuple[Ints, Ints, Ints]:
        num_nodes = self.alive_RE.shape[1] // self.num_codes
        alive_REC = self.alive_RE[:, : num_nodes * self.num_codes].reshape(
            len(self.alive_RE), num_nodes, self.num_codes
        )
        nodes = self.node_N[rows]
        hits = np.flatnonzero(alive_REC[self.rule_N[rows], nodes])
        at = hits // self.num_codes
        codes = hits - at * self.num_codes
        return rows[at], codes, nodes[at] * self.num_codes + codes

    def _find_edges(self, rows: Ints, codes: Ints) -> Ints:
        """The edge of each (row, code) pair in the CSR layout, -1 where there is no such child; rows ascend."""
        assert self._offsets is not None
        assert self._codes is not None
        if not len(rows):
            return rows
        firsts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
        nodes = self.node_N[rows[firsts]]
        ends = self._offsets[nodes + 1]
        wanted = codes.astype(self._codes.dtype)
        edges = np.empty(len(rows), np.int64)
        lasts = [*firsts[1:].tolist(), len(rows)]
        bounds = zip(
            firsts.tolist(), lasts, self._offsets[nodes].tolist(), ends.tolist(), strict=True
        )
        for first, last, begin, end in bounds:
            edges[first:last] = self._codes[begin:end].searchsorted(wanted[first:last])
            edges[first:last] += begin
        found = edges < np.repeat(ends, np.diff(firsts, append=len(rows)))
        found &= self._codes[np.minimum(edges, len(self._codes) - 1)] == wanted
        edges[~found] = -1
        return edges
