"""Beam selection over a catalogue's trie: one round of the search.

All searches of a batch are one set of packed rows. A round lays out every candidate in (search, parent rank, code)
order and sorts by one int64 key, the search index above the bits of the score; the sort is stable, so equal scores
stay in the order of the contract: parent rank, then code. Parent rows are tiled: the best candidates so far come from
earlier rows, so putting them in front of a tile keeps that order, one stable sort a tile is enough, and a hub below
every beam needs no more memory than `TILE_CANDIDATES` says.

The references have fixed shapes, read nothing on the host and branch on no value, so they can be captured. Work of a
reference does not depend on the data; providers may end early (see `select_beams`).

Shapes: S searches, N packed parent rows, C codes of the level, R rule rows, E edges of the level. Inside the helpers:
T rows of a tile, F candidates of a row, M packed child rows. Indices are widened to int64 before any arithmetic:
rows x codes passes 2^31.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xgr_runtime.hal.registry import by_parts, op

DEAD = float("-inf")

# Candidates of a tile. The select_beams reference allocates at most about 80 bytes for each (edges, codes, scores,
# keys and the sort's own buffers), 80 MiB in all, and 48 bytes for each child row. A single row is never split, so a
# level of more codes than this would need 80 bytes a code.
TILE_CANDIDATES = 1 << 20


@dataclass(frozen=True)
class LevelTrie:
    """One level of a catalogue on the device, in one of two layouts. Tensors may be longer than the catalogue needs.

    num_codes: C. max_fanout: no node of the level has more children (a host number: it sizes the candidates).
    CSR: offsets int32 or int64 [nodes + 1], codes int32 [E], strictly ascending inside a node; a child's node id is
    its position in `codes`; alive_RE bool [R, E].
    Dense: child_node int32 [nodes * C], -1 where there is no child; alive_RE bool [R, nodes * C], false there.
    """

    num_codes: int
    max_fanout: int
    is_dense: bool
    offsets: Tensor | None
    codes: Tensor | None
    child_node: Tensor | None
    alive_RE: Tensor


@dataclass(frozen=True)
class BeamRows:
    """Packed beam rows: search s owns rows [start_S1[s], start_S1[s + 1]), best first; start_S1[0] is 0.

    scores_N fp32 (-inf = dead), nodes_N, parents_N (packed row of the round before), codes_N, start_S1 and
    search_of_row_N int32. Rows from start_S1[S] on are padding: search_of_row_N is S and their content is ignored.
    """

    scores_N: Tensor
    nodes_N: Tensor
    parents_N: Tensor
    codes_N: Tensor
    start_S1: Tensor
    search_of_row_N: Tensor


@op
def select_beams(
    logits_NC: Tensor,
    lse_N: Tensor,
    parents: BeamRows,
    rule_row_S: Tensor,
    trie: LevelTrie,
    children: BeamRows,
    counters: Tensor,
) -> None:
    """Expand every live row by all its living children and keep each search's best ones, exactly.

    The score of a child is `parent + (logit - lse)`, each operation rounded to fp32 in that order; a zero parent
    counts as +0.0. A child is a candidate when it is alive in the search's rule row and its score is finite, which
    leaves out dead parents and any -inf, +inf or NaN among logit and lse. Order: score descending, parent row
    ascending, code ascending. The width of a search is its number of rows in `children`.

    Args:
        logits_NC: fp32, any strides (a stride of 0 is legal).
        lse_N: fp32, the normaliser of each row.
        parents: the rows to expand.
        rule_row_S: int32, the row of `trie.alive_RE` that each search lives by.
        trie: the level.
        children: start_S1 and search_of_row_N are read; scores_N, nodes_N, parents_N and codes_N are written in
            place. Rows without a candidate follow the others: score -inf, node 0, code 0, parent = the search's first
            parent row. Padding rows get score -inf and zeros. Shares no memory with `parents`.
        counters: int64 [2], added to in place: live parent rows; live parent rows that early termination skipped
            (the reference skips none).
    """
    num_rows, fanout = logits_NC.shape[0], _row_candidates(trie)
    num_searches = rule_row_S.shape[0]
    search_M = children.search_of_row_N.long()
    rank_M = torch.arange(search_M.shape[0], device=search_M.device)
    best_scores_M = torch.full_like(children.scores_N, DEAD)
    best_rows_M, best_codes_M, best_edges_M = (torch.zeros_like(search_M) for _ in range(3))
    for first, last in _tiles(num_rows, fanout):
        search_T = parents.search_of_row_N[first:last].long()
        edges_TF, codes_TF, logits_TF, alive_TF = _expand(
            logits_NC, parents, rule_row_S, trie, first, last
        )
        parent_T1 = (parents.scores_N[first:last] + 0.0)[:, None]
        scores_TF = parent_T1 + (logits_TF - lse_N[first:last, None])
        scores_TF = torch.where(alive_TF & torch.isfinite(scores_TF), scores_TF, DEAD)
        keys = torch.cat(
            (_sort_key(search_M, best_scores_M), _sort_key(search_T[:, None], scores_TF).flatten())
        )
        order = torch.sort(keys, stable=True).indices
        # Before the rows of search s the sorted keys hold the best rows of the earlier searches (as many as before
        # its child rows) and the tile's candidates of the earlier searches.
        earlier_M = (parents.start_S1.long()[search_M] - first).clamp(0, last - first) * fanout
        source_M = order[rank_M + earlier_M]
        is_kept_M = source_M < search_M.shape[0]
        kept_M = torch.where(is_kept_M, source_M, 0)
        new_M = torch.where(is_kept_M, 0, source_M - search_M.shape[0])
        best_scores_M = torch.where(is_kept_M, best_scores_M[kept_M], scores_TF.flatten()[new_M])
        best_rows_M = torch.where(is_kept_M, best_rows_M[kept_M], first + new_M // fanout)
        best_codes_M = torch.where(is_kept_M, best_codes_M[kept_M], codes_TF.flatten()[new_M])
        best_edges_M = torch.where(is_kept_M, best_edges_M[kept_M], edges_TF.flatten()[new_M])
    is_padding_M = search_M >= num_searches
    is_live_M = (best_scores_M > DEAD) & ~is_padding_M
    best_edges_M = torch.where(is_live_M, best_edges_M, 0)
    nodes_M = best_edges_M if trie.child_node is None else trie.child_node[best_edges_M]
    first_parent_M = torch.where(is_padding_M, 0, parents.start_S1.long()[search_M])
    children.scores_N.copy_(torch.where(is_live_M, best_scores_M, DEAD))
    children.nodes_N.copy_(torch.where(is_live_M, nodes_M, 0))
    children.parents_N.copy_(torch.where(is_live_M, best_rows_M, first_parent_M))
    children.codes_N.copy_(torch.where(is_live_M, best_codes_M, 0))
    counters[0].add_(_is_live(parents, num_searches).sum())


@op
def level_logsumexp(logits_NC: Tensor) -> Tensor:
    """Log-sum-exp of each row: the `level` normaliser. Returns fp32 [N].

    A column of -inf contributes nothing, a row of nothing else gives -inf. A row with a NaN gives NaN, a row with
    +inf and no NaN gives +inf. Finite logits of any size give a finite result. logits_NC is fp32, of any strides.
    """
    lse_N = torch.empty(logits_NC.shape[0], dtype=logits_NC.dtype, device=logits_NC.device)
    for first, last in _tiles(*logits_NC.shape):
        lse_N[first:last] = torch.logsumexp(logits_NC[first:last], dim=1)
    return lse_N


@op
def children_logsumexp(
    logits_NC: Tensor, parents: BeamRows, rule_row_S: Tensor, trie: LevelTrie
) -> Tensor:
    """Log-sum-exp over the living children of each row: the `valid` normaliser. Returns fp32 [N].

    Only the logits of living children are read; among these -inf, +inf and NaN act as in `level_logsumexp`. Dead and
    padding rows, and rows without a living child, give -inf. Arguments as in `select_beams`.
    """
    lse_N = torch.empty(logits_NC.shape[0], dtype=logits_NC.dtype, device=logits_NC.device)
    for first, last in _tiles(logits_NC.shape[0], _row_candidates(trie)):
        _, _, logits_TF, alive_TF = _expand(logits_NC, parents, rule_row_S, trie, first, last)
        lse_N[first:last] = torch.logsumexp(torch.where(alive_TF, logits_TF, DEAD), dim=1)
    return torch.where(_is_live(parents, rule_row_S.shape[0]), lse_N, DEAD)


@op
def flag_failed_searches(lse_N: Tensor, rows: BeamRows, status_S1: Tensor, round: int) -> None:
    """Fail each search that has a live row whose normaliser is NaN or +inf; other searches are not touched.

    Args:
        lse_N: fp32, the normaliser of each row.
        rows: scores_N is set to -inf, in place, on all rows of searches whose status is not 0.
        status_S1: int32 [S + 1], in place: 0 becomes 1 + round for a search that fails now; the last entry belongs to
            the padding rows and stays as it is.
        round: the round's index, from 0.
    """
    num_searches = status_S1.shape[0] - 1
    search_N = rows.search_of_row_N.long()
    is_bad_N = _is_live(rows, num_searches) & (torch.isnan(lse_N) | (lse_N == float("inf")))
    num_bad_S1 = torch.zeros_like(status_S1).index_add(0, search_N, is_bad_N.to(status_S1.dtype))
    status_S1.masked_fill_((num_bad_S1 > 0) & (status_S1 == 0), 1 + round)
    rows.scores_N.masked_fill_((status_S1 != 0)[search_N], DEAD)


@op
def flagged_level_logsumexp(
    logits_NC: Tensor, rows: BeamRows, status_S1: Tensor, round: int
) -> Tensor:
    """`level_logsumexp`, and the searches flagged that fail by it: the `level` normaliser of a round at once. Returns fp32 [N].

    Args:
        logits_NC: as of `level_logsumexp`.
        rows: the rows of the logits, scores_N in place, as of `flag_failed_searches`.
        status_S1: in place, likewise.
        round: likewise.
    """
    lse_N = level_logsumexp(logits_NC)
    flag_failed_searches(lse_N, rows, status_S1, round)
    return lse_N


@by_parts(flagged_level_logsumexp, level_logsumexp, flag_failed_searches)
def _flag_by_parts(
    parts: Any, logits_NC: Tensor, rows: BeamRows, status_S1: Tensor, round: int
) -> Tensor:
    lse_N: Tensor = parts.level_logsumexp(logits_NC)
    parts.flag_failed_searches(lse_N, rows, status_S1, round)
    return lse_N


def _tiles(num_rows: int, num_columns: int) -> Iterator[tuple[int, int]]:
    tile_rows = max(1, TILE_CANDIDATES // max(1, num_columns))
    for first in range(0, num_rows, tile_rows):
        yield first, min(first + tile_rows, num_rows)


def _row_candidates(trie: LevelTrie) -> int:
    return trie.num_codes if trie.is_dense else trie.max_fanout


def _is_live(rows: BeamRows, num_searches: int) -> Tensor:
    return (rows.scores_N > DEAD) & (rows.search_of_row_N < num_searches)


def _expand(
    logits_NC: Tensor, parents: BeamRows, rule_row_S: Tensor, trie: LevelTrie, first: int, last: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Edges, codes, logits and liveness of the candidates of rows [first, last), each [T, F]."""
    search_T = parents.search_of_row_N[first:last].long()
    is_row_T = search_T < rule_row_S.shape[0]
    node_T1 = torch.where(is_row_T, parents.nodes_N[first:last].long(), 0)[:, None]
    rule_T1 = rule_row_S.long()[torch.where(is_row_T, search_T, 0)][:, None]
    column_F = torch.arange(_row_candidates(trie), device=logits_NC.device)
    if trie.child_node is not None:
        edges_TF = node_T1 * trie.num_codes + column_F
        codes_TF = column_F.expand_as(edges_TF)
        return edges_TF, codes_TF, logits_NC[first:last], trie.alive_RE[rule_T1, edges_TF]
    assert trie.offsets is not None
    assert trie.codes is not None
    edges_TF = trie.offsets[node_T1].long() + column_F
    is_child_TF = edges_TF < trie.offsets[node_T1 + 1]
    edges_TF = torch.where(is_child_TF, edges_TF, 0)
    codes_TF = trie.codes[edges_TF].long()
    alive_TF = is_child_TF & trie.alive_RE[rule_T1, edges_TF]
    return edges_TF, codes_TF, logits_NC[first:last].gather(1, codes_TF), alive_TF


def _sort_key(search: Tensor, scores: Tensor) -> Tensor:
    """int64 keys that sort by search ascending, then score descending; scores hold no NaN and no -0.0."""
    bits = scores.view(torch.int32)
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (search << 32) + (0x7FFFFFFF - ascending)
