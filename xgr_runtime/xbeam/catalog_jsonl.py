"""Items from a JSONL file: one object a line, checked field by field so that every refusal names its line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.catalog_input import open_regular, parse_json, shown
from xgr_runtime.xbeam.catalog_source import ItemTable, items_from_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_MAX_CODE = int(np.iinfo(np.int32).max)


@dataclass
class _Columns:
    """JSONL rows under construction."""

    sids: list[list[int]] = field(default_factory=list)
    ids: list[int | None] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    servable: list[bool] = field(default_factory=list)
    tags: dict[str, list[int]] = field(default_factory=dict)


def items_from_jsonl(
    path: str | Path, num_levels: int, *, sid_field: str, id_field: str
) -> ItemTable:
    """Reads one item a line (see `build_catalog_from_jsonl`). Raises CatalogError naming the line."""
    source = str(path)
    columns = _Columns()
    for row, item in enumerate(_read_rows(source)):

        def refuse(text: str, row: int = row) -> NoReturn:
            raise CatalogError(f"{source}, row {row + 1}: {text}")

        _append_row(columns, item, row, sid_field, id_field, refuse)
        if len(columns.sids[-1]) != num_levels:
            refuse(f"a SID of {num_levels} codes expected, got {shown(columns.sids[-1])}")
    has_ids = any(item_id is not None for item_id in columns.ids)
    if has_ids and None in columns.ids:
        row = columns.ids.index(None)
        raise CatalogError(
            f"{source}, row {row + 1}: no {id_field!r}, other rows have one; give it in all or none"
        )
    return items_from_arrays(
        source,
        num_levels,
        sids=columns.sids,
        item_ids=np.array(columns.ids, np.int64) if has_ids else None,
        keys=columns.keys if any(columns.keys) else None,
        titles=columns.titles if any(columns.titles) else None,
        weights=np.array(columns.weights) if any(columns.weights) else None,
        servable=None if all(columns.servable) else np.array(columns.servable),
        tags={name: np.array(rows) for name, rows in columns.tags.items()},
    )


def _read_rows(source: str) -> Iterator[dict[str, Any]]:
    try:
        with open_regular(source, "read") as file:
            for number, line in enumerate(file, 1):
                yield _parse_row(source, number, line)
    except OSError as error:
        raise CatalogError(f"cannot read {source}: {error.strerror or error}") from error


def _parse_row(source: str, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise CatalogError(f"{source}, row {number}: one JSON object expected, {error}") from error
    if not isinstance(row, dict):
        raise CatalogError(f"{source}, row {number}: one JSON object expected, got {line[:80]!r}")
    return row


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _append_row(
    columns: _Columns,
    item: dict[str, Any],
    row: int,
    sid_field: str,
    id_field: str,
    refuse: Callable[[str], NoReturn],
) -> None:
    item_id = _item_id(item, id_field, refuse)
    key, title, tags = item.get("key"), item.get("title"), item.get("tags")
    if key is not None and not (isinstance(key, str) and key):
        refuse(f"'key' must be a string with at least one character, got {shown(key)}")
    if item_id is None and key is None:
        refuse(f"{id_field!r} or 'key' is needed")
    if title is not None and not isinstance(title, str):
        refuse(f"'title' must be a string, got {shown(title)}")
    if tags is not None and not _is_list_of_names(tags):
        refuse(f"'tags' must be a list of names, got {shown(tags)}")
    servable = item.get("servable", True)
    if not isinstance(servable, bool):
        refuse(f"'servable' must be true or false, got {shown(servable)}")
    columns.sids.append(_sid(item, sid_field, refuse))
    columns.ids.append(item_id)
    columns.keys.append(key)
    columns.titles.append(title or "")
    columns.weights.append(_weight(item.get("weight"), refuse))
    columns.servable.append(servable)
    for tag in tags or ():
        columns.tags.setdefault(tag, []).append(row)


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def _sid(item: dict[str, Any], sid_field: str, refuse: Callable[[str], NoReturn]) -> list[int]:
    sid = item.get(sid_field)
    if not isinstance(sid, list) or not all(map(_is_whole, sid)):
        refuse(f"{sid_field!r} must be a list of codes, got {shown(sid)}")
    if not all(0 <= code <= _MAX_CODE for code in sid):
        refuse(f"codes must be in [0, 2^31), got {shown(sid)}")
    return sid


def _item_id(item: dict[str, Any], id_field: str, refuse: Callable[[str], NoReturn]) -> int | None:
    item_id = item.get(id_field)
    if item_id is None and id_field == "item_id":
        item_id = item.get("id")
    if item_id is None:
        return None
    if not (_is_whole(item_id) and -(1 << 63) <= item_id < 1 << 63):
        refuse(f"{id_field!r} must be an int64, got {shown(item_id)}")
    return int(item_id)


def _weight(value: object, refuse: Callable[[str], NoReturn]) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(f"'weight' must be a number, got {shown(value)}")
    try:
        weight = float(value)
    except OverflowError:
        weight = math.inf
    if not math.isfinite(weight):
        refuse(f"'weight' must be finite, got {shown(value)}")
    return weight
