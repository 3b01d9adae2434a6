"""Items from a JSONL file: one object a line, checked field by field so that every refusal names its line.

A million lines are read in a few seconds, so the usual case of a row runs through no call it does not need: what has the
right type is taken as it is, and only what has not is looked at again for the message.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from xgr_runtime.xbeam.catalog_columns import ItemColumns, refuse_unreadable
from xgr_runtime.xbeam.catalog_input import open_regular, parse_flat_object, shown
from xgr_runtime.xbeam.catalog_source import row_error

if TYPE_CHECKING:
    from pathlib import Path

    from xgr_runtime.xbeam.catalog_source import ItemTable

MAX_LINE_BYTES = 1 << 24


def items_from_jsonl(
    path: str | Path, num_levels: int, *, sid_field: str, id_field: str
) -> ItemTable:
    """Reads one item a line (see `build_catalog_from_jsonl`). Raises CatalogError naming the line."""
    source = str(path)
    columns = ItemColumns(source, num_levels, id_field)
    try:
        with open_regular(source, "read") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                try:
                    item = _parse(line)
                    _add(columns, item, sid_field, id_field)
                except ValueError as error:
                    raise row_error(source, columns.num_rows, str(error)) from error
    except OSError as error:
        raise refuse_unreadable(source, error) from error
    return columns.table()


def _parse(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"a line has at most {MAX_LINE_BYTES} bytes, this one has more")
    try:
        item = parse_flat_object(line)
    except ValueError as error:
        raise ValueError(f"one JSON object expected, {error}") from error
    if not isinstance(item, dict):
        raise ValueError(f"one JSON object expected, got {line[:80]!r}")
    return item


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
