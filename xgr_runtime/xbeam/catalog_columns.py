"""Items of a text file as they are read, row after row, into packed columns.

A reader (JSONL, CSV) turns a row into typed values; this checks their ranges and keeps them in typed arrays, 30 to 50
bytes an item beside its text. Nothing else of a row stays, so a file of any size is read in the memory of its columns.
"""

from __future__ import annotations

import math
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xgr_runtime.errors import CatalogError, shown
from xgr_runtime.xbeam.catalog_source import (
    MAX_KEY_BYTES,
    ItemTable,
    check_size,
    check_tag,
    encode_key,
    encode_text,
    row_error,
)
from xgr_runtime.xbeam.catalog_text import StringBuilder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

MAX_CODE = int(np.iinfo(np.int32).max)


class Rows(NamedTuple):
    """Columns of some rows, unchecked. Absent keys and titles are "", absent tags ()."""

    item_ids: list[Any]
    sids: list[Any]
    keys: list[Any]
    titles: list[Any]
    weights: list[Any]
    servable: list[Any]
    tags: list[Any]


class ItemColumns:
    """Columns under construction. `add` raises ValueError about the row; the reader knows what to call it."""

    def __init__(self, source: str, num_levels: int, id_field: str) -> None:
        self.source = source
        self._num_levels, self._id_field = num_levels, id_field
        self._sids, self._ids, self._weights = array("i"), array("q"), array("d")
        self._servable = bytearray()
        self._keys, self._titles = StringBuilder(), StringBuilder()
        self._tags: dict[str, array[int]] = {}
        self._lines = array("q")
        self._num_ids = 0
        self._row_without_id = -1

    @property
    def num_rows(self) -> int:
        """Rows added so far."""
        return len(self._servable)

    def add(
        self,
        item_id: int | None,
        sid: Sequence[int],
        key: str | None,
        title: str | None,
        weight: float,
        is_servable: bool,
        tags: Iterable[str],
    ) -> None:
        """Adds a row of values of these types; checks lengths, ranges and text. Raises ValueError."""
        row = len(self._servable)
        if item_id is not None:
            self._num_ids += 1
        elif key is None:
            raise ValueError(f"{self._id_field!r} or 'key' is needed")
        elif self._row_without_id < 0:
            self._row_without_id = row
        if len(sid) != self._num_levels:
            raise ValueError(f"a SID of {self._num_levels} codes expected, got {shown(sid)}")
        if min(sid) < 0 or max(sid) > MAX_CODE:
            raise ValueError(f"codes must be in [0, 2^31), got {shown(sid)}")
        if not -(1 << 63) <= (item_id or 0) < 1 << 63:
            raise ValueError(f"{self._id_field!r} must be an int64, got {shown(item_id)}")
        if weight - weight != 0.0:
            raise ValueError(f"'weight' must be finite, got {shown(weight)}")
        encoded_key = encode_key(key) if key else b""
        encoded_title = encode_text("title", title) if title else b""
        tag_rows = [self._tags.get(tag) or self._new_tag(tag) for tag in tags]
        self._keys.append(encoded_key)
        self._titles.append(encoded_title)
        self._sids.extend(sid)
        self._ids.append(item_id or 0)
        self._weights.append(weight)
        self._servable.append(is_servable)
        for rows in tag_rows:
            rows.append(row)

    def add_plain(self, rows: Rows) -> bool:
        """Adds many rows at once if nothing about them is unusual; returns False, having added none, if anything is.

        As `add` row by row, in a third of the time: types and ranges are checked a column at a time. The unusual may still
        be right, so whoever gets False adds the rows one by one.
        """
        if not _are_plain(rows, self._num_levels):
            return False
        names = set(chain.from_iterable(rows.tags))
        has_ids = rows.item_ids[0] is not None
        try:
            codes = array("i", chain.from_iterable(rows.sids))
            item_ids = array("q", rows.item_ids if has_ids else bytes(8 * len(rows.item_ids)))
            weights = array("d", rows.weights)
            keys = list(map(str.encode, rows.keys))
            titles = list(map(str.encode, rows.titles))
            for name in names.difference(self._tags):
                check_tag(name)
        except (OverflowError, ValueError):
            return False
        if min(codes) < 0 or not math.isfinite(sum(weights)) or max(map(len, keys)) > MAX_KEY_BYTES:
            return False
        for row, tags in enumerate(rows.tags, len(self._servable)):
            for tag in tags:
                (self._tags.get(tag) or self._tags.setdefault(tag, array("i"))).append(row)
        if has_ids:
            self._num_ids += len(item_ids)
        elif self._row_without_id < 0:
            self._row_without_id = self.num_rows
        self._keys.extend(keys)
        self._titles.extend(titles)
        self._sids.extend(codes)
        self._ids.extend(item_ids)
        self._weights.extend(weights)
        self._servable.extend(rows.servable)
        return True

    def _new_tag(self, tag: str) -> array[int]:
        check_tag(tag)
        return self._tags.setdefault(tag, array("i"))

    def note_line(self, line: int) -> None:
        """Where the row added last starts, for files whose rows are not their lines."""
        self._lines.append(line)

    def table(self) -> ItemTable:
        """The checked items; nothing can be added afterwards. Raises CatalogError."""
        num_rows = self.num_rows
        check_size(self.source, num_rows)
        lines = np.frombuffer(self._lines, np.int64) if self._lines else None
        if 0 < self._num_ids < num_rows:
            row = self._row_without_id
            text = f"no {self._id_field!r}, other rows have one; give it in all or none"
            raise row_error(self.source, row, text, None if lines is None else int(lines[row]))
        weights = np.frombuffer(self._weights, np.float64)
        servable = np.frombuffer(self._servable, np.bool_)
        return ItemTable(
            self.source,
            np.frombuffer(self._sids, np.int32).reshape(num_rows, self._num_levels),
            np.frombuffer(self._ids, np.int64)
            if self._num_ids
            else np.arange(num_rows, dtype=np.int64),
            self._keys.strings() if self._keys.blob else None,
            self._titles.strings() if self._titles.blob else None,
            weights if weights.any() else None,
            None if servable.all() else servable,
            {name: _distinct(self._tags[name]) for name in sorted(self._tags)},
            lines,
        )


