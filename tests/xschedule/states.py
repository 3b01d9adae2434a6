"""Request states made by hand, so that the scheduler is tested without a model, a catalogue file or torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from xgr_runtime.kvcache.prefix_keys import prefix_keys
from xgr_runtime.types import RecRequest
from xgr_runtime.xbeam.rules import Cleared, RuleSet, TagExpression
from xgr_runtime.xschedule.batch import BatchOutput, GroupOutput
from xgr_runtime.xschedule.request import RequestState, SearchState
from xgr_runtime.xschedule.rule_rows import RuleRowTable

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from xgr_runtime.types import Int64Array, Normalization
    from xgr_runtime.xschedule.batch import Batch

EVERYTHING = TagExpression()
PATIENCE_S = 1.0


@dataclass
class Pinned:
    """What the scheduler reads of a loaded catalogue."""

    slot_index: int
    num_rule_rows: int = 9
    name: str = "main"
    version: str = "v1"
    catalog: Any = None
    rule_rows: RuleRowTable = field(init=False)

    def __post_init__(self) -> None:
        self.rule_rows = RuleRowTable(self.num_rule_rows, EVERYTHING)


def expression(number: int) -> TagExpression:
    """Number 0 is the empty expression."""
    return TagExpression((), (f"tag:{number}",)) if number else EVERYTHING


def make_state(
    request_id: str,
    pinned: Pinned,
    *,
    num_tokens: int = 4,
    widths: tuple[int, ...] = (2, 2),
    normalization: Normalization = "vocab",
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    expression_number: int = 0,
    is_excluding: bool = False,
    prompt: Int64Array | None = None,
    page_size: int | None = None,
) -> RequestState:
    """A state as intake would make it, with an empty rule set; prefix keys only where a page size is given."""
    token_ids = np.arange(num_tokens, dtype=np.int64) if prompt is None else prompt
    nothing = np.zeros(0, dtype=np.int32)
    edges = (np.asarray([1], dtype=np.int32) if is_excluding else nothing,) * len(widths)
    rule_set = RuleSet(expression(expression_number), (), (), nothing, nothing > 0, 0, (), "")
    search = SearchState(
        pinned=pinned,
        normalization=normalization,
        widths=widths,
        num_results=10,
        max_items_per_sid=None,
        return_level_scores=False,
        expression=expression(expression_number),
        rule_set=rule_set,
        cleared=Cleared(edges, np.zeros(0, dtype=np.int64)),
        num_unknown_exclusions=0,
    )
    due_s = arrival_s + PATIENCE_S
    return RequestState(
        request=RecRequest(request_id, deadline_s=deadline_s),
        prompt_token_ids=token_ids,
        searches=(search,),
        num_history_used=1,
        num_history_unknown=0,
        arrival_s=arrival_s,
        due_s=due_s if deadline_s is None else min(due_s, deadline_s),
        prefix=None if page_size is None else prefix_keys(b"root", token_ids, page_size),
    )


def output_of(batch: Batch, failed: Collection[int] = ()) -> BatchOutput:
    """An output in which the searches of the named histories failed, with empty beams."""
    groups = []
    for group in batch.groups:
        num_rows = int(group.row_starts(group.num_levels - 1)[-1])
        rows = np.zeros((group.num_levels, num_rows), dtype=np.int32)
        status = np.isin(group.history_of_S, list(failed)).astype(np.int32)
        groups.append(GroupOutput(rows.astype(np.float32), rows, rows, status, 0, 0))
    return BatchOutput(tuple(groups))
