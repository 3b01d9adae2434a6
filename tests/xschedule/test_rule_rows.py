"""Rows of a slot for tag expressions, against a plain list in the order of use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.xschedule.states import EVERYTHING, expression
from xgr_runtime.xschedule.rule_rows import RuleRowTable

actions = st.tuples(st.sampled_from(["place", "place", "place", "forget"]), st.integers(0, 6))


@given(
    num_rows=st.integers(2, 6),
    num_in_flight=st.integers(1, 3),
    batches=st.lists(st.lists(actions, min_size=1, max_size=6), max_size=20),
)
def test_against_a_list_in_order_of_use(
    num_rows: int, num_in_flight: int, batches: list[list[tuple[str, int]]]
) -> None:
    """Batches hold the rows they were placed in; the oldest one ends before there are more than `num_in_flight`."""
    table = RuleRowTable(num_rows, EVERYTHING)
    used: list[int] = []  # expression numbers that are held, least recently used first
    row_of: dict[int, int] = {}
    held: list[list[int]] = []
    for batch in batches:
        if len(held) == num_in_flight:
            for row in held.pop(0):
                table.release(row)
        held.append([])
        for action, number in batch:
            in_use = {row for rows in held for row in rows}
            if action == "forget":
                table.forget(expression(number))
                used = [n for n in used if n != number]
                row_of.pop(number, None)
                continue
            placed = table.place(expression(number))
            if number == 0:
                assert placed == (0, False)
                table.release(0)
                continue
            if number in used:
                assert placed == (row_of[number], False)
                used.remove(number)
            else:
                evictable = [n for n in used if row_of[n] not in in_use]
                forgotten = in_use - set(row_of.values())
                is_full = len(used) + len(forgotten) == num_rows - 1
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
                assert row not in in_use, "a batch in flight reads it"
                row_of[number] = row
            used.append(number)
            held[-1].append(row_of[number])


def test_everything_has_row_zero_even_when_all_rows_are_in_use() -> None:
    table = RuleRowTable(2, EVERYTHING)
    assert table.place(expression(1)) == (1, True)
    assert table.place(expression(2)) is None
    assert table.place(EVERYTHING) == (0, False)
    table.forget(EVERYTHING)
    assert table.place(EVERYTHING) == (0, False)
    table.release(1)
    assert table.place(expression(2)) == (1, True)


def test_a_forgotten_row_is_not_given_away_while_a_batch_reads_it() -> None:
    """The batch that wrote it failed, the one behind it in flight still searches under it."""
    table = RuleRowTable(3, EVERYTHING)
    row, _ = table.place(expression(1)) or (0, False)
    assert table.place(expression(1)) == (row, False)
    table.forget(expression(1))
    table.release(row)
    other, is_new = table.place(expression(1)) or (0, False)
    assert is_new
    assert other != row
    assert table.place(expression(2)) is None
    table.release(row)
    assert table.place(expression(2)) == (row, True)
