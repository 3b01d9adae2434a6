"""The beam ops by provider and their oracle: plain Python loops over fp32 scalars, on the rounds of the parity suite."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import xgr_ops.cpu.beam
from xgr_ops.cpu.beam import (
    children_logsumexp_cpu,
    flag_failed_searches_cpu,
    level_logsumexp_cpu,
    select_beams_cpu,
)

import xgr_runtime.hal.ops.beam
from xgr_runtime.conformance.beam_cases import DEAD, Case, empty_rows, oracle_lse, random_case
from xgr_runtime.hal.ops.beam import (
    BeamRows,
    LevelTrie,
    children_logsumexp,
    flag_failed_searches,
    level_logsumexp,
    select_beams,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["DEAD", "INF", "NAN", "Case", "empty_rows", "oracle_lse", "random_case"]

NAN, INF = float("nan"), float("inf")
PROVIDERS = ("reference", "numpy")
SELECT: dict[str, Callable[..., None]] = {"reference": select_beams, "numpy": select_beams_cpu}
FLAG: dict[str, Callable[..., None]] = {
    "reference": flag_failed_searches,
    "numpy": flag_failed_searches_cpu,
}
LEVEL_LSE: dict[str, Callable[..., torch.Tensor]] = {
    "reference": level_logsumexp,
    "numpy": level_logsumexp_cpu,
}
CHILDREN_LSE: dict[str, Callable[..., torch.Tensor]] = {
    "reference": children_logsumexp,
    "numpy": children_logsumexp_cpu,
}


@contextmanager
def tiles_of(candidates: int) -> Iterator[None]:
    """Small tiles, so that small cases cross their borders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xgr_runtime.hal.ops.beam, "TILE_CANDIDATES", candidates)
        patch.setattr(xgr_ops.cpu.beam, "LIST_CANDIDATES", candidates)
        yield


@contextmanager
def small_scans() -> Iterator[None]:
    """The CPU provider scans wherever the share of children says so, however few they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xgr_ops.cpu.beam, "SCAN_FROM", 0)
        yield


def f32(values: Sequence[float]) -> np.ndarray:
    """The values as fp32."""
    return np.array(values, np.float32)


@dataclass
class Outcome:
    """What a round wrote, as plain lists (scores as their bits), and the counters."""

    scores: list[int]
    nodes: list[int]
    parents: list[int]
    codes: list[int]
    counters: list[int] = field(default_factory=list, compare=False)


def run_select(select: Callable[..., None], case: Case, trie: LevelTrie) -> Outcome:
    rows = empty_rows(case.child_widths, case.child_padding)
    counters = torch.tensor([100, 1000])
    select(
        torch.from_numpy(case.logits),
        torch.from_numpy(case.lse),
        case.parent_rows(),
        case.rules(),
        trie,
        rows,
        counters,
    )
    return outcome(rows, counters)


def outcome(rows: BeamRows, counters: torch.Tensor) -> Outcome:
    return Outcome(
        rows.scores_N.view(torch.int32).tolist(),
        rows.nodes_N.tolist(),
        rows.parents_N.tolist(),
        rows.codes_N.tolist(),
        counters.tolist(),
    )


def bits(scores: Sequence[float]) -> list[int]:
    result: list[int] = np.array(scores, np.float32).view(np.int32).tolist()
    return result


def oracle_select(case: Case) -> Outcome:
    scores: list[float] = []
    nodes, parents, codes = [], [], []
    first_edge = np.concatenate(([0], np.cumsum([len(c) for c in case.children]))).tolist()
    row = 0
    for search, width in enumerate(case.widths):
        found: list[tuple[Any, int, int, int]] = []
        for parent in range(row, row + width):
            for place, code in enumerate(case.children[case.nodes[parent]]):
                edge = first_edge[case.nodes[parent]] + place
                with np.errstate(all="ignore"):
                    step = np.float32(case.logits[parent, code]) - np.float32(case.lse[parent])
                    score = np.float32(case.parents[parent]) + step
                if case.alive[case.rule_row[search]][edge] and np.isfinite(score):
                    found.append((-score, parent, code, edge))
        found.sort()
        dead = case.child_widths[search] - len(found)
        for negative, parent, code, edge in found[: case.child_widths[search]]:
            scores.append(np.float32(0.0) - negative)
            nodes.append(edge)
            parents.append(parent)
            codes.append(code)
        scores += [DEAD] * dead
        nodes += [0] * dead
        codes += [0] * dead
        parents += [row] * dead
        row += width
    scores += [DEAD] * case.child_padding
    zeros = [0] * case.child_padding
    return Outcome(bits(scores), nodes + zeros, parents + zeros, codes + zeros)
