"""Beam selection from aten ops that torch_npu registers kernels for. Not run on hardware.

The NPU sorts fp32 itself and hands other dtypes to its CPU cores, so nothing sorts by an int64 key: a stable sort by
score and then one by search (a small whole number, exact in fp32) give the order of one sort by both. Candidates lie in
the order of the contract before (parent row, then code) and both sorts are stable, hence ties come out exact. topk is
not used: its order of ties is not documented. A row that has more candidates than there are child rows is sorted first
and cut to their number, which bounds what is merged below a hub. One search needs no sort by search.

Whatever is no candidate (dead, padding, not alive, not finite) scores -inf before anything is sorted, and a child row
of score -inf is written as dead.

Shapes are fixed, nothing is read on the host. S searches, N packed parent rows, M packed child rows, C codes of the
level, E edges of the level; inside: T rows of a tile, F candidates of a row, K of them that are merged, P pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from xgr_runtime.hal.ops.beam import (
    DEAD,
    BeamRows,
    LevelTrie,
    children_logsumexp,
    flag_failed_searches,
    level_logsumexp,
    select_beams,
)
from xgr_runtime.hal.registry import OpSpec, impl

from .head import finite_or_zero
from .level_edges import LevelEdges
from .limits import EXACT_IN_FP32, refuse_size, refuse_soc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

# Candidates of a tile, at less than 50 bytes each beside what a sort itself needs. A row is never split.
TILE_CANDIDATES = 1 << 20


def _accepts(spec: OpSpec) -> str | None:
    return refuse_size(spec, "N", EXACT_IN_FP32, "rows are counted in fp32")


def _accepts_sorts(spec: OpSpec) -> str | None:
    return _accepts(spec) or refuse_soc(
        spec, "sort is documented to round fp32 to fp16 on other devices than Atlas A2 and A3"
    )


@dataclass(frozen=True)
class _Pool:
    """Candidates of several searches: scores fp32, parent rows int32, edges of the level, searches fp32; each [P]."""

    scores: Tensor
    rows: Tensor
    edges: Tensor
    searches: Tensor


@impl(select_beams, provider="aten", device="npu", accepts=_accepts_sorts)
def select_beams_by_two_sorts(
    logits_NC: Tensor,
    lse_N: Tensor,
    parents: BeamRows,
    rule_row_S: Tensor,
    trie: LevelTrie,
    children: BeamRows,
    counters: Tensor,
) -> None:
    """See `xgr_runtime.hal.ops.beam.select_beams`; bit-identical to it. Every live row is expanded."""
    num_searches, num_children = rule_row_S.shape[0], children.scores_N.shape[0]
    level = LevelEdges(parents, rule_row_S, trie)
    live_N = _is_live(parents, num_searches)
    parent_scores_N = (parents.scores_N + 0.0).masked_fill_(~live_N, DEAD)
    rank_M = torch.arange(num_children, device=lse_N.device)
    start_M = parents.start_S1.index_select(0, children.search_of_row_N)
    best = _Pool(
        scores=torch.full_like(children.scores_N, DEAD),
        rows=torch.zeros_like(children.search_of_row_N),
        edges=torch.zeros_like(children.search_of_row_N, dtype=level.index_dtype),
        searches=children.search_of_row_N.float(),
    )
    for first, last in _tiles(logits_NC.shape[0], level.num_columns):
        edges_TF, logits_TF, alive_TF = level.expand(logits_NC, first, last)
        scores_TF = parent_scores_N[first:last, None] + (logits_TF - lse_N[first:last, None])
        scores_TF.masked_fill_(~(alive_TF & torch.isfinite(scores_TF)), DEAD)
        tile = _tile_pool(scores_TF, edges_TF, parents, first, num_children)
        num_kept = tile.scores.shape[0] // (last - first)
        # Sorted by search, in front of the rows of search s lie the best rows of the earlier searches (as many as child
        # rows) and the tile's candidates of the earlier searches.
        place_M = rank_M + (start_M - first).clamp_(0, last - first) * num_kept
        best = _merge(best, tile, place_M, num_searches)
    _write(children, best, start_M, level, trie, num_searches)
    counters[:1].add_(live_N.sum(dtype=torch.float32).long())


def _tile_pool(
    scores_TF: Tensor, edges_TF: Tensor, parents: BeamRows, first: int, num_children: int
) -> _Pool:
    """A tile's candidates, row by row, of each row the best `num_children` at most."""
    num_rows, num_columns = scores_TF.shape
    if num_children < num_columns:
        scores_TF, column_TF = torch.sort(scores_TF, dim=1, descending=True, stable=True)
        num_columns = max(1, num_children)
        scores_TF = scores_TF[:, :num_columns]
        edges_TF = edges_TF.gather(1, column_TF[:, :num_columns])
    search_T = parents.search_of_row_N[first : first + num_rows].float()
    row_T = torch.arange(first, first + num_rows, dtype=torch.int32, device=scores_TF.device)
    return _Pool(
        scores_TF.reshape(-1),
        row_T[:, None].expand(-1, num_columns).reshape(-1),
        edges_TF.reshape(-1),
        search_T[:, None].expand(-1, num_columns).reshape(-1),
    )


