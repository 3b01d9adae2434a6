"""Items from a JSONL file: one object a line, checked field by field so that every refusal names its line.

A million lines are read in a few seconds: rows are parsed one by one, then checked and kept some hundred at a time, column
by column. Only where something in such a chunk is unusual is each of its rows looked at alone, for the message.

Fields of other programs are ignored, but not those that are a slip of the pen: `servabel: false` must not end in the
recommendation of an item that was delisted.
"""

from __future__ import annotations

import difflib
import math
from typing import TYPE_CHECKING, Any

from xgr_runtime.errors import CatalogError, shown
from xgr_runtime.files import open_regular
from xgr_runtime.xbeam.catalog_columns import ItemColumns, Rows, refuse_unreadable
from xgr_runtime.xbeam.catalog_input import MAX_LINE_BYTES, check_line, parse_flat_object
from xgr_runtime.xbeam.catalog_source import row_error

if TYPE_CHECKING:
    from pathlib import Path

    from xgr_runtime.xbeam.catalog_source import ItemTable

_FIELDS = ("id", "key", "title", "weight", "tags", "servable")
_SLIP = 0.85  # likeness of two names: "tag" and "servabel" are slips, "height" and "subtitle" other fields
_MAX_FIELDS = 1000  # names a file may have before nobody compares them any more
_CHUNK_ROWS = 1024
_CHUNK_BYTES = 1 << 22


def items_from_jsonl(
    path: str | Path, num_levels: int, *, sid_field: str, id_field: str
) -> ItemTable:
    """Reads one item a line (see `build_catalog_from_jsonl`). Raises CatalogError naming the line."""
    source = str(path)
    columns = ItemColumns(source, num_levels, id_field)
    known = {sid_field, id_field, *_FIELDS}
    chunk: list[dict[str, Any]] = []
    num_bytes = 0
    try:
        with open_regular(source, "read", CatalogError) as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                try:
                    chunk.append(_parse(line))
                except ValueError as error:
                    _add_chunk(columns, chunk, sid_field, id_field)  # may find an earlier fault
                    raise row_error(source, columns.num_rows, str(error)) from error
                num_bytes += len(line)
                if len(chunk) == _CHUNK_ROWS or num_bytes > _CHUNK_BYTES:
                    slip = _find_slip(chunk, known, (sid_field, id_field, *_FIELDS))
                    _add_chunk(columns, chunk, sid_field, id_field)
                    _refuse_slip(columns, slip)
                    num_bytes = 0
        slip = _find_slip(chunk, known, (sid_field, id_field, *_FIELDS))
        _add_chunk(columns, chunk, sid_field, id_field)
        _refuse_slip(columns, slip)
    except OSError as error:
        raise refuse_unreadable(source, error) from error
    return columns.table()


def _find_slip(
    chunk: list[dict[str, Any]], known: set[str], fields: tuple[str, ...]
) -> tuple[int, str] | None:
    """How many rows before the chunk's end a field is nearly one of `fields`, and a message; `known` learns the others."""
    if len(known) > _MAX_FIELDS:
        return None
    for name in sorted(set[str]().union(*chunk) - known):
        lower = name.lower()
        close = [field for field in fields if sorted(field) == sorted(lower)]  # letters swapped
        close += difflib.get_close_matches(lower, fields, n=1, cutoff=_SLIP)
        if close:
            row = next(number for number, item in enumerate(chunk) if name in item)
            return len(chunk) - row, f"unknown field {shown(name)}; did you mean {close[0]!r}?"
        known.add(name)
    return None


def _refuse_slip(columns: ItemColumns, slip: tuple[int, str] | None) -> None:
    if slip is not None:
        raise row_error(columns.source, columns.num_rows - slip[0], slip[1])


def _parse(line: bytes) -> dict[str, Any]:
    check_line(line)
    try:
        item = parse_flat_object(line)
    except ValueError as error:
        raise ValueError(f"one JSON object expected, this {error}") from error
    if not isinstance(item, dict):
        raise ValueError(f"one JSON object expected, got {line[:80]!r}")
    return item


def _add_chunk(
    columns: ItemColumns, chunk: list[dict[str, Any]], sid_field: str, id_field: str
) -> None:
    """Adds the rows and empties the chunk. Raises CatalogError naming the first row that is wrong."""
    if not chunk:
        return
    item_ids = [item.get(id_field) for item in chunk]
    if id_field == "item_id" and item_ids.count(None) == len(chunk):
        item_ids = [item.get("id") for item in chunk]
    rows = Rows(
        item_ids,
        [item.get(sid_field) for item in chunk],
        ["" if (key := item.get("key")) is None else key or None for item in chunk],
        ["" if (title := item.get("title")) is None else title for item in chunk],
        [item.get("weight", 0.0) for item in chunk],
        [item.get("servable", True) for item in chunk],
        [() if (tags := item.get("tags")) is None else tags for item in chunk],
    )
    if not columns.add_plain(rows):
        for item in chunk:
            try:
                _add(columns, item, sid_field, id_field)
            except ValueError as error:
                raise row_error(columns.source, columns.num_rows, str(error)) from error
    chunk.clear()


def _add(columns: ItemColumns, item: dict[str, Any], sid_field: str, id_field: str) -> None:
    """Adds a row after checking the type of every value; raises ValueError."""
    get = item.get
    item_id = get(id_field)
    if item_id is None and id_field == "item_id":
        item_id = get("id")
    if item_id is not None and type(item_id) is not int:
        raise ValueError(f"{id_field!r} must be an int64, got {shown(item_id)}")
    key, title, tags = get("key"), get("title"), get("tags")
    if key is not None and not (type(key) is str and key):
        raise ValueError(f"'key' must be a string with at least one character, got {shown(key)}")
    if title is not None and type(title) is not str:
        raise ValueError(f"'title' must be a string, got {shown(title)}")
    if tags is None:
        tags = ()
    elif type(tags) is not list or not all(type(name) is str and name for name in tags):
        raise ValueError(f"'tags' must be a list of names, got {shown(tags)}")
    servable = get("servable", True)
    if type(servable) is not bool:
        raise ValueError(f"'servable' must be true or false, got {shown(servable)}")
    sid = get(sid_field)
    if type(sid) is not list or not all(type(code) is int for code in sid):
        raise ValueError(f"{sid_field!r} must be a list of codes, got {shown(sid)}")
    weight = get("weight", 0.0)
    if type(weight) is not float:
        weight = _weight(weight)
    columns.add(item_id, sid, key, title, weight, servable, tags)


def _weight(value: object) -> float:
    if value is None:
        return 0.0
    if type(value) is not int:
        raise ValueError(f"'weight' must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf
