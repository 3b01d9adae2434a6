"""What the host writes of a batch into pinned memory: its histories' part, and the part of each of its groups.

This time is the device's where it waits for a batch, so what is known is not worked out again. Which rows belong to which
search follows from the widths alone, and requests of one service mostly ask for the same ones: that is a *row plan*, kept by
widths and bucket, and a part of pinned memory that holds a plan already is only given what differs from batch to batch: the
rows of the rule sets and the positions of the tokens.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xgr_runtime.kvcache.allocator import NULL_PAGE
from xgr_runtime.xschedule.batch import PackedHistories, SearchGroup
from xgr_runtime.xschedule.buckets import PrefillBucket, RoundsBucket, SharedBucket

Arrays = dict[str, npt.NDArray[Any]]
# With 8,192 rows and three levels a plan is 0.2 MB.
_MOST_PLANS = 16


def fill_histories(to: Arrays, histories: PackedHistories, bucket: PrefillBucket) -> None:
    """Write the histories of a batch and their padding to the bucket."""
    t, h = bucket.num_tokens, bucket.shared.num_histories
    q_start_H1, table_HP = histories.q_start_H1, histories.page_table_HP
    _put(to["token_ids"], histories.token_ids_T, t, 0)
    _put(to["positions"], histories.positions_T, t, 0)
    _put(to["kv_slots"], histories.kv_slots_T, t, 0)
    _put(to["last_row"], q_start_H1[1:] - np.int64(1), h, 0)
    _put(to["q_start"], q_start_H1, h + 1, q_start_H1[-1])
    _put(to["kv_lens"], histories.kv_lens_H, h, 0)
    copies = to["copies"][:, :h]
    copies[:] = 0
    copies[:, : histories.num_histories] = histories.copies_3H
    to["page_table"][:h] = NULL_PAGE
    to["page_table"][: table_HP.shape[0], : table_HP.shape[1]] = table_HP


def _put(array: npt.NDArray[Any], values: npt.NDArray[Any], size: int, padding: Any) -> None:
    number = len(values)
    array[:number] = values
    if number < size:
        array[number:size] = padding


@dataclass(frozen=True)
class _Written:
    """Values, padded to their bucket, and the row of the array `name` that they begin; no row where it has only one."""

    name: str
    row: int | None
    values: npt.NDArray[Any]


@dataclass(frozen=True)
class RowPlan:
    """What the widths of a group and its bucket decide. num_rows: that are no padding, by round."""

    written: tuple[_Written, ...]
    num_rows: tuple[int, ...]


class GroupPart:
    """The part of a group in the pinned memory of an entry."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._plan: RowPlan | None = None

    def fill(
        self,
        plan: RowPlan,
        group: SearchGroup,
        histories: PackedHistories,
        rule_rows: Sequence[int],
    ) -> None:
        """Write a group and its padding."""
        to = self._arrays
        if self._plan is not plan:
            self._plan = None  # until all of it is there
            for one in plan.written:
                row = to[one.name] if one.row is None else to[one.name][one.row]
                row[: len(one.values)] = one.values
            self._plan = plan
        to["rule_row"][: len(rule_rows)] = rule_rows
        history_lens = histories.kv_lens_H[group.history_of_S].astype(np.int64)
        for level, num_rows in enumerate(plan.num_rows):
            # Where the token of each row of a round stands.
            positions = to["row_positions"][level]
            positions[:num_rows] = np.repeat(history_lens + level, group.widths_SL[:, level])


class RowPlans:
    """Row plans by what they are made of. dummy_slot: the slot of padding rows in round 0."""

    def __init__(self, dummy_slot: int) -> None:
        self._dummy_slot = dummy_slot
        self._plans: dict[Hashable, RowPlan] = {}

    def of(
        self,
        group: SearchGroup,
        bucket: RoundsBucket,
        shared: SharedBucket,
        num_histories: int,
    ) -> RowPlan:
        """The plan of a group; the same object as long as it is kept."""
        widths, owners = group.widths_SL.tobytes(), group.history_of_S.tobytes()
        key = (widths, owners, bucket, shared.num_histories, num_histories)
        plan = self._plans.pop(key, None)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.pop(next(iter(self._plans)))
            plan = _plan(group, bucket, shared, num_histories, self._dummy_slot)
        self._plans[key] = plan  # the last one: that used longest ago comes first
        return plan


def _plan(
    group: SearchGroup,
    bucket: RoundsBucket,
    shared: SharedBucket,
    num_histories: int,
    dummy_slot: int,
) -> RowPlan:
    s, levels = bucket.num_searches, group.num_levels
    written: list[_Written] = []

    def put(
        name: str,
        values: npt.NDArray[Any],
        size: int,
        padding: int,
        row: int | None = None,
    ) -> None:
        padded = np.full(size, padding, dtype=values.dtype)
        padded[: len(values)] = values
        written.append(_Written(name, row, padded))

    put("history_of", group.history_of_S.astype(np.int64), s, 0)
    put("rule_row", np.zeros(0, dtype=np.int32), s, 0)
    slot_starts = group.slot_starts()
    put("slot_start", slot_starts, s + 1, int(slot_starts[-1]))
    starts_by_level = [group.row_starts(level) for level in range(-1, levels)]
    for number, starts in enumerate(starts_by_level):
        rows = np.repeat(np.arange(group.num_searches, dtype=np.int32), np.diff(starts))
        put("starts", starts, s + 1, int(starts[-1]), number)
        put("search_of_row", rows, bucket.rows[number - 1] if number else s, s, number)
    for level, widths in enumerate(group.widths_SL.T):
        of_history = np.bincount(group.history_of_S, widths, num_histories)
        ends = np.concatenate([[0], np.cumsum(of_history)]).astype(np.int32)
        put("history_row_starts", ends, shared.num_histories + 1, int(ends[-1]), level)
        put("row_positions", np.zeros(0, dtype=np.int64), bucket.rows[level], 0, level)
    # Row i of a search starts in slot i of the search's range.
    starts, widths = starts_by_level[1], group.widths_SL[:, 0]
    first_slots = np.repeat(slot_starts[:-1] - starts[:-1], widths)
    first_slots += np.arange(len(first_slots), dtype=np.int32)
    put("first_slot", first_slots, bucket.rows[0], dummy_slot)
    return RowPlan(tuple(written), tuple(int(starts[-1]) for starts in starts_by_level[1:]))
