"""What a catalogue is built from: checked columns of items, in row order.

Every refusal names the row, counted from 1 (in a JSONL file: the line), and the value. Checks over whole columns run in
numpy; the row is looked for only once something is known to be wrong, so a good input pays nothing for the messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.catalog_input import as_array, shown

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

MAX_ITEMS = int(np.iinfo(np.int32).max)
MAX_KEY_BYTES = 4096
MAX_TAG_BYTES = 4096
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class ItemTable:
    """Checked items in row order; `tags` maps a name to sorted row numbers, optional columns are None."""

    source: str
    sids: NDArray[Any]
    item_ids: NDArray[np.int64]
    keys: list[bytes] | None
    titles: list[bytes] | None
    weights: NDArray[np.float64] | None
    servable: NDArray[np.bool_] | None
    tags: dict[str, NDArray[np.int64]]

    def refuse(self, row: int, text: str) -> NoReturn:
        """Raises the CatalogError about row `row` (counted from 0 here, from 1 in the message)."""
        raise CatalogError(f"{self.source}, row {row + 1}: {text}")


def items_from_arrays(
    source: str,
    num_levels: int,
    *,
    sids: ArrayLike,
    item_ids: ArrayLike | None,
    keys: Sequence[str | None] | None,
    titles: Sequence[str] | None,
    weights: ArrayLike | None,
    servable: ArrayLike | None,
    tags: Mapping[str, ArrayLike] | Sequence[Sequence[str]] | None,
) -> ItemTable:
    """Checks types, shapes and uniqueness of columns (see `build_catalog`); codes are checked by the builder."""
    codes = _sid_array(source, num_levels, sids)
    num_rows = len(codes)
    if num_rows == 0:
        raise CatalogError(f"{source}: the catalogue is empty; at least one item is needed")
    if num_rows > MAX_ITEMS:
        raise CatalogError(f"{source}: at most 2^31 - 1 items are supported, got {num_rows}")
    if item_ids is None:
        ids = np.arange(num_rows, dtype=np.int64)
    else:
        ids = _column(source, "item_ids", item_ids, num_rows, "iu", np.int64)
    numbers = (
        None
        if weights is None
        else _column(source, "weights", weights, num_rows, "iuf", np.float64)
    )
    flags = (
        None if servable is None else _column(source, "servable", servable, num_rows, "b", np.bool_)
    )
    if numbers is not None and not np.isfinite(numbers).all():
        row = int(np.isfinite(numbers).argmin())
        raise CatalogError(
            f"{source}, row {row + 1}: the weight must be finite, got {numbers[row]}"
        )
    for name, texts in (("keys", keys), ("titles", titles)):
        if texts is not None and len(texts) != num_rows:
            raise CatalogError(
                f"{source}: {name} has {len(texts)} entries, there are {num_rows} items"
            )
    table = ItemTable(
        source,
        codes,
        ids,
        None if keys is None else [_key(source, row, key) for row, key in enumerate(keys)],
        None
        if titles is None
        else [_text(source, row, "title", text) for row, text in enumerate(titles)],
        numbers,
        flags,
        _tag_rows(source, tags, num_rows),
    )
    if table.keys is not None:
        _refuse_repeated_keys(table, table.keys)
    return table


def _sid_array(source: str, num_levels: int, sids: ArrayLike) -> NDArray[Any]:
    if isinstance(sids, np.ndarray):
        codes = sids
    else:
        rows: Any = sids
        for row, sid in enumerate(rows):
            if not isinstance(sid, (Sequence, np.ndarray)) or len(sid) != num_levels:
                raise CatalogError(
                    f"{source}, row {row + 1}: a SID of {num_levels} codes expected, got {shown(sid)}"
                )
        codes = as_array(f"{source}: sids", rows if len(rows) else np.empty((0, num_levels), int))
        if codes.dtype.kind not in "iu":
            _refuse_odd_code(source, rows)
    if codes.ndim != 2 or codes.shape[1] != num_levels or codes.dtype.kind not in "iu":
        raise CatalogError(
            f"{source}: sids must be whole numbers [items, {num_levels} levels], "
            f"got shape {codes.shape} of {codes.dtype}"
        )
    return codes


def _refuse_odd_code(source: str, rows: Any) -> None:
    for row, sid in enumerate(rows):
        for code in sid:
            is_whole = isinstance(code, (int, np.integer)) and not isinstance(code, bool)
            if not is_whole or not 0 <= code <= MAX_ITEMS:
                raise CatalogError(
                    f"{source}, row {row + 1}: codes must be whole numbers in [0, 2^31), got {shown(code)}"
                )


def _column(
    source: str, name: str, values: ArrayLike, num_rows: int, kinds: str, dtype: type
) -> NDArray[Any]:
    column = as_array(f"{source}: {name}", values)
    if column.shape != (num_rows,) or column.dtype.kind not in kinds:
        raise CatalogError(
            f"{source}: {name} must be {num_rows} values of {np.dtype(dtype)}, "
            f"got shape {column.shape} of {column.dtype}"
        )
    if (
        column.dtype == np.uint64
        and np.dtype(dtype) == np.int64
        and int(column.max()) > np.iinfo(np.int64).max
    ):
        row = int(column.argmax())
        raise CatalogError(f"{source}, row {row + 1}: {name} must be int64, got {column[row]}")
    return np.ascontiguousarray(column, dtype)


def _text(source: str, row: int, name: str, text: object) -> bytes:
    if not isinstance(text, str):
        raise CatalogError(
            f"{source}, row {row + 1}: the {name} must be a string, got {shown(text)}"
        )
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise CatalogError(
            f"{source}, row {row + 1}: the {name} is not valid text: {shown(text)}"
        ) from error


def _tag_rows(
    source: str, tags: Mapping[str, ArrayLike] | Sequence[Sequence[str]] | None, num_rows: int
) -> dict[str, NDArray[np.int64]]:
    result: dict[str, NDArray[np.int64]] = {}
    if tags is None:
        return result
    collected: dict[str, Any] = {}
    if isinstance(tags, Mapping):
        collected = dict(tags)
    else:
        if len(tags) != num_rows:
            raise CatalogError(
                f"{source}: tags has {len(tags)} entries, there are {num_rows} items"
            )
        for row, names in enumerate(tags):
            for name in names:
                collected.setdefault(name, []).append(row)
    for name in sorted(collected, key=str):
        given = as_array(f"{source}: the rows of tag {shown(name)}", collected[name])
        is_whole = given.ndim == 1 and (given.dtype.kind in "iu" or not len(given))
        rows = np.unique(given) if is_whole else given
        if not name or not is_whole or (len(rows) and not 0 <= rows[0] <= rows[-1] < num_rows):
            raise CatalogError(
                f"{source}: tag {shown(name)} needs a name and row numbers in [0, {num_rows})"
            )
        rows = rows.astype(np.int64)
        _check_tag(source, int(rows[0]) if len(rows) else 0, name)
        result[name] = rows
    return result


def _check_tag(source: str, row: int, name: str) -> None:
    encoded = _text(source, row, "tag", name)
    if len(encoded) > MAX_TAG_BYTES:
        raise CatalogError(
            f"{source}, row {row + 1}: a tag has at most {MAX_TAG_BYTES} bytes in UTF-8, "
            f"got {len(encoded)}: {shown(name)}"
        )
    if _CONTROL.search(name):
        raise CatalogError(
            f"{source}, row {row + 1}: a tag must not contain control characters, got {shown(name)}"
        )


def _key(source: str, row: int, key: str | None) -> bytes:
    encoded = b"" if key is None else _text(source, row, "key", key)
    if len(encoded) > MAX_KEY_BYTES:
        raise CatalogError(
            f"{source}, row {row + 1}: a key has at most {MAX_KEY_BYTES} bytes in UTF-8, "
            f"got {len(encoded)}: {shown(key)}"
        )
    return encoded


def _refuse_repeated_keys(table: ItemTable, keys: list[bytes]) -> None:
    first: dict[bytes, int] = {}
    for row, key in enumerate(keys):
        if key and first.setdefault(key, row) != row:
            table.refuse(row, f"key {shown(key.decode())} is already that of row {first[key] + 1}")
