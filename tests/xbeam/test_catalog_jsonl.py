"""JSONL input: the same catalogue as from arrays, and every refusal with its line."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import build_catalog, build_catalog_from_jsonl
from xgr_runtime.xbeam.catalog_columns import ItemColumns

if TYPE_CHECKING:
    from pathlib import Path

TOKENS: dict[str, Any] = {"num_codes": [4, 4], "token_offsets": [10, 14]}


def build(folder: Path, lines: list[str], **options: Any) -> Catalog:
    source = folder / "items.jsonl"
    source.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    build_catalog_from_jsonl(folder / "c", source, **TOKENS, **options)
    catalog = Catalog.open(folder / "c")
    catalog.verify()
    return catalog


def test_equals_the_build_from_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    rows = [
        {
            "item_id": int(item_id),
            "sid": rng.integers(0, 4, 2).tolist(),
            "key": f"K{row}",
            "title": f"title {row} é",
            "weight": float(rng.integers(0, 3)),
            "tags": [["a"], ["a", "b"], [], ["c", "c"]][row % 4],
            "servable": bool(row % 5),
            "other": {"ignored": True},
        }
        for row, item_id in enumerate(rng.permutation(200) - 100)
    ]
    catalog = build(tmp_path, [json.dumps(row) for row in rows], version="x")
    build_catalog(
        tmp_path / "arrays",
        sids=[row["sid"] for row in rows],
        item_ids=[row["item_id"] for row in rows],
        keys=[row["key"] for row in rows],
        titles=[row["title"] for row in rows],
        weights=[row["weight"] for row in rows],
        servable=[row["servable"] for row in rows],
        tags=[row["tags"] for row in rows],
        version="x",
        **TOKENS,
    )
    assert (tmp_path / "arrays").read_bytes() == (tmp_path / "c").read_bytes()
    assert catalog.num_servable == 160


@pytest.mark.parametrize("field", ["item_id", "id", "key"])
def test_plain_rows_are_never_looked_at_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """With ids or with keys alone, over several chunks; one by one, a file of keys took 1.4 times as long."""
    names = [f"K{row}" if field == "key" else row for row in range(3000)]
    lines = [json.dumps({field: name, "sid": [row % 4, 1]}) for row, name in enumerate(names)]
    monkeypatch.setattr(ItemColumns, "add", None)
    catalog = build(tmp_path, lines, version="x")
    column = {"keys" if field == "key" else "item_ids": names}
    sids = [[row % 4, 1] for row in range(3000)]
    build_catalog(tmp_path / "arrays", sids=sids, version="x", **column, **TOKENS)  # type: ignore[arg-type]
    assert (tmp_path / "arrays").read_bytes() == (tmp_path / "c").read_bytes()
    assert catalog.num_items == 3000


@pytest.mark.parametrize("num_first", [1, 1024, 2000])
@pytest.mark.parametrize("is_key_first", [True, False])
def test_ids_in_some_rows_only(tmp_path: Path, num_first: int, is_key_first: bool) -> None:
    """The first row without an id is named, in whichever chunk it is."""
    kinds = [is_key_first] * num_first + [not is_key_first] * 1100
    lines = [
        json.dumps({"key": f"K{row}", "sid": [1, 1]} if is_key else {"id": row, "sid": [1, 1]})
        for row, is_key in enumerate(kinds)
    ]
    row = 1 if is_key_first else num_first + 1
    with pytest.raises(CatalogError, match=f"row {row}: no 'item_id', other rows have one"):
        build(tmp_path, lines)


def test_ids_under_another_name_and_generated_ids(tmp_path: Path) -> None:
    with build(tmp_path, ['{"id": 9, "sid": [1, 1]}', '{"id": 8, "sid": [0, 1]}']) as catalog:
        assert catalog.item_ids.tolist() == [8, 9]
    with build(
        tmp_path, ['{"asin": 3, "codes": [0, 0]}'], sid_field="codes", id_field="asin"
    ) as catalog:
        assert catalog.item_ids.tolist() == [3]
    with build(tmp_path, ['{"key": "q", "sid": [1, 1]}', '{"key": "p", "sid": [0, 1]}']) as catalog:
        assert catalog.item_ids.tolist() == [1, 0]
        assert catalog.positions_of_keys(["q", "p"]).tolist() == [1, 0]


def test_a_missing_last_newline_is_fine(tmp_path: Path) -> None:
    (tmp_path / "i").write_text('{"id": 1, "sid": [0, 0]}\r\n{"id": 2, "sid": [0, 1]}')
    build_catalog_from_jsonl(tmp_path / "c", tmp_path / "i", **TOKENS)
    with Catalog.open(tmp_path / "c") as catalog:
        assert catalog.num_items == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "one JSON object expected, this is not JSON: Expecting value"),
        ("{", "one JSON object expected"),
        ("[1]", "one JSON object expected, got"),
        ("[" * 100_000, "one JSON object expected"),
        ('{"id": 2}', "'sid' must be a list of codes, got None"),
        ('{"id": 2, "sid": "ab"}', "'sid' must be a list of codes, got 'ab'"),
        ('{"id": 2, "sid": [1, 1.0]}', r"'sid' must be a list of codes, got \[1, 1.0\]"),
        ('{"id": 2, "sid": [1, true]}', r"'sid' must be a list of codes, got \[1, True\]"),
        ('{"id": 2, "sid": [1]}', r"a SID of 2 codes expected, got \[1\]"),
        ('{"id": 2, "sid": [1, 4]}', r"code 4 of level 1 is outside \[0, 4\)"),
        ('{"id": 2, "sid": [1, -1]}', r"codes must be in \[0, 2\^31\), got \[1, -1\]"),
        ('{"id": 2, "sid": [1, 99999999999999999999]}', r"codes must be in \[0, 2\^31\)"),
        ('{"id": 1, "sid": [1, 1]}', "item id 1 is already that of row 1"),
        ('{"id": "2", "sid": [1, 1]}', "'item_id' must be an int64, got '2'"),
        ('{"id": true, "sid": [1, 1]}', "'item_id' must be an int64, got True"),
        (
            '{"id": 9223372036854775808, "sid": [1, 1]}',
            "'item_id' must be an int64, got 9223372036854775808",
        ),
        ('{"sid": [1, 1]}', "'item_id' or 'key' is needed"),
        ('{"sid": [1, 1], "key": "c"}', "no 'item_id', other rows have one"),
        ('{"id": 2, "sid": [1, 1], "key": "k"}', "key 'k' is already that of row 1"),
        (
            '{"id": 2, "sid": [1, 1], "key": ""}',
            "'key' must be a string with at least one character, got ''",
        ),
        (
            '{"id": 2, "sid": [1, 1], "key": 5}',
            "'key' must be a string with at least one character, got 5",
        ),
        ('{"id": 2, "sid": [1, 1], "key": "\\ud800"}', "the key is not valid text"),
        ('{"id": 2, "sid": [1, 1], "title": 5}', "'title' must be a string, got 5"),
        ('{"id": 2, "sid": [1, 1], "weight": NaN}', "'weight' must be finite, got nan"),
        ('{"id": 2, "sid": [1, 1], "weight": 1e999}', "'weight' must be finite, got inf"),
        (f'{{"id": 2, "sid": [1, 1], "weight": 1{"0" * 400}}}', "'weight' must be finite"),
        ('{"id": 2, "sid": [1, 1], "weight": "1"}', "'weight' must be a number, got '1'"),
        ('{"id": 2, "sid": [1, 1], "tags": "a"}', "'tags' must be a list of names, got 'a'"),
        ('{"id": 2, "sid": [1, 1], "tags": [""]}', r"'tags' must be a list of names, got \[''\]"),
        (
            '{"id": 2, "sid": [1, 1], "servable": false, "servable": true}',
            "one JSON object expected, this gives 'servable' twice in one object",
        ),
        ('{"id": 2, "id": 2, "sid": [1, 1]}', "one JSON object expected, this gives 'id' twice"),
        ('{"id": 2, "sid": [1, 1], "x": {"a": 1, "a": 1}}', ".*this gives 'a' twice"),
        (f'{{"id": {"9" * 5000}, "sid": [1, 1]}}', "(one JSON object expected|'item_id' must be)"),
        (f'{{"id": 2, "sid": [1, {"9" * 5000}]}}', "(one JSON object expected|codes must be)"),
        (f'{{"id": 2, "sid": [1, {"9" * 4000}]}}', r"codes .*\[1, an integer of 13288 bits\]"),
        (f'{{"id": 2, "sid": {"[" * 900 + "]" * 900}}}', ""),
        (f'{{"id": 2, "sid": {"[" * 400 + "]" * 400}}}', "'sid' must be a list of codes, got"),
        (f'{{"id": 2, "sid": [1, 1], "key": {"[" * 400 + "]" * 400}}}', "'key' must be a string"),
        ('{"id": 2, "sid": [1, 1], "tags": ["a\\u0000b"]}', "a tag must not contain control char"),
        ('{"id": 2, "sid": [1, 1], "tags": ["a\\nb"]}', r"a tag must not .*, got 'a\\nb'"),
        ('{"id": 2, "sid": [1, 1], "tags": ["\\u0085"]}', "a tag must not contain control char"),
        (f'{{"id": 2, "sid": [1, 1], "tags": ["{"é" * 2049}"]}}', "a tag has at most 4096 bytes"),
        (
            f'{{"id": 2, "sid": [1, 1], "key": "{"é" * 2049}"}}',
            r"a key has at most 4096 bytes in UTF-8, got 4098: 'é+\.\.\.é+'",
        ),
        ("\ufeff{}", "one JSON object expected, this starts with a byte order mark"),
        ('{"id": 2, "sid": [1, 1], "servable": 1}', "'servable' must be true or false, got 1"),
    ],
)
def test_refusals_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    first = '{"id": 1, "sid": [0, 0], "key": "k"}'
    with pytest.raises(CatalogError, match=rf"items.jsonl, row 2: {message}"):
        build(tmp_path, [first, line])
    assert os.listdir(tmp_path) == ["items.jsonl"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"cannot read .*absent: No such file"):
        build_catalog_from_jsonl(tmp_path / "c", tmp_path / "absent", **TOKENS)
    (tmp_path / "items.jsonl").write_bytes(b'{"id": 1, "sid": [0, 0], "title": "\xff"}\n')
    with pytest.raises(CatalogError, match="row 1: one JSON object expected, this is not UTF-8: "):
        build_catalog_from_jsonl(tmp_path / "c", tmp_path / "items.jsonl", **TOKENS)
    (tmp_path / "items.jsonl").write_bytes(b"")
    with pytest.raises(CatalogError, match="the catalogue is empty"):
        build_catalog_from_jsonl(tmp_path / "c", tmp_path / "items.jsonl", **TOKENS)
    assert os.listdir(tmp_path) == ["items.jsonl"]


def test_the_longest_keys_and_tags_and_ordinary_text_pass(tmp_path: Path) -> None:
    key, tag = "k" * 4096, "é" * 2048
    rows = [
        {"key": key, "sid": [1, 1], "tags": [tag, "no\u00a0break", "\U0001f45f"]},
        {"key": "tab\there", "sid": [1, 2], "tags": [" ", "a b"]},
    ]
    with build(tmp_path, [json.dumps(row) for row in rows]) as catalog:
        assert catalog.positions_of_keys([key, "tab\there"]).tolist() == [0, 1]
        assert catalog.tags == sorted([tag, "no\u00a0break", "\U0001f45f", " ", "a b"])


@pytest.mark.parametrize(
    ("make", "kind"), [(os.mkfifo, "a pipe"), (os.mkdir, "a directory")], ids=["pipe", "folder"]
)
def test_only_regular_files_are_read(tmp_path: Path, make: Any, kind: str) -> None:
    make(tmp_path / "items")
    with pytest.raises(
        CatalogError, match=f"cannot read .*items: a regular file .* this is {kind}"
    ):
        build_catalog_from_jsonl(tmp_path / "c", tmp_path / "items", **TOKENS)
    with pytest.raises(CatalogError, match="this is a character device"):
        build_catalog_from_jsonl(tmp_path / "c", "/dev/zero", **TOKENS)
    assert os.listdir(tmp_path) == ["items"]


ODD_ROWS: list[dict[str, Any]] = [
    {"item_id": 3, "sid": [3, 3], "key": None, "title": None, "weight": None, "tags": None},
    {"item_id": 3, "sid": [3, 3], "weight": 2, "title": "ü", "tags": ["ü", "a", "a"]},
    {"item_id": 3, "id": 7, "sid": [3, 3], "key": "k:3", "other": {"a": [1, {"b": 2}]}},
    {"item_id": 0, "id": 2500, "sid": [3, 3], "tags": [], "servable": False},
    {"item_id": -(2**63), "sid": [3, 3], "title": 'quoted "so": \\ and : so', "weight": 1e300},
]


@pytest.mark.parametrize("odd", ODD_ROWS, ids=range(len(ODD_ROWS)))
@pytest.mark.parametrize("place", [0, 1023, 1024, 1099])
def test_an_unusual_row_changes_nothing_about_the_others(
    tmp_path: Path, odd: dict[str, Any], place: int
) -> None:
    """Rows are taken in some hundred at a time, an odd one among them one by one: the same file as from arrays."""
    rows: list[dict[str, Any]] = [
        {"item_id": 5 + row, "sid": [row % 3, row % 4], "title": f"t{row}", "tags": ["a"]}
        for row in range(1100)
    ]
    rows[place] = odd
    build(tmp_path, [json.dumps(row) for row in rows]).close()
    build_catalog(
        tmp_path / "arrays",
        sids=[row["sid"] for row in rows],
        item_ids=[row["item_id"] for row in rows],
        keys=[row.get("key") for row in rows],
        titles=[row.get("title") or "" for row in rows],
        weights=[float(row.get("weight") or 0) for row in rows],
        servable=[row.get("servable", True) for row in rows],
        tags=[row.get("tags") or [] for row in rows],
        **TOKENS,
    )
    assert (tmp_path / "arrays").read_bytes() == (tmp_path / "c").read_bytes()


@pytest.mark.parametrize("place", [1, 1023, 1024, 1099])
@pytest.mark.parametrize(
    "bad",
    [
        '{"id": 5, "sid": [0, 4]',
        '{"id": 5, "sid": [0, true]}',
        '{"id": 5.0, "sid": [0, 1]}',
        '{"id": 9223372036854775808, "sid": [0, 1]}',
        '{"id": 5, "sid": [0, 1, 2]}',
        '{"id": 5, "sid": [0, -1]}',
        '{"id": 5, "sid": [0, 4294967296]}',
        '{"id": 5, "sid": [0, 1], "weight": NaN}',
        '{"id": 5, "sid": [0, 1], "weight": true}',
        '{"id": 5, "sid": [0, 1], "tags": ["a", ""]}',
        '{"id": 5, "sid": [0, 1], "tags": ["a\\n"]}',
        '{"id": 5, "sid": [0, 1], "tags": "a"}',
        '{"id": 5, "sid": [0, 1], "key": ""}',
        '{"id": 5, "sid": [0, 1], "title": 0}',
        '{"id": 5, "sid": [0, 1], "servable": 0}',
        '{"id": 5, "sid": [0, 1], "key": "\\ud800"}',
        '{"id": 5, "id": 5, "sid": [0, 1]}',
    ],
)
def test_the_first_bad_row_of_many_is_named(tmp_path: Path, bad: str, place: int) -> None:
    lines = [f'{{"id": {10 + row}, "sid": [0, 1]}}' for row in range(1100)]
    lines[place] = bad
    lines[-1] = '{"later": "and worse"' if place < 1099 else bad
    with pytest.raises(CatalogError, match=rf"items\.jsonl, row {place + 1}: "):
        build(tmp_path, lines)
    assert os.listdir(tmp_path) == ["items.jsonl"]


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("servabel", "servable"), ("Servable", "servable"), ("tag", "tags"), ("TAGS", "tags"),
        ("weights", "weight"), ("sids", "sid"), ("item-id", "item_id"), ("titles", "title"),
        ("wieght", "weight"), ("tgas", "tags"), ("tilte", "title"), ("kye", "key"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 1500, 2099])
def test_a_field_that_is_nearly_known_is_refused(
    tmp_path: Path, field: str, meant: str, place: int
) -> None:
    """Ignoring it would recommend what was delisted, and say nothing."""
    rows: list[dict[str, Any]] = [{"item_id": row, "sid": [0, 1]} for row in range(2100)]
    rows[place][field] = False
    with pytest.raises(
        CatalogError,
        match=rf"items\.jsonl, row {place + 1}: unknown field '{field}'; did you mean '{meant}'\?",
    ):
        build(tmp_path, [json.dumps(row) for row in rows])
    assert os.listdir(tmp_path) == ["items.jsonl"]


def test_fields_of_others_are_ignored(tmp_path: Path) -> None:
    others = ("height", "subtitle", "category", "brand", "price", "name", "description", "asin")
    rows = [{"item_id": 1, "sid": [0, 1], **dict.fromkeys(others, 3)}]
    assert build(tmp_path, [json.dumps(row) for row in rows]).num_items == 1


def test_an_earlier_fault_is_named_before_a_slip(tmp_path: Path) -> None:
    lines = ['{"item_id": 1, "sid": "x"}', '{"item_id": 2, "sid": [0, 1], "tag": ["a"]}']
    with pytest.raises(CatalogError, match=r"row 1: "):
        build(tmp_path, lines)