def _merge(best: _Pool, tile: _Pool, place_M: Tensor, num_searches: int) -> _Pool:
    """The best so far, in front, and a tile: what child row m gets lies at place_M[m] of the sorted pool."""
    scores_P = torch.cat((best.scores, tile.scores))
    source_P = torch.sort(scores_P, descending=True, stable=True).indices
    if num_searches > 1:
        searches_P = torch.cat((best.searches, tile.searches)).index_select(0, source_P)
        by_search_P = torch.sort(searches_P, stable=True).indices
        source_M = source_P.index_select(0, by_search_P.index_select(0, place_M))
    else:
        source_M = source_P.index_select(0, place_M)
    return _Pool(
        scores_P.index_select(0, source_M),
        torch.cat((best.rows, tile.rows)).index_select(0, source_M),
        torch.cat((best.edges, tile.edges)).index_select(0, source_M),
        best.searches,
    )


def _write(
    children: BeamRows,
    best: _Pool,
    start_M: Tensor,
    level: LevelEdges,
    trie: LevelTrie,
    num_searches: int,
) -> None:
    is_padding_M = children.search_of_row_N >= num_searches
    is_dead_M = (best.scores == DEAD) | is_padding_M
    edges_M = best.edges.masked_fill(is_dead_M, 0)
    nodes_M = edges_M if trie.child_node is None else trie.child_node.index_select(0, edges_M)
    codes_M = level.codes_of(edges_M, best.rows)
    first_parent_M = start_M.masked_fill(is_padding_M, 0)
    children.scores_N.copy_(best.scores.masked_fill(is_dead_M, DEAD))
    children.nodes_N.copy_(nodes_M.masked_fill(is_dead_M, 0))
    children.parents_N.copy_(torch.where(is_dead_M, first_parent_M, best.rows))
    children.codes_N.copy_(codes_M.masked_fill(is_dead_M, 0))


@impl(level_logsumexp, provider="aten", device="npu", accepts=_accepts)
def level_logsumexp_aten(logits_NC: Tensor) -> Tensor:
    """See `xgr_runtime.hal.ops.beam.level_logsumexp`."""
    lse_N = torch.empty(logits_NC.shape[0], dtype=torch.float32, device=logits_NC.device)
    for first, last in _tiles(*logits_NC.shape):
        lse_N[first:last] = _logsumexp(logits_NC[first:last])
    return lse_N


@impl(children_logsumexp, provider="aten", device="npu", accepts=_accepts)
def children_logsumexp_aten(
    logits_NC: Tensor, parents: BeamRows, rule_row_S: Tensor, trie: LevelTrie
) -> Tensor:
    """See `xgr_runtime.hal.ops.beam.children_logsumexp`."""
    level = LevelEdges(parents, rule_row_S, trie)
    lse_N = torch.empty(logits_NC.shape[0], dtype=torch.float32, device=logits_NC.device)
    for first, last in _tiles(logits_NC.shape[0], level.num_columns):
        _, logits_TF, alive_TF = level.expand(logits_NC, first, last)
        lse_N[first:last] = _logsumexp(logits_TF.masked_fill(~alive_TF, DEAD))
    return lse_N.masked_fill_(~_is_live(parents, rule_row_S.shape[0]), DEAD)


@impl(flag_failed_searches, provider="aten", device="npu", accepts=_accepts)
def flag_failed_searches_aten(lse_N: Tensor, rows: BeamRows, status_S1: Tensor, round: int) -> None:
    """See `xgr_runtime.hal.ops.beam.flag_failed_searches`."""
    is_bad_N = _is_live(rows, status_S1.shape[0] - 1) & ~(lse_N < float("inf"))
    num_bad_S1 = torch.zeros_like(status_S1).index_add(
        0, rows.search_of_row_N, is_bad_N.to(status_S1.dtype)
    )
    status_S1.masked_fill_((num_bad_S1 > 0) & (status_S1 == 0), 1 + round)
    rows.scores_N.masked_fill_((status_S1 != 0).index_select(0, rows.search_of_row_N), DEAD)


def _logsumexp(logits_TC: Tensor) -> Tensor:
    """fp32 [T]. NaN and +inf reach the result through the sum, whether or not a device's maximum passes NaN on."""
    peak_T1 = finite_or_zero(logits_TC.amax(1, keepdim=True))
    total_T1 = (logits_TC - peak_T1).exp_().sum(1, keepdim=True)
    return (peak_T1 + total_T1.log_()).squeeze(1)


def _is_live(rows: BeamRows, num_searches: int) -> Tensor:
    return (rows.scores_N > DEAD) & (rows.search_of_row_N < num_searches)


def _tiles(num_rows: int, num_columns: int) -> Iterator[tuple[int, int]]:
    tile_rows = max(1, TILE_CANDIDATES // max(1, num_columns))
    for first in range(0, num_rows, tile_rows):
        yield first, min(first + tile_rows, num_rows)
