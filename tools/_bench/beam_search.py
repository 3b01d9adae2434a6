"""The two sides of the selection benchmark: the runtime's ops, and the dense round that peers run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xgr_runtime.config import CacheConfig
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.ops.beam import (
    BeamRows,
    LevelTrie,
    flag_failed_searches,
    level_logsumexp,
    select_beams,
)
from xgr_runtime.hal.registry import OpSpec, resolve
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import build_catalog
from xgr_runtime.xbeam.slot import CatalogSlot, plan_slot
from xgr_runtime.xbeam.trie import Trie, find_children

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Beams:
    """The rows of one search after a round, in the benchmark's own form: scores fp32, parents, codes, nodes int64."""

    scores: NDArray[np.float32]
    parents: NDArray[np.int64]
    codes: NDArray[np.int64]
    nodes: NDArray[np.int64]

    @staticmethod
    def root() -> Beams:
        """The one row before round 0."""
        zero = np.zeros(1, np.int64)
        return Beams(np.zeros(1, np.float32), zero, zero, zero)


@dataclass(frozen=True)
class Loaded:
    """A catalogue in a slot of the CPU: its trie for the dense side, its levels for the ops, and the slot's report."""

    trie: Trie
    levels: tuple[LevelTrie, ...]
    layouts: list[dict[str, object]]


@dataclass(frozen=True)
class Workload:
    """One search: logits[i] fp32 [beams, C] of level first_level + i, a row per live beam; the rows to start from; W."""

    catalog: Loaded
    first_level: int
    logits: list[torch.Tensor]
    start: Beams
    width: int


def load_catalog(sids: NDArray[np.int64], num_codes: int) -> Loaded:
    """Compile, verify and load items ([items, levels]) the way the engine does, with the default configuration."""
    num_levels = sids.shape[1]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "bench.xgrcat"
        first_tokens = [level * num_codes for level in range(num_levels)]
        build_catalog(
            path, sids=sids, num_codes=[num_codes] * num_levels, token_offsets=first_tokens
        )
        with Catalog.open(path) as catalog:
            catalog.verify()
            slot = CatalogSlot(plan_slot(catalog, CacheConfig()), CpuDevice(), 1, 0)
            slot.load(catalog)
            trie = Trie(
                tuple(np.array(offsets) for offsets in catalog.offsets),
                tuple(np.array(codes) for codes in catalog.codes),
            )
            return Loaded(trie, slot.levels, slot.describe())


class OpsSearch:
    """The runtime's rounds through the ops that the CPU binds. `counters` adds up over all runs."""

    def __init__(self, work: Workload) -> None:
        spec = OpSpec("cpu", torch.float32)
        self._lse = resolve(level_logsumexp, spec, allow_reference=False).fn
        self._flag = resolve(flag_failed_searches, spec, allow_reference=False).fn
        self._select = resolve(select_beams, spec, allow_reference=False).fn
        self._work = work
        self._tries = work.catalog.levels[work.first_level :]
        self._rule_row_S = torch.zeros(1, dtype=torch.int32)
        self.counters = torch.zeros(2, dtype=torch.int64)
        start = work.start
        self._start_scores = torch.from_numpy(start.scores)
        self._rows = [_rows(len(logits)) for logits in work.logits] + [_rows(work.width)]
        self._rows[0].nodes_N.copy_(torch.from_numpy(start.nodes))

    def normalisers(self) -> list[torch.Tensor]:
        """The log-sum-exp of every round, for runs that leave it out."""
        return [self._lse(logits) for logits in self._work.logits]

    def run(self, lse: list[torch.Tensor] | None = None) -> Beams:
        """All rounds; with `lse` the normaliser is given."""
        self._rows[0].scores_N.copy_(self._start_scores)
        status_S1 = torch.zeros(2, dtype=torch.int32)
        for level, logits in enumerate(self._work.logits):
            parents, children = self._rows[level], self._rows[level + 1]
            lse_N = self._lse(logits) if lse is None else lse[level]
            self._flag(lse_N, parents, status_S1, level)
            self._select(
                logits,
                lse_N,
                parents,
                self._rule_row_S,
                self._tries[level],
                children,
                self.counters,
            )
        last = self._rows[-1]
        live = last.scores_N.numpy() > -np.inf
        return Beams(
            last.scores_N.numpy()[live],
            last.parents_N.numpy()[live].astype(np.int64),
            last.codes_N.numpy()[live].astype(np.int64),
            last.nodes_N.numpy()[live].astype(np.int64),
        )


