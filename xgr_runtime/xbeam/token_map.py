"""The model's token for every code of every level, from full tables, from offsets or from a JSON file.

Semantics live in codes; tokens appear only where the model's vocabulary is met. A table and not an offset, because
vocabularies exist whose tokens were added in string-sorted order and only for codes in use. Ranges of different levels
may overlap; inside one level two codes never share a token, or their scores could not be told apart.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.errors import CatalogError, shown
from xgr_runtime.files import open_regular, parse_json
from xgr_runtime.xbeam.catalog_input import as_array

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

MAX_LEVELS = 8
MAX_CODES = 1 << 24
_MAX_TOKEN = int(np.iinfo(np.int32).max)
_CODE = re.compile(
    "0|[1-9][0-9]{0,9}"
)  # one way to write a code: "01" and other scripts' digits would be a second


def token_tables(
    num_codes: Sequence[int] | None,
    token_of: Sequence[ArrayLike] | None,
    token_offsets: Sequence[int] | None,
) -> tuple[NDArray[np.int32], ...]:
    """The token of every code of every level (int32, -1 = none) from full tables or from an offset a level.

    Raises:
        CatalogError: both or neither form given, lengths that differ, tokens out of range or used twice in a level.
    """
    if (token_of is None) == (token_offsets is None):
        raise CatalogError(
            "give the tokens either as token_of (a table a level) or as token_offsets, not both"
        )
    levels = len(token_of) if token_of is not None else len(token_offsets or ())
    if not 1 <= levels <= MAX_LEVELS:
        raise CatalogError(f"a catalogue has 1 to {MAX_LEVELS} levels, the token map has {levels}")
    if num_codes is not None and len(num_codes) != levels:
        raise CatalogError(f"num_codes names {len(num_codes)} levels, the token map {levels}")
    if token_offsets is not None:
        if num_codes is None:
            raise CatalogError("token_offsets need num_codes, the number of codes of each level")
        tables = [_offset_table(*pair) for pair in zip(token_offsets, num_codes, strict=True)]
    else:
        tables = [as_array(f"token map, level {n}", t) for n, t in enumerate(token_of or ())]
    return tuple(
        _check_table(level, table, num_codes[level] if num_codes is not None else len(table))
        for level, table in enumerate(tables)
    )


def _offset_table(offset: int, num_codes: int) -> NDArray[np.int64]:
    if not (0 <= offset <= _MAX_TOKEN and 1 <= num_codes <= MAX_CODES):
        raise CatalogError(
            f"a token offset in [0, 2^31) and 1 to {MAX_CODES} codes expected, got {shown(offset)} and {shown(num_codes)}"
        )
    return np.arange(offset, offset + num_codes, dtype=np.int64)


def _check_table(level: int, table: NDArray[Any], num_codes: int) -> NDArray[np.int32]:
    at = f"token map, level {level}"
    if (
        table.ndim != 1
        or table.dtype.kind not in "iu"
        or not 1 <= len(table) == num_codes <= MAX_CODES
    ):
        raise CatalogError(
            f"{at}: a list of {num_codes} (1 to {MAX_CODES}) tokens expected, got shape {table.shape} of {table.dtype}"
        )
    if int(table.min()) < -1 or int(table.max()) > _MAX_TOKEN:
        raise CatalogError(
            f"{at}: tokens must be in [0, 2^31) or -1 (none), got {table.min()} to {table.max()}"
        )
    tokens, counts = np.unique(table[table >= 0], return_counts=True)
    if not len(tokens):
        raise CatalogError(f"{at}: no code has a token")
    if int(counts.max()) > 1:
        token = int(tokens[counts.argmax()])
        codes = np.flatnonzero(table == token)[:2].tolist()
        raise CatalogError(f"{at}: codes {codes[0]} and {codes[1]} have the same token {token}")
    return table.astype(np.int32)


def read_token_map(path: str | Path, num_codes: Sequence[int] | None) -> list[NDArray[np.int64]]:
    """Reads a token map: a JSON list with, per level, a list of tokens (null or -1 = none) or {"code": token}.

    Args:
        path: the JSON file.
        num_codes: codes per level; by default the length of the list, or the largest code named plus one.

    Raises:
        CatalogError: the file is unreadable or holds something else.
    """
    try:
        with open_regular(path, "read", CatalogError) as file:
            levels = parse_json(file.read())
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror or error}") from error
    except CatalogError:
        raise
    except ValueError as error:
        raise CatalogError(f"{path}: a JSON list of levels expected, this {error}") from error
    if not isinstance(levels, list) or (num_codes is not None and len(num_codes) != len(levels)):
        raise CatalogError(f"{path}: a JSON list with one entry per level expected")
    return [
        _read_level(
            f"{path}, level {level}", entry, None if num_codes is None else num_codes[level]
        )
        for level, entry in enumerate(levels)
    ]


def _read_level(at: str, entry: object, num_codes: int | None) -> NDArray[np.int64]:
    if isinstance(entry, list):
        pairs = {str(code): -1 if token is None else token for code, token in enumerate(entry)}
        num_codes = num_codes if num_codes is not None else len(entry)
    elif isinstance(entry, dict):
        pairs = entry
    else:
        raise CatalogError(
            f"{at}: a list of tokens or an object {{code: token}} expected, got {shown(entry)}"
        )
    for code, token in pairs.items():
        if not (_CODE.fullmatch(code) and type(token) is int and -1 <= token <= _MAX_TOKEN):
            raise CatalogError(
                f"{at}: code {shown(code)} has the token {shown(token)}; whole numbers in [0, 2^31) expected, "
                "codes as decimal digits without leading zeros"
            )
    codes = [int(code) for code in pairs]
    size = num_codes if num_codes is not None else max(codes, default=-1) + 1
    if max(codes, default=-1) >= size or size > MAX_CODES:
        raise CatalogError(
            f"{at}: codes must be in [0, {min(size, MAX_CODES)}), got {max(codes, default=size)}"
        )
    table = np.full(size, -1, np.int64)
    table[codes] = list(pairs.values())
    return table
