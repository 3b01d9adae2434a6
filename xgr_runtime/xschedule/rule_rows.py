"""Which tag expression lives in which row of a slot's alive bits: host bookkeeping, least recently used goes first.

A row that a batch in flight reads is never given to another expression: each placing takes a use of it, which `release`
gives back when the batch has ended.
"""

from collections import Counter, OrderedDict

from xgr_runtime.xbeam.rules import TagExpression


class RuleRowTable:
    """Rows 1 .. num_rows - 1 of one catalogue version. Row 0 is the empty expression and never moves."""

    def __init__(self, num_rows: int, everything: TagExpression) -> None:
        self._everything = everything
        self._rows: OrderedDict[TagExpression, int] = OrderedDict()
        self._free = list(range(num_rows - 1, 0, -1))
        self._num_uses: Counter[int] = Counter()
        self._forgotten: set[int] = set()  # rows in use that no expression is found in any more

    def place(self, expression: TagExpression) -> tuple[int, bool] | None:
        """The expression's row and whether it must be written first; None when every row is in use by others."""
        if expression == self._everything:
            return 0, False
        is_new = expression not in self._rows
        if is_new:
            row = self._take_row()
            if row is None:
                return None
            self._rows[expression] = row
        self._rows.move_to_end(expression)
        row = self._rows[expression]
        self._num_uses[row] += 1
        return row, is_new

    def release(self, row: int) -> None:
        """Give back one use of a row."""
        if row == 0:
            return
        assert self._num_uses[row] > 0, row
        self._num_uses[row] -= 1
        if not self._num_uses[row] and row in self._forgotten:
            self._forgotten.remove(row)
            self._free.append(row)

    def forget(self, expression: TagExpression) -> None:
        """The expression's row may hold anything: it has to be written again before it is used by another batch."""
        row = self._rows.pop(expression, None)
        if row is None:
            return
        if self._num_uses[row]:
            self._forgotten.add(row)
        else:
            self._free.append(row)

    def _take_row(self) -> int | None:
        if self._free:
            return self._free.pop()
        evicted = next((e for e, row in self._rows.items() if not self._num_uses[row]), None)
        return None if evicted is None else self._rows.pop(evicted)