class DenseSearch:
    """The dense round: log-softmax over [rows, C], a mask row per beam, one top-k over rows x C; buffers reused."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._num_codes = work.logits[0].shape[1]
        most = max(len(logits) for logits in work.logits)
        self._mask = torch.empty((most, self._num_codes))
        self._scores = torch.empty((most, self._num_codes))

    def run(self, logp: list[torch.Tensor] | None = None) -> Beams:
        """All rounds; with `logp` (log-probabilities of every round) the normaliser is given."""
        beams = self._work.start
        for index, logits in enumerate(self._work.logits):
            rows, level = len(beams.scores), self._work.first_level + index
            scores, mask = self._scores[:rows], self._mask[:rows]
            if logp is None:
                torch.log_softmax(logits[:rows], dim=1, out=scores)
                scores.add_(torch.from_numpy(beams.scores)[:, None])
            else:
                torch.add(logp[index][:rows], torch.from_numpy(beams.scores)[:, None], out=scores)
            self._write_mask(mask.numpy(), level, beams.nodes)
            scores.add_(mask)
            top = scores.view(-1).topk(min(self._work.width, scores.numel()))
            beams = self._beams(level, beams, top.values.numpy(), top.indices.numpy())
        return beams

    def _write_mask(self, mask: NDArray[np.float32], level: int, nodes: NDArray[np.int64]) -> None:
        codes = self._work.catalog.trie.codes[level]
        begins = self._work.catalog.trie.offsets[level][nodes].tolist()
        ends = self._work.catalog.trie.offsets[level][nodes + 1].tolist()
        for row, begin, end in zip(mask, begins, ends, strict=True):
            row.fill(-np.inf)
            row[codes[begin:end]] = 0.0

    def _beams(
        self, level: int, before: Beams, scores: NDArray[np.float32], picked: NDArray[np.int64]
    ) -> Beams:
        picked = picked[scores > -np.inf]
        parents, codes = np.divmod(picked, self._num_codes)
        nodes = find_children(self._work.catalog.trie, level, before.nodes[parents], codes)
        return Beams(scores[: len(picked)], parents, codes, nodes)


def _rows(width: int) -> BeamRows:
    def zeros() -> torch.Tensor:
        return torch.zeros(width, dtype=torch.int32)

    start_S1 = torch.tensor([0, width], dtype=torch.int32)
    return BeamRows(torch.zeros(width), zeros(), zeros(), zeros(), start_S1, zeros())


def check_same_lists(ours: Beams, dense: Beams, tolerance: float) -> dict[str, Any]:
    """Assert that both sides found the same list; how many ranks differ because their scores tie within tolerance.

    tolerance 0: scores, codes and nodes are identical rank by rank, exact ties in either order. Else: scores agree
    within it, and what one side has and the other has not lies within it of the last rank.
    """
    order = np.lexsort((dense.codes, dense.parents, -dense.scores))
    assert len(ours.scores) == len(dense.scores), (len(ours.scores), len(dense.scores))
    off = float(np.abs(ours.scores - dense.scores[order]).max())
    assert off <= tolerance, f"scores differ by {off}"
    differs = ours.nodes != dense.nodes[order]
    if tolerance == 0.0:
        assert not differs.any(), f"rank {int(differs.argmax())} differs"
    only_one = np.setxor1d(ours.nodes, dense.nodes)
    for side in (ours, dense):
        edge = side.scores[np.isin(side.nodes, only_one)] - side.scores.min()
        assert (edge <= tolerance).all(), "a list holds an item that the other lost by more"
    return {"max_score_difference": off, "ranks_swapped": int(differs.sum())}
