"""What a catalogue is built from: checked columns of items, in row order.

Every refusal names the row, counted from 1 (in a JSONL file: the line), and the value. Checks over whole columns run in
numpy; the row is looked for only once something is known to be wrong, so a good input pays nothing for the messages.

Text is packed as it comes in: a Python string an item would cost several times its bytes. Row numbers of tags are int32,
which holds every row there can be.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from xgr_runtime.errors import CatalogError, shown
from xgr_runtime.xbeam.catalog_input import as_array
from xgr_runtime.xbeam.catalog_text import StringBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import ArrayLike, NDArray

    from xgr_runtime.xbeam.catalog_text import Strings

MAX_ITEMS = int(np.iinfo(np.int32).max)
MAX_KEY_BYTES = 4096
MAX_TAG_BYTES = 4096
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class ItemTable:
    """Checked items in row order; optional columns are None.

    tags: name -> sorted row numbers, names sorted. lines: where each row starts in a file whose rows are not its lines.
    """

    source: str
    sids: NDArray[Any]
    item_ids: NDArray[np.int64]
    keys: Strings | None
    titles: Strings | None
    weights: NDArray[np.float64] | None
    servable: NDArray[np.bool_] | None
    tags: dict[str, NDArray[np.int32]]
    lines: NDArray[np.int64] | None = None

    def refuse(self, row: int, text: str) -> NoReturn:
        """Raises the CatalogError about row `row` (counted from 0 here, from 1 in the message)."""
        line = None if self.lines is None else int(self.lines[row])
        raise row_error(self.source, row, text, line)


def row_error(source: str, row: int, text: str, line: int | None = None) -> CatalogError:
    """The refusal of row `row`, counted from 0 here and from 1 in the message; `line` where it is another number."""
    at = "" if line is None else f" (line {line})"
    return CatalogError(f"{source}, row {row + 1}{at}: {text}")


def check_size(source: str, num_rows: int) -> None:
    """Raises CatalogError for no items at all or too many."""
    if num_rows == 0:
        raise CatalogError(f"{source}: the catalogue is empty; at least one item is needed")
    if num_rows > MAX_ITEMS:
        raise CatalogError(f"{source}: at most 2^31 - 1 items are supported, got {num_rows}")


def items_from_arrays(
    source: str,
    num_levels: int,
    *,
    sids: ArrayLike,
    item_ids: ArrayLike | None,
    keys: Iterable[str | None] | None,
    titles: Iterable[str] | None,
    weights: ArrayLike | None,
    servable: ArrayLike | None,
    tags: Mapping[str, ArrayLike] | Sequence[Sequence[str]] | None,
) -> ItemTable:
    """Checks types, shapes and uniqueness of columns (see `build_catalog`); codes are checked by the builder."""
    codes = _sid_array(source, num_levels, sids)
    num_rows = len(codes)
    check_size(source, num_rows)
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
    return ItemTable(
        source,
        codes,
        ids,
        _pack(source, "keys", keys, num_rows, encode_key),
        _pack(source, "titles", titles, num_rows, encode_title),
        numbers,
        flags,
        _tag_rows(source, tags, num_rows),
    )


def _pack(
    source: str,
    name: str,
    texts: Iterable[object] | None,
    num_rows: int,
    encode: Callable[[object], bytes],
) -> Strings | None:
    """Texts packed one by one, so that of a generator no more than one is in memory."""
    if texts is None:
        return None
    builder = StringBuilder()
    for row, text in enumerate(texts):
        try:
            builder.append(encode(text))
        except ValueError as error:
            raise row_error(source, row, str(error)) from error
    num_texts = len(builder.lengths)
    if num_texts != num_rows:
        raise CatalogError(f"{source}: {name} has {num_texts} entries, there are {num_rows} items")
    return builder.strings()


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


def encode_text(name: str, text: object) -> bytes:
    """UTF-8 of a text that is called `name` in the message of the ValueError that something else raises."""
    if not isinstance(text, str):
        raise ValueError(f"the {name} must be a string, got {shown(text)}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the {name} is not valid text: {shown(text)}") from error


def encode_title(title: object) -> bytes:
    """UTF-8 of a title; raises ValueError."""
    return encode_text("title", title)


def encode_key(key: object) -> bytes:
    """UTF-8 of a key, empty for None; raises ValueError."""
    encoded = b"" if key is None else encode_text("key", key)
    if len(encoded) > MAX_KEY_BYTES:
        raise ValueError(
            f"a key has at most {MAX_KEY_BYTES} bytes in UTF-8, got {len(encoded)}: {shown(key)}"
        )
    return encoded


def check_tag(name: object) -> None:
    """Raises ValueError for what cannot be the name of a tag."""
    encoded = encode_text("tag", name)
    if len(encoded) > MAX_TAG_BYTES:
        raise ValueError(
            f"a tag has at most {MAX_TAG_BYTES} bytes in UTF-8, got {len(encoded)}: {shown(name)}"
        )
    if _CONTROL.search(encoded.decode()):
        raise ValueError(f"a tag must not contain control characters, got {shown(name)}")


def _tag_rows(
    source: str, tags: Mapping[str, ArrayLike] | Sequence[Sequence[str]] | None, num_rows: int
) -> dict[str, NDArray[np.int32]]:
    result: dict[str, NDArray[np.int32]] = {}
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
        try:
            check_tag(name)
        except ValueError as error:
            raise row_error(source, int(rows[0]) if len(rows) else 0, str(error)) from error
        result[name] = rows.astype(np.int32)
    return result
