"""Requests and results as JSON for the command line: one object a line, the field names of the frozen types.

Unknown fields and wrong types are refused by path, because a misspelt rule that is ignored recommends what was forbidden.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from xgr_runtime.errors import shown
from xgr_runtime.service.wire_arrays import Violations, is_unicode
from xgr_runtime.types import RecRequest, RecResult, Rules, Search, SearchResult

Reader: TypeAlias = Callable[[Any, str, Violations], Any]


def request_from_json(data: Any, default_search: Search) -> RecRequest:
    """A RecRequest from a JSON object; without "searches" it gets `default_search`. Raises InvalidRequest."""
    found = Violations()
    values = _read_object(data, "", REQUEST, found)
    values.setdefault("searches", (default_search,))
    found.raise_if_any()
    return RecRequest(**values)


def result_to_json(result: RecResult) -> dict[str, Any]:
    """A result as plain data; the items of each search are rows here, for people and line tools."""
    plain = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    return {
        **plain,
        "results": [_search_result_to_json(search) for search in result.results],
        "timings": dataclasses.asdict(result.timings),
    }


def _search_result_to_json(result: SearchResult) -> dict[str, Any]:
    columns = ("item_ids", "keys", "sids", "scores", "level_scores")
    plain = {
        f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name not in columns
    }
    items = []
    for i in range(result.num_items):
        item: dict[str, Any] = {"item_id": int(result.item_ids[i])}
        if result.keys is not None:
            item["key"] = result.keys[i]
        item |= {"sid": result.sids[i].tolist(), "score": float(result.scores[i])}
        if result.level_scores is not None:
            item["level_scores"] = result.level_scores[i].tolist()
        items.append(item)
    return {**plain, "items": items}


def _read_object(
    data: Any, path: str, readers: Mapping[str, Reader], found: Violations
) -> dict[str, Any]:
    if not isinstance(data, dict):
        found.add(path or "request", f"must be an object, got {shown(data)}")
        return {}
    values = {}
    for name, value in data.items():
        label = name if name.isidentifier() and len(name) <= 64 else shown(name)
        field = f"{path}.{label}" if path else label
        if name not in readers:
            found.add(field, f"is not a field; known: {', '.join(readers)}")
        elif value is not None:
            values[name] = readers[name](value, field, found)
    return values


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(name: str, accepts: Callable[[Any], bool], default: Any) -> Reader:
    def read(value: Any, field: str, found: Violations) -> Any:
        if accepts(value):
            return value
        found.add(field, f"must be {name}, got {shown(value)}")
        return default

    return read


def _list(reader: Reader) -> Reader:
    def read(value: Any, field: str, found: Violations) -> Any:
        if not isinstance(value, list):
            found.add(field, f"must be a list, got {shown(value)}")
            return ()
        return tuple(reader(element, f"{field}[{i}]", found) for i, element in enumerate(value))

    return read


def _ids(value: Any, field: str, found: Violations) -> Any:
    ids = _list(_INT64)(value, field, found)
    return np.array(ids, dtype=np.int64)


def _sids(value: Any, field: str, found: Violations) -> Any:
    rows = _list(_list(_UINT32))(value, field, found)
    if len({len(row) for row in rows}) > 1:
        found.add(field, "must be rows of the same number of codes")
        return None
    return np.array(rows, dtype=np.uint32).reshape(len(rows), len(rows[0]) if rows else 0)


def _rules(value: Any, field: str, found: Violations) -> Any:
    return Rules(**_read_object(value, field, RULES, found))


def _search(value: Any, field: str, found: Violations) -> Any:
    return Search(**_read_object(value, field, SEARCH, found))


_STRING = _kind(
    "a string of Unicode characters", lambda v: isinstance(v, str) and is_unicode(v), ""
)
_BOOL = _kind("true or false", lambda value: isinstance(value, bool), False)
_INT = _kind("a whole number", _is_int, 1)
_INT64 = _kind("a 64-bit whole number", lambda v: _is_int(v) and -(2**63) <= v < 2**63, 0)
_UINT32 = _kind("a code in [0, 2^32)", lambda v: _is_int(v) and 0 <= v < 2**32, 0)

RULES: Mapping[str, Reader] = {
    "require": _list(_list(_STRING)),
    "exclude_tags": _list(_STRING),
    "exclude_item_ids": _ids,
    "exclude_keys": _list(_STRING),
    "exclude_history": _BOOL,
}
SEARCH: Mapping[str, Reader] = {
    "catalog": _STRING,
    "catalog_version": _STRING,
    "beam_width": _INT,
    "beam_widths": _list(_INT),
    "num_results": _INT,
    "normalization": _STRING,
    "rules": _rules,
    "max_items_per_sid": _INT,
    "return_level_scores": _BOOL,
}
REQUEST: Mapping[str, Reader] = {
    "request_id": _STRING,
    "history_item_ids": _ids,
    "history_keys": _list(_STRING),
    "history_sids": _sids,
    "prompt_token_ids": _ids,
    "searches": _list(_search),
    "on_overflow": _STRING,
    "on_unknown": _STRING,
}
