"""Which tag expression lives in which row of a slot's alive bits: host bookkeeping, least recently used goes first."""

from collections import OrderedDict
from collections.abc import Collection

from xgr_runtime.xbeam.rules import TagExpression


class RuleRowTable:
    """Rows 1 .. num_rows - 1 of one catalogue version. Row 0 is the empty expression and never moves."""

    def __init__(self, num_rows: int, everything: TagExpression) -> None:
        self._everything = everything
        self._rows: OrderedDict[TagExpression, int] = OrderedDict()
        self._free = list(range(num_rows - 1, 0, -1))

    def place(self, expression: TagExpression, in_use: Collection[int]) -> tuple[int, bool] | None:
        """The expression's row and whether it must be written first; None when every row is in `in_use`."""
        if expression == self._everything:
            return 0, False
        if expression in self._rows:
            self._rows.move_to_end(expression)
            return self._rows[expression], False
        if self._free:
            row = self._free.pop()
        else:
            evicted = next((e for e, r in self._rows.items() if r not in in_use), None)
            if evicted is None:
                return None
            row = self._rows.pop(evicted)
        self._rows[expression] = row
        return row, True

    def forget(self, expression: TagExpression) -> None:
        """The expression's row may hold anything: it has to be written again before it is used."""
        if expression in self._rows:
            self._free.append(self._rows.pop(expression))
