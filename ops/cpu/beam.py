"""CPU providers of the beam-selection ops: numpy on the tensors' own memory, sized by the data, ending early.

select_beams decides per search. Few candidates: list them all (those of many searches together) and cut. Many, as
below a hub: bound each row by what its largest logit could score, start with the rows of the best bounds, keep the
W-th best score so far as the threshold, look only for candidates that reach it, and skip every row whose bound is
strictly below it. Rounding is monotone, so no candidate of a row exceeds the row's bound, and everything that equals the threshold
stays in the pool until the exact order (score, parent row, code) decides.

level_logsumexp works through chunks of rows that stay in the cache: exponential, sum. Taking out the largest logit
first costs two more passes and matters only where the sum overflows or nearly vanishes (or meets NaN): those rows are
done again with it. numpy has the faster exponential (1.6 against 2.9 ms for 512 x 8,192), torch the faster sum.
Memory: LIST_CANDIDATES candidates of about 60 bytes, or one search's listed ones if that is more; SCAN_ROWS rows of
logits; one chunk of CHUNK_ELEMENTS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from xgr_runtime.hal.ops.beam import (
    BeamRows,
    LevelTrie,
    children_logsumexp,
    flag_failed_searches,
    level_logsumexp,
    select_beams,
)
from xgr_runtime.hal.registry import impl

from .candidates import Candidates, LevelView

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from .candidates import Floats, Ints

CHUNK_ELEMENTS = 1 << 16
SCAN_STEPS = (1, 4, 16)
SCAN_ROWS = 64
# Below this the smallest fp32 numbers, to which single exponentials are rounded, begin to count.
SMALLEST_TOTAL = 1e-20
# Listed together: more arrays of this length than these leave the cache.
LIST_CANDIDATES = 1 << 16
# One logit of a scan costs about a twentieth of one listed candidate; a scan's fixed cost is that of listing SCAN_FROM.
SCAN_SHARE = 20
SCAN_FROM = 1 << 15


@impl(select_beams, provider="numpy", device="cpu")
def select_beams_cpu(
    logits_NC: Tensor,
    lse_N: Tensor,
    parents: BeamRows,
    rule_row_S: Tensor,
    trie: LevelTrie,
    children: BeamRows,
    counters: Tensor,
) -> None:
    """See `xgr_runtime.hal.ops.beam.select_beams`; scores, rows, codes and nodes are bit-identical to it."""
    level = LevelView(logits_NC, parents, rule_row_S, trie)
    lse = lse_N.numpy()
    starts, child_starts = _starts(parents), _starts(children)
    _write_dead(children, starts, len(rule_row_S))
    usable = np.flatnonzero(level.is_live_N & np.isfinite(level.parent_N) & np.isfinite(lse))
    cuts = np.searchsorted(usable, starts)
    counts = np.concatenate(([0], np.cumsum(level.num_candidates()[usable])))[cuts]
    widths = np.diff(child_starts)
    is_scanned = np.diff(counts) * SCAN_SHARE > np.diff(cuts) * trie.num_codes
    is_scanned &= np.diff(counts) > SCAN_FROM
    num_skipped = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for search in np.flatnonzero(is_scanned & (widths > 0)):
            rows = usable[cuts[search] : cuts[search + 1]]
            best, skipped = _scan(level, lse, rows, int(widths[search]))
            num_skipped += skipped
            _write(children, int(child_starts[search]), best, trie)
        listed = np.flatnonzero(~is_scanned & (widths > 0) & (np.diff(counts) > 0))
        for group in _groups(listed, np.diff(counts)):
            rows = np.concatenate([usable[cuts[s] : cuts[s + 1]] for s in group])
            found = level.expand(rows, lse)
            edges_of_group = np.searchsorted(found.rows, starts)
            for search in group:
                mine = found.take(slice(edges_of_group[search], edges_of_group[search + 1]))
                best = _cut(mine, int(widths[search]))
                order = np.argsort(-best.scores, kind="stable")[: widths[search]]
                _write(children, int(child_starts[search]), best.take(order), trie)
    counters[0] += int(np.count_nonzero(level.is_live_N))
    counters[1] += num_skipped


@impl(level_logsumexp, provider="numpy", device="cpu")
def level_logsumexp_cpu(logits_NC: Tensor) -> Tensor:
    """See `xgr_runtime.hal.ops.beam.level_logsumexp`."""
    logits = logits_NC.numpy()
    num_rows, num_codes = logits.shape
    lse = np.empty(num_rows, np.float32)
    step = max(1, CHUNK_ELEMENTS // max(1, num_codes))
    buffer = torch.empty((min(step, num_rows), num_codes))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for first in range(0, num_rows, step):
            chunk = logits[first : first + step]
            work = buffer[: len(chunk)]
            np.exp(chunk, out=work.numpy())
            total = work.sum(dim=1).numpy()
            np.log(total, out=lse[first : first + step])
            is_odd = ~((total > SMALLEST_TOTAL) & (total < np.inf))
            if is_odd.any():
                odd = np.flatnonzero(is_odd)
                lse[first + odd] = _shifted_logsumexp(chunk[odd])
    return torch.from_numpy(lse)


def _shifted_logsumexp(logits: Floats) -> Floats:
    """Log-sum-exp of each row for logits of any size, the largest one taken out first."""
    peak = logits.max(axis=1)
    total = np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    result: Floats = np.where(np.isfinite(peak), peak + total, peak)
    return result


@impl(children_logsumexp, provider="numpy", device="cpu")
def children_logsumexp_cpu(
    logits_NC: Tensor, parents: BeamRows, rule_row_S: Tensor, trie: LevelTrie
) -> Tensor:
    """See `xgr_runtime.hal.ops.beam.children_logsumexp`."""
    level = LevelView(logits_NC, parents, rule_row_S, trie)
    lse = np.full(len(level.node_N), -np.inf, np.float32)
    live = np.flatnonzero(level.is_live_N)
    counts = level.num_candidates()[live]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for group in _groups(np.arange(len(live)), counts):
            rows, codes, _ = level.children(live[group])
            if not len(rows):
                continue
            begins = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
            logits = level.logits(rows, codes)
            peak = np.maximum.reduceat(logits, begins)
            logits -= np.repeat(peak, np.diff(begins, append=len(rows)))
            total = np.log(np.add.reduceat(np.exp(logits, out=logits), begins))
            lse[rows[begins]] = np.where(np.isfinite(peak), peak + total, peak)
    return torch.from_numpy(lse)


@impl(flag_failed_searches, provider="numpy", device="cpu")
def flag_failed_searches_cpu(lse_N: Tensor, rows: BeamRows, status_S1: Tensor, round: int) -> None:
    """See `xgr_runtime.hal.ops.beam.flag_failed_searches`."""
    status, scores, search = (t.numpy() for t in (status_S1, rows.scores_N, rows.search_of_row_N))
    is_bad = (scores > -np.inf) & (search < len(status) - 1) & ~(lse_N.numpy() < np.inf)
    failed = search[is_bad]
    status[failed[status[failed] == 0]] = 1 + round
    if status.any():
        scores[status[search] != 0] = -np.inf


def _scan(level: LevelView, lse: Floats, rows: Ints, width: int) -> tuple[Candidates, int]:
    """The best `width` candidates of `rows` (packed, ascending), in order, and the number of rows never looked at."""
    bounds = level.bounds(rows, lse)
    pool = level.expand(rows[:0], lse)
    least, num_done = -np.inf, 0
    for block in _blocks(bounds):
        block = block[bounds[block] >= least]
        if not len(block):
            continue
        num_done += len(block)
        if least == -np.inf:
            found = level.expand(rows[block], lse)
        else:
            found = level.search(rows[block], lse, least)
        pool = _cut(Candidates.join([pool, found]), width)
        if len(pool) >= width:
            least = float(pool.scores.min())
    best = np.lexsort((pool.codes, pool.rows, -pool.scores))[:width]
    return pool.take(best), len(rows) - num_done


def _blocks(bounds: Floats) -> Iterator[Ints]:
    """Every row once: a few of the best bounds first, for a good threshold; then the others as they lie in memory."""
    order = np.argsort(-bounds, kind="stable")
    first = 0
    for step in SCAN_STEPS:
        yield np.sort(order[first : first + step])
        first += step
    rest = np.sort(order[first:])
    for begin in range(0, len(rest), SCAN_ROWS):
        yield rest[begin : begin + SCAN_ROWS]


def _cut(found: Candidates, width: int) -> Candidates:
    """Drop what is strictly worse than the `width`-th best; ties with it stay, the order too."""
    surplus = len(found) - width
    if surplus <= 0:
        return found
    least = np.partition(found.scores, surplus)[surplus]
    return found.take(np.flatnonzero(found.scores >= least))


def _groups(index: Ints, counts: Ints) -> Iterator[Ints]:
    """Consecutive runs of `index` whose counts add up to at most LIST_CANDIDATES (or a single one that has more)."""
    first = 0
    ends = np.cumsum(counts[index])
    while first < len(index):
        done = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, done + LIST_CANDIDATES, side="right")), first + 1)
        yield index[first:last]
        first = last


def _starts(rows: BeamRows) -> Ints:
    return rows.start_S1.numpy().astype(np.int64)


def _write_dead(children: BeamRows, parent_starts: Ints, num_searches: int) -> None:
    search = children.search_of_row_N.numpy()
    children.scores_N.numpy().fill(-np.inf)
    children.nodes_N.numpy().fill(0)
    children.codes_N.numpy().fill(0)
    children.parents_N.numpy()[:] = np.where(search < num_searches, parent_starts[search], 0)


def _write(children: BeamRows, first: int, best: Candidates, trie: LevelTrie) -> None:
    at = slice(first, first + len(best))
    child_node = trie.child_node
    nodes = best.edges if child_node is None else child_node.numpy()[best.edges]
    children.scores_N.numpy()[at] = best.scores
    children.parents_N.numpy()[at] = best.rows
    children.codes_N.numpy()[at] = best.codes
    children.nodes_N.numpy()[at] = nodes
