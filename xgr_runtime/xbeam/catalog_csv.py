"""Items from a CSV file with a header: RFC 4180 quoting, UTF-8 with or without a byte order mark, LF or CRLF.

A value that a spreadsheet changed on the way (1E+05 for an id, 3.0 for a code, a column moved) must not become another
item, so every number has one way to be written and an unknown column is an error, not ignored. Rows are items, counted
from 1 behind the header; messages name the line beside the row, because quoted text may span lines.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from xgr_runtime.errors import CatalogError, shown
from xgr_runtime.files import open_regular
from xgr_runtime.xbeam.catalog_columns import ItemColumns, refuse_unreadable
from xgr_runtime.xbeam.catalog_input import MAX_LINE_BYTES, check_line
from xgr_runtime.xbeam.catalog_source import row_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from xgr_runtime.xbeam.catalog_source import ItemTable

TAG_SEPARATOR = "|"
_OPTIONAL = ("key", "title", "weight", "tags", "servable")
_FLAGS = {"": True, "true": True, "1": True, "false": False, "0": False}
_INTEGER = re.compile("-?(?:0|[1-9][0-9]{0,18})")
_CODE = re.compile("0|[1-9][0-9]{0,9}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_ABSENT = -1


@dataclass(frozen=True)
class _Layout:
    """At which field of a row each column is, -1 = absent; `sid` has one field, or one a level."""

    num_fields: int
    sid: tuple[int, ...]
    item_id: int
    key: int
    title: int
    weight: int
    tags: int
    servable: int


def items_from_csv(
    path: str | Path, num_levels: int, *, sid_field: str, id_field: str
) -> ItemTable:
    """Reads one item a row (see `build_catalog_from_file`). Raises CatalogError naming row and line."""
    source = str(path)
    columns = ItemColumns(source, num_levels, id_field)
    try:
        with open_regular(source, "read", CatalogError) as file:
            rows = csv.reader(_lines(file), strict=True)
            layout = _read_header(source, rows, num_levels, sid_field, id_field)
            while True:
                line = rows.line_num + 1
                try:
                    fields = next(rows, None)
                    if fields is None:
                        break
                    _add(columns, fields, layout, id_field)
                except (ValueError, csv.Error) as error:
                    raise row_error(source, columns.num_rows, str(error), line) from error
                columns.note_line(line)
    except OSError as error:
        raise refuse_unreadable(source, error) from error
    return columns.table()


def _lines(file: BinaryIO) -> Iterator[str]:
    """Lines with their ends, so that line ends inside quotes stay what they were."""
    is_first = True
    while line := file.readline(MAX_LINE_BYTES + 1):
        check_line(line)
        if is_first and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError("it is UTF-16; save the file as UTF-8")
        text = line.decode("utf-8-sig" if is_first else "utf-8")
        if "\0" in text:
            raise ValueError("a NUL character cannot be part of a CSV file")
        is_first = False
        yield text


def _read_header(
    source: str, rows: Iterator[list[str]], num_levels: int, sid_field: str, id_field: str
) -> _Layout:
    try:
        names = next(rows, [])
    except (ValueError, csv.Error) as error:
        raise CatalogError(f"{source}, header (line 1): {error}") from error
    try:
        return _layout(names, num_levels, sid_field, id_field)
    except ValueError as error:
        raise CatalogError(f"{source}, header (line 1): {error}") from error


def _layout(names: list[str], num_levels: int, sid_field: str, id_field: str) -> _Layout:
    """Which column is where; raises ValueError for a header that cannot be right."""
    one_a_level = [f"{sid_field}_{level}" for level in range(num_levels)]
    known = [id_field, *_OPTIONAL, sid_field, *one_a_level]
    if id_field == "item_id":
        known.append("id")
    if not names:
        raise ValueError(f"the names of the columns expected, such as {id_field},{sid_field}")
    for name in names:
        if name not in known:
            raise ValueError(_unknown(name, known))
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the column {shown(repeated)} is there twice")
    place = {name: number for number, name in enumerate(names)}
    if "id" in place and id_field in place and id_field != "id":
        raise ValueError(f"give {id_field!r} or 'id', not both")
    sid = tuple(place[name] for name in one_a_level if name in place)
    if sid and (len(sid) < num_levels or sid_field in place):
        raise ValueError(
            f"the SID is either one column {sid_field!r} or the {num_levels} columns {', '.join(one_a_level)}"
        )
    if not sid and sid_field not in place:
        raise ValueError(
            f"a column {sid_field!r} or the columns {', '.join(one_a_level)} are needed, got {shown(names)}"
        )
    item_id = place.get(id_field, place.get("id", _ABSENT))
    if item_id == _ABSENT and "key" not in place:
        raise ValueError(f"a column {id_field!r} or 'key' is needed, got {shown(names)}")
    optional = (place.get(name, _ABSENT) for name in _OPTIONAL)
    key, title, weight, tags, servable = optional
    return _Layout(
        len(names), sid or (place[sid_field],), item_id, key, title, weight, tags, servable
    )


def _unknown(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name[:80].strip().lower(), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
    if ";" in name or "\t" in name:
        hint = "columns are separated by commas"
    return f"unknown column {shown(name)}; {hint}"


def _add(columns: ItemColumns, fields: list[str], layout: _Layout, id_field: str) -> None:
    """Adds a row after reading every value; raises ValueError."""
    if len(fields) != layout.num_fields:
        got = f"{len(fields)}: {shown(fields)}" if fields else "an empty line"
        raise ValueError(f"{layout.num_fields} fields expected, got {got}")
    fields.append("")  # what an absent column, at -1, holds
    columns.add(
        _item_id(fields[layout.item_id], id_field),
        _sid(fields, layout.sid),
        fields[layout.key] or None,
        fields[layout.title],
        _weight(fields[layout.weight]),
        _servable(fields[layout.servable]),
        _tags(fields[layout.tags]),
    )


def _item_id(text: str, id_field: str) -> int | None:
    if not text:
        return None
    if not _INTEGER.fullmatch(text):
        raise ValueError(
            f"{id_field!r} must be an int64 in decimal digits without leading zeros, got {shown(text)}"
        )
    return int(text)


def _sid(fields: list[str], places: tuple[int, ...]) -> list[int]:
    codes = [fields[at] for at in places] if len(places) > 1 else fields[places[0]].split(" ")
    if not all(map(_CODE.fullmatch, codes)):
        raise ValueError(
            f"the SID must be whole numbers from 0, one a column or with a space between, got {shown(codes)}"
        )
    return list(map(int, codes))


def _weight(text: str) -> float:
    if not text:
        return 0.0
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"'weight' must be a number, got {shown(text)}")
    return float(text)


def _servable(text: str) -> bool:
    is_servable = _FLAGS.get(text.lower())
    if is_servable is None:
        raise ValueError(f"'servable' must be true, false, 1, 0 or empty, got {shown(text)}")
    return is_servable


def _tags(text: str) -> Sequence[str]:
    if not text:
        return ()
    names = text.split(TAG_SEPARATOR)
    if not all(names):
        raise ValueError(f"'tags' must be names with {TAG_SEPARATOR} between, got {shown(text)}")
    return names
