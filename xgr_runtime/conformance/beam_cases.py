"""Small levels and packed rows for the beam ops, drawn at random or made by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xgr_runtime.hal.ops.beam import BeamRows, LevelTrie

DEAD = float("-inf")


@dataclass(frozen=True)
class Case:
    """One round. children[node]: ascending codes; alive[rule]: the edges (in CSR order) that live.

    widths: parent rows per search; child_widths: rows wanted per search. Rows beyond the widths are padding.
    """

    num_codes: int
    children: Sequence[Sequence[int]]
    alive: Sequence[Sequence[bool]]
    rule_row: Sequence[int]
    widths: Sequence[int]
    child_widths: Sequence[int]
    parents: Sequence[float]
    nodes: Sequence[int]
    logits: npt.NDArray[np.float32]
    lse: npt.NDArray[np.float32]
    padding: int = 0
    child_padding: int = 0
    slack: int = 0  # unused entries behind the trie's arrays

    @property
    def num_rows(self) -> int:
        return sum(self.widths) + self.padding

    def csr(self) -> LevelTrie:
        counts = [len(codes) for codes in self.children]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        codes = np.array([code for codes in self.children for code in codes])
        alive = np.zeros((len(self.alive), len(codes) + self.slack), np.bool_)
        alive[:, : len(codes)] = self.alive
        return LevelTrie(
            self.num_codes,
            max(counts),
            False,
            torch.from_numpy(np.pad(offsets, (0, self.slack), "edge").astype(np.int32)),
            torch.from_numpy(np.pad(codes, (0, self.slack)).astype(np.int32)),
            None,
            torch.from_numpy(alive),
        )

    def dense(self) -> LevelTrie:
        size = len(self.children) * self.num_codes
        child_node = np.full(size + self.slack, -1, np.int32)
        at = [n * self.num_codes + c for n, codes in enumerate(self.children) for c in codes]
        child_node[at] = np.arange(len(at))
        alive = np.zeros((len(self.alive), size + self.slack), np.bool_)
        alive[:, at] = self.alive
        return LevelTrie(
            self.num_codes,
            max(len(codes) for codes in self.children),
            True,
            None,
            None,
            torch.from_numpy(child_node),
            torch.from_numpy(alive),
        )

    def tries(self) -> dict[str, LevelTrie]:
        return {"csr": self.csr(), "dense": self.dense()}

    def parent_rows(self) -> BeamRows:
        rows = empty_rows(self.widths, self.padding)
        rows.scores_N.copy_(torch.tensor(self.parents))
        rows.nodes_N.copy_(torch.tensor(self.nodes))
        return rows

    def rules(self) -> torch.Tensor:
        return torch.tensor(self.rule_row, dtype=torch.int32)


def empty_rows(widths: Sequence[int], padding: int = 0) -> BeamRows:
    """Rows full of garbage, with the given widths."""
    total = sum(widths) + padding
    search = np.repeat(np.arange(len(widths) + 1), [*widths, padding])
    return BeamRows(
        torch.full((total,), float("nan")),
        torch.full((total,), -7, dtype=torch.int32),
        torch.full((total,), -7, dtype=torch.int32),
        torch.full((total,), -7, dtype=torch.int32),
        torch.from_numpy(np.concatenate(([0], np.cumsum(widths))).astype(np.int32)),
        torch.from_numpy(search.astype(np.int32)),
    )


def oracle_lse(values: Sequence[float]) -> float:
    """Log-sum-exp in float64 with the contract's special values."""
    if any(np.isnan(v) for v in values):
        return float("nan")
    peak = max(values, default=DEAD)
    if np.isinf(peak):
        return float(peak)
    return float(peak + np.log(sum(np.exp(float(v) - float(peak)) for v in values)))


def random_case(seed: int, **changes: Any) -> Case:
    """A random round; `changes` replace drawn fields (num_codes, num_nodes, widths, child_widths, values, ...)."""
    rng = np.random.default_rng(seed)
    draw: dict[str, Any] = {
        "num_codes": int(rng.integers(1, 14)),
        "num_nodes": int(rng.integers(1, 6)),
        "num_rules": int(rng.integers(1, 4)),
        "share": float(rng.choice([0.1, 0.5, 1.0])),
        "alive_share": float(rng.choice([0.2, 0.8, 1.0])),
        "values": rng.choice([0, 1, 2, 3]),
    }
    num_searches = int(rng.integers(1, 5))
    draw["widths"] = rng.integers(0, 8, num_searches).tolist()
    draw["child_widths"] = rng.integers(0, 14, num_searches).tolist()
    draw["padding"], draw["child_padding"], draw["slack"] = rng.integers(0, 4, 3).tolist()
    draw.update(changes)
    num_codes, widths = draw["num_codes"], draw["widths"]
    children = []
    for _ in range(draw["num_nodes"]):
        size = max(1, int(rng.binomial(num_codes, draw["share"])))
        children.append(np.sort(rng.choice(num_codes, size, replace=False)).tolist())
    num_edges = sum(len(codes) for codes in children)
    num_rows = sum(widths) + draw["padding"]
    palettes = (
        [0.0, -0.0, 1.0, 2.0, DEAD],
        [0.0, -0.0, 0.5, -1e30, 1e30, 3e38, -3e38],
        [0.0, 1.0, DEAD, float("nan"), float("inf")],
    )
    if draw["values"] < len(palettes):
        palette = np.array(palettes[draw["values"]], np.float32)
        logits = rng.choice(palette, (num_rows, num_codes))
        lse = rng.choice(palette, num_rows)
        parents = rng.choice(np.array([0.0, -0.0, -1.0, DEAD], np.float32), num_rows)
    else:
        logits = rng.standard_normal((num_rows, num_codes)).astype(np.float32)
        lse = np.array([oracle_lse(row) for row in logits], np.float32)
        parents = (-rng.exponential(2.0, num_rows)).astype(np.float32)
    nodes = rng.integers(0, draw["num_nodes"], num_rows).tolist()
    if draw["padding"]:
        parents[-draw["padding"] :] = rng.choice([np.nan, 0.0, 1e3], draw["padding"])
        nodes[-draw["padding"] :] = [1 << 30] * draw["padding"]
    return Case(
        num_codes=num_codes,
        children=children,
        alive=(rng.random((draw["num_rules"], num_edges)) < draw["alive_share"]).tolist(),
        rule_row=rng.integers(0, draw["num_rules"], len(widths)).tolist(),
        widths=widths,
        child_widths=draw["child_widths"],
        parents=parents.tolist(),
        nodes=nodes,
        logits=logits,
        lse=lse,
        padding=draw["padding"],
        child_padding=draw["child_padding"],
        slack=draw["slack"],
    )
