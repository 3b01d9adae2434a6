"""From a batch's output to results: live beams, items in rank order, reasons for empty answers. Plain numpy."""

import numpy as np
import numpy.typing as npt

from xgr_runtime.errors import printable
from xgr_runtime.types import RecResult, SearchResult, Timings
from xgr_runtime.xbeam.ranking import rank_items
from xgr_runtime.xbeam.trie import leaf_sids
from xgr_runtime.xschedule.batch import BatchOutput, GroupOutput, SearchGroup
from xgr_runtime.xschedule.request import RequestState, SearchState
from xgr_runtime.xschedule.scheduler import Scheduled

TEMPERATURE = 1.0
MAX_REASON = 200  # characters: a reason may name tags of the request


def build_results(
    scheduled: Scheduled,
    output: BatchOutput,
    end_s: float,
    model_version: str,
    template_version: str,
) -> list[RecResult]:
    """The results of a batch's requests, in their order. end_s: when the batch's work ended, by the clock of its arrivals."""
    groups = scheduled.batch.groups
    # The same for all searches of a group: numpy costs microseconds a call, and callers wait for all of them.
    starts = [group.row_starts(group.num_levels - 1).tolist() for group in groups]
    statuses = [found.status_S.tolist() for found in output.groups]
    results = []
    for state, places in zip(scheduled.states, scheduled.places, strict=True):
        found = tuple(
            _build_search_result(
                search,
                output.groups[group],
                slice(starts[group][index], starts[group][index + 1]),
                statuses[group][index],
            )
            for search, (group, index) in zip(state.searches, places, strict=True)
        )
        results.append(
            RecResult(
                request_id=state.request.request_id,
                results=found,
                num_history_used=state.num_history_used,
                num_history_unknown=state.num_history_unknown,
                num_prompt_tokens=state.num_tokens,
                num_cached_tokens=state.num_cached_tokens,
                model_version=model_version,
                template_version=template_version,
                timings=timings(state, end_s),
            )
        )
    return results


def _build_search_result(
    search: SearchState, output: GroupOutput, rows: slice, status: int
) -> SearchResult:
    """The result of a search whose beams are those rows of the last round of its group."""
    catalog = search.pinned.catalog
    live, leaves, scores = _live_beams(output, rows, status)
    ranked = rank_items(
        leaves,
        catalog.sid_item_offsets,
        None if search.expression.is_empty else search.rule_set.item_alive,
        search.cleared.item_positions,
        search.num_results,
        search.max_items_per_sid,
    )
    has_keys = catalog.key_index is not None
    return SearchResult(
        item_ids=catalog.item_ids.take(ranked.positions).astype(np.int64, copy=False),
        keys=tuple(catalog.keys_of(ranked.positions) or ()) if has_keys else None,
        sids=leaf_sids(catalog.trie, leaves.take(ranked.ranks), catalog.parents),
        scores=scores.take(ranked.ranks),
        level_scores=level_scores(output, live.take(ranked.ranks))
        if search.return_level_scores
        else None,
        num_valid=len(live),
        num_items=len(ranked.positions),
        status="failed" if status else "ok",
        reason="" if len(live) else _reason(search, status),
        catalog=search.pinned.name,
        catalog_version=search.pinned.version,
        normalization=search.normalization,
        temperature=TEMPERATURE,
        beam_widths=search.widths,
        num_unknown_exclusions=search.num_unknown_exclusions,
    )


def _live_beams(
    output: GroupOutput, rows: slice, status: int
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer], npt.NDArray[np.float32]]:
    """The rows of a search's live beams, best first, their SIDs (leaves) and scores; none of a search that failed."""
    if status:
        rows = slice(rows.start, rows.start)
    live = np.arange(rows.start, rows.stop)
    leaves, scores = output.nodes_LN[-1][rows], output.scores_LN[-1][rows]
    is_live = scores > -np.inf
    if is_live.all():  # the usual case
        return live, leaves, scores
    return live[is_live], leaves[is_live], scores[is_live]


def level_scores(output: GroupOutput, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """fp32 [n, L]: what each level added to the score of the final `rows`, as differences along their ancestors."""
    num_levels = len(output.scores_LN)
    sums = np.zeros((len(rows), num_levels + 1), dtype=np.float64)
    for level in range(num_levels - 1, -1, -1):
        sums[:, level + 1] = output.scores_LN[level][rows]
        rows = output.parents_LN[level][rows]
    return np.diff(sums, axis=1).astype(np.float32)


def beam_levels(
    group: SearchGroup, output: GroupOutput, index: int
) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]:
    """Debug view: per level the trie nodes and scores of the live rows of search number `index` of a group, best first."""
    levels = []
    for level in range(group.num_levels):
        starts = group.row_starts(level)
        rows = slice(starts[index], starts[index + 1])
        scores = output.scores_LN[level][rows]
        levels.append((output.nodes_LN[level][rows][scores > -np.inf], scores[scores > -np.inf]))
    return levels


def timings(state: RequestState, end_s: float) -> Timings:
    """Milliseconds from arrival to batch, in the batch, and in all."""
    return Timings(
        queue_ms=(state.start_s - state.arrival_s) * 1e3,
        run_ms=(end_s - state.start_s) * 1e3,
        total_ms=(end_s - state.arrival_s) * 1e3,
    )


def _reason(search: SearchState, status: int) -> str:
    """Why a search has no live beam."""
    if status:
        return f"the model gave NaN or +inf in round {status - 1}"
    if search.rule_set.reason:
        return printable(search.rule_set.reason, MAX_REASON)
    num_cleared = len(search.cleared.edges[0])
    if num_cleared and num_cleared == int(search.rule_set.alive[0].sum()):
        return "every item that passes the tags is excluded"
    return "every beam died: no allowed token had a finite score"