def _are_plain(rows: Rows, num_levels: int) -> bool:
    """Whether every value has the one usual type and every SID its length. Ids are in all rows, or in none and keys in all."""
    kinds_of_ids = set(map(type, rows.item_ids))
    return (
        (kinds_of_ids == {int} or (kinds_of_ids == {type(None)} and all(rows.keys)))
        and set(map(type, rows.sids)) == {list}
        and set(map(len, rows.sids)) == {num_levels}
        and set(map(type, chain.from_iterable(rows.sids))) == {int}
        and set(map(type, rows.keys)) == {str}
        and set(map(type, rows.titles)) == {str}
        and set(map(type, rows.weights)) <= {int, float}
        and set(map(type, rows.servable)) == {bool}
        and set(map(type, rows.tags)) <= {list, tuple}
        and set(map(type, chain.from_iterable(rows.tags))) <= {str}
        and "" not in chain.from_iterable(rows.tags)
    )


def _distinct(rising: array[int]) -> NDArray[np.int32]:
    """Without repetitions, which are a tag given twice in one row."""
    rows = np.frombuffer(rising, np.int32)
    is_new = np.ones(len(rows), np.bool_)
    is_new[1:] = rows[1:] != rows[:-1]
    return rows if is_new.all() else rows[is_new]


def refuse_unreadable(source: str, error: OSError) -> CatalogError:
    """What the system says about a file that cannot be read on."""
    return CatalogError(f"cannot read {source}: {error.strerror or error}")
