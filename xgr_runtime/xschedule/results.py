"""From a batch's output to results: live beams, items in rank order, reasons for empty answers. Plain numpy."""

import numpy as np
import numpy.typing as npt

from xgr_runtime.errors import printable
from xgr_runtime.types import RecResult, SearchResult, Timings
from xgr_runtime.xbeam.ranking import rank_items
from xgr_runtime.xschedule.batch import BatchOutput, GroupOutput, SearchGroup
from xgr_runtime.xschedule.request import RequestState, SearchState
from xgr_runtime.xschedule.scheduler import Scheduled

TEMPERATURE = 1.0
MAX_REASON = 200  # characters: a reason may name tags of the request


def build_result(
    scheduled: Scheduled,
    output: BatchOutput,
    number: int,
    end_s: float,
    model_version: str,
    template_version: str,
) -> RecResult:
    """The result of the batch's request `number`. end_s: when the batch's work ended, by the clock of its arrival."""
    state, groups = scheduled.states[number], scheduled.batch.groups
    places = zip(state.searches, scheduled.places[number], strict=True)
    return RecResult(
        request_id=state.request.request_id,
        results=tuple(
            build_search_result(search, groups[group], output.groups[group], index)
            for search, (group, index) in places
        ),
        num_history_used=state.num_history_used,
        num_history_unknown=state.num_history_unknown,
        num_prompt_tokens=state.num_tokens,
        num_cached_tokens=state.num_cached_tokens,
        model_version=model_version,
        template_version=template_version,
        timings=timings(state, end_s),
    )


def build_search_result(
    search: SearchState, group: SearchGroup, output: GroupOutput, index: int
) -> SearchResult:
    """The result of search number `index` of the group."""
    status = int(output.status_S[index])
    starts = group.row_starts(group.num_levels - 1)
    rows = np.arange(starts[index], starts[index + 1])
    scores = output.scores_LN[-1][rows]
    rows = rows[scores > -np.inf] if status == 0 else rows[:0]
    catalog = search.pinned.catalog
    ranked = rank_items(
        output.nodes_LN[-1][rows],
        catalog.sid_item_offsets,
        None if search.expression.is_empty else search.rule_set.item_alive,
        search.cleared.item_positions,
        search.num_results,
        search.max_items_per_sid,
    )
    item_rows = rows[ranked.ranks]
    keys = catalog.keys_of(ranked.positions)
    return SearchResult(
        item_ids=catalog.item_ids[ranked.positions].astype(np.int64),
        keys=None if keys is None else tuple(keys),
        sids=catalog.sids_of_positions(ranked.positions),
        scores=output.scores_LN[-1][item_rows],
        level_scores=level_scores(output, item_rows) if search.return_level_scores else None,
        num_valid=len(rows),
        num_items=len(ranked.positions),
        status="ok" if status == 0 else "failed",
        reason=_reason(search, status, len(rows)),
        catalog=search.pinned.name,
        catalog_version=search.pinned.version,
        normalization=search.normalization,
        temperature=TEMPERATURE,
        beam_widths=search.widths,
        num_unknown_exclusions=search.num_unknown_exclusions,
    )


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


def _reason(search: SearchState, status: int, num_valid: int) -> str:
    if status:
        return f"the model gave NaN or +inf in round {status - 1}"
    if num_valid:
        return ""
    if search.rule_set.reason:
        return printable(search.rule_set.reason, MAX_REASON)
    num_cleared = len(search.cleared.edges[0])
    if num_cleared and num_cleared == int(search.rule_set.alive[0].sum()):
        return "every item that passes the tags is excluded"
    return "every beam died: no allowed token had a finite score"
