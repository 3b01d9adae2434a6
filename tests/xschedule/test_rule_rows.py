"""Rows of a slot for tag expressions, against a plain list in the order of use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.xschedule.states import EVERYTHING, expression
from xgr_runtime.xschedule.rule_rows import RuleRowTable

actions = st.tuples(st.sampled_from(["place", "place", "place", "forget"]), st.integers(0, 6))


@given(
    num_rows=st.integers(2, 6),
    batches=st.lists(st.lists(actions, min_size=1, max_size=6), max_size=20),
)
def test_against_a_list_in_order_of_use(
    num_rows: int, batches: list[list[tuple[str, int]]]
) -> None:
    table = RuleRowTable(num_rows, EVERYTHING)
    used: list[int] = []  # expression numbers that are held, least recently used first
    row_of: dict[int, int] = {}
    for batch in batches:
        in_use: set[int] = set()
        for action, number in batch:
            if action == "forget":
                table.forget(expression(number))
                if number in used:
                    used.remove(number)
                    row_of.pop(number)
                continue
            placed = table.place(expression(number), in_use)
            if number == 0:
                assert placed == (0, False)
                continue
            if number in used:
                assert placed == (row_of[number], False)
                used.remove(number)
            else:
                evictable = [n for n in used if row_of[n] not in in_use]
                is_full = len(used) == num_rows - 1
                if is_full and not evictable:
                    assert placed is None
                    continue
                assert placed is not None
                row, is_new = placed
                assert is_new
                if is_full:
                    assert row == row_of.pop(evictable[0])
                    used.remove(evictable[0])
                assert 1 <= row < num_rows
                assert row not in row_of.values()
                row_of[number] = row
            used.append(number)
            in_use.add(row_of[number])


def test_everything_has_row_zero_even_when_all_rows_are_in_use() -> None:
    table = RuleRowTable(2, EVERYTHING)
    assert table.place(expression(1), set()) == (1, True)
    assert table.place(expression(2), {1}) is None
    assert table.place(EVERYTHING, {1}) == (0, False)
    table.forget(EVERYTHING)
    assert table.place(EVERYTHING, {1}) == (0, False)
    assert table.place(expression(2), set()) == (1, True)
