"""The same items written as JSONL, CSV and NPZ, by means that share nothing with the readers."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NUM_CODES = (4, 3)
TOKENS: dict[str, Any] = {"num_codes": list(NUM_CODES), "token_offsets": [10, 14]}


@dataclass(frozen=True)
class Row:
    """One item; item_id is None in all rows of a source or in none."""

    item_id: int | None
    sid: tuple[int, ...]
    key: str = ""
    title: str = ""
    weight: float = 0.0
    servable: bool = True
    tags: tuple[str, ...] = ()


def write_jsonl(path: Path, rows: Sequence[Row]) -> Path:
    lines = []
    for row in rows:
        item: dict[str, Any] = {"sid": list(row.sid), "title": row.title, "weight": row.weight}
        item |= {"servable": row.servable, "tags": list(row.tags)}
        item |= {} if row.item_id is None else {"item_id": row.item_id}
        item |= {"key": row.key} if row.key else {}
        lines.append(json.dumps(item, ensure_ascii=False))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return path


def csv_text(rows: Sequence[Row], *, one_sid_field: bool, end: str, quote_all: bool) -> str:
    """A header and a row an item."""
    out = io.StringIO()
    quoting: Any = csv.QUOTE_ALL if quote_all else csv.QUOTE_MINIMAL
    writer = csv.writer(out, lineterminator=end, quoting=quoting)
    sid_names = ["sid"] if one_sid_field else [f"sid_{i}" for i in range(len(NUM_CODES))]
    writer.writerow(["title", "item_id", *sid_names, "key", "tags", "servable", "weight"])
    for row in rows:
        codes = [" ".join(map(str, row.sid))] if one_sid_field else list(row.sid)
        item_id = "" if row.item_id is None else row.item_id
        flag = str(row.servable).lower()
        weight = repr(row.weight)
        writer.writerow([row.title, item_id, *codes, row.key, "|".join(row.tags), flag, weight])
    return out.getvalue()


def write_csv(path: Path, rows: Sequence[Row], *, has_mark: bool = False, **how: Any) -> Path:
    text = csv_text(rows, **{"one_sid_field": True, "end": "\r\n", "quote_all": False, **how})
    path.write_bytes(b"\xef\xbb\xbf" * has_mark + text.encode())
    return path


def arrays_of(rows: Sequence[Row]) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of an NPZ file, tags as rows of compressed lists."""
    names = sorted({tag for row in rows for tag in row.tags}, reverse=True)
    lists = [[names.index(tag) for tag in row.tags] for row in rows]
    arrays = {
        "sids": np.array([row.sid for row in rows], np.int16),
        "keys": np.array([row.key.encode() for row in rows], np.bytes_),
        "titles": np.array([row.title for row in rows], np.str_),
        "weights": np.array([row.weight for row in rows]),
        "servable": np.array([row.servable for row in rows]),
        "tag_names": np.array(names, np.str_),
        "tag_offsets": np.cumsum([0, *map(len, lists)]).astype(np.int32),
        "tag_indices": np.array([tag for tags in lists for tag in tags], np.int64),
    }
    if rows[0].item_id is not None:
        arrays["item_ids"] = np.array([row.item_id for row in rows], np.int64)
    return arrays


def write_npz(path: Path, rows: Sequence[Row], *, is_compressed: bool = False) -> Path:
    arrays: Any = arrays_of(rows)
    (np.savez_compressed if is_compressed else np.savez)(path, **arrays)
    return path


# numpy drops NUL characters at the end of a text, CSV cannot hold any, and a tag in CSV cannot hold its separator.
_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
_TAG = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="|"),
    min_size=1,
    max_size=4,
)
_ROW = st.builds(
    Row,
    st.integers(-(2**63), 2**63 - 1),
    st.tuples(*(st.integers(0, size - 1) for size in NUM_CODES)),
    _TEXT,
    _TEXT,
    st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, 1.0]),
    st.booleans(),
    st.lists(_TAG, max_size=3).map(tuple),
)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Any few items that all three formats can say, at least one of them servable; with ids, or with keys alone."""
    found = draw(st.lists(_ROW, min_size=1, max_size=6, unique_by=lambda row: row.item_id))
    has_ids = draw(st.booleans())
    seen: set[str] = set()
    result = []
    for number, row in enumerate(found):
        key = row.key if row.key not in seen else ""
        if not has_ids and not key:
            key = f"key {number}"
        seen.add(key)
        servable = row.servable or number == 0
        item_id = row.item_id if has_ids else None
        result.append(Row(item_id, row.sid, key, row.title, row.weight, servable, row.tags))
    return result
