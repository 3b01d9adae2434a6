"""Token tables and the JSON they are read from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.token_map import read_token_map, token_tables

if TYPE_CHECKING:
    from pathlib import Path


def test_offsets_are_the_compact_form() -> None:
    tables = token_tables([3, 2], None, [10, 12])
    assert [table.tolist() for table in tables] == [[10, 11, 12], [12, 13]]
    assert {table.dtype.name for table in tables} == {"int32"}


@pytest.mark.parametrize(
    ("num_codes", "token_of", "token_offsets", "message"),
    [
        ([2], [[1, 2]], [1], "either as token_of .* or as token_offsets, not both"),
        ([2], None, None, "either as token_of .* or as token_offsets"),
        (None, None, [1], "token_offsets need num_codes"),
        ([2, 2], None, [1], "num_codes names 2 levels, the token map 1"),
        ([], None, [], "a catalogue has 1 to 8 levels, the token map has 0"),
        ([1] * 9, None, [1] * 9, "a catalogue has 1 to 8 levels, the token map has 9"),
        (
            [0],
            None,
            [1],
            r"a token offset in \[0, 2\^31\) and 1 to 16777216 codes expected, got 1 and 0",
        ),
        ([2**24 + 1], None, [0], "1 to 16777216 codes expected, got 0 and 16777217"),
        ([2], None, [-1], r"a token offset in \[0, 2\^31\) .* got -1 and 2"),
        ([2], None, [2**31 - 1], r"level 0: tokens must be in \[0, 2\^31\)"),
        (None, [[1, 1]], None, "level 0: codes 0 and 1 have the same token 1"),
        (None, [[1], [5, -1, 5]], None, "level 1: codes 0 and 2 have the same token 5"),
        (None, [[-1, -1]], None, "level 0: no code has a token"),
        (None, [[-2, 1]], None, r"tokens must be in \[0, 2\^31\) or -1 \(none\), got -2 to 1"),
        (
            None,
            [[1.5]],
            None,
            r"a list of 1 \(1 to 16777216\) tokens expected, got shape \(1,\) of float64",
        ),
        (None, [[]], None, r"a list of 0 \(1 to 16777216\) tokens expected"),
        ([3], [[1, 2]], None, r"a list of 3 .* tokens expected, got shape \(2,\)"),
    ],
)
def test_wrong_tables(num_codes: Any, token_of: Any, token_offsets: Any, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        token_tables(num_codes, token_of, token_offsets)


def write(folder: Path, content: object) -> Path:
    path = folder / "tokens.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_read_lists_and_objects(tmp_path: Path) -> None:
    path = write(tmp_path, [[7, None, 9], {"4": 1, "0": 2}])
    assert [level.tolist() for level in read_token_map(path, None)] == [
        [7, -1, 9],
        [2, -1, -1, -1, 1],
    ]
    assert [level.tolist() for level in read_token_map(path, [4, 6])] == [
        [7, -1, 9, -1],
        [2, -1, -1, -1, 1, -1],
    ]


@pytest.mark.parametrize(
    ("content", "num_codes", "message"),
    [
        ("{", None, "a JSON list of levels expected"),
        ('[{"1": 2, "1": 3}]', None, "this gives '1' twice in one object"),
        (
            '[{"1": 5, "01": 6}]',
            None,
            "level 0: code '01' has the token 6; .* without leading zeros",
        ),
        ('[{"1": 5, "\u0661": 6}]', None, "level 0: code '\u0661' has the token 6"),
        ('[{"\u00b9": 6}]', None, "level 0: code '\u00b9' has the token 6"),
        ('[{" 1": 6}]', None, "level 0: code ' 1' has the token 6"),
        ([{"9" * 5000: 1}], None, r"level 0: code '9+\.\.\.9+' has the token 1; whole numbers"),
        ([{"1": [[[[1]]]]}], None, r"level 0: code '1' has the token \[\[\[\[1\]\]\]\]"),
        ("[[" + "9" * 5000 + "]]", None, "tokens.json"),
        ("[" * 100_000, None, "a JSON list of levels expected, this is nested too deep"),
        ("[" * 900 + "]" * 900, None, "tokens.json"),
        ('{"1": ' * 900 + "1" + "}" * 900, None, "a JSON list with one entry per level"),
        ({}, None, "a JSON list with one entry per level expected"),
        ([[1]], [1, 1], "a JSON list with one entry per level expected"),
        ([5], None, r"level 0: a list of tokens or an object .* expected, got 5"),
        ([{"a": 1}], None, "level 0: code 'a' has the token 1; whole numbers"),
        ([{"-1": 1}], None, "level 0: code '-1' has the token 1"),
        ([{"1": "x"}], None, "level 0: code '1' has the token 'x'"),
        ([[True]], None, "level 0: code '0' has the token True"),
        ([[2**31]], None, "level 0: code '0' has the token 2147483648"),
        ([{"3": 1}], [3], r"level 0: codes must be in \[0, 3\), got 3"),
        ([{"16777216": 1}], None, r"level 0: codes must be in \[0, 16777216\), got 16777216"),
    ],
)
def test_wrong_files(tmp_path: Path, content: object, num_codes: Any, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        read_token_map(write(tmp_path, content), num_codes)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"cannot read .*absent: No such file"):
        read_token_map(tmp_path / "absent", None)


def test_ragged_tables_are_refused() -> None:
    ragged: Any = [[[1], [2, 3]]]
    with pytest.raises(CatalogError, match="token map, level 0: an array of values expected"):
        token_tables(None, ragged, None)
