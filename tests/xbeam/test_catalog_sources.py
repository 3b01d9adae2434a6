"""One catalogue in three formats: the same file, byte for byte, and the items that went in."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xbeam.sources import TOKENS, Row, rows, write_csv, write_jsonl, write_npz
from xgr_runtime.cli import main
from xgr_runtime.errors import CatalogError
from xgr_runtime.files import parse_json
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import build_catalog_from_file, guess_format
from xgr_runtime.xbeam.catalog_input import parse_flat_object

MANY = [
    Row(
        item_id=1000 - 7 * i,
        sid=(i % 4, i * i % 3),
        key=f"key {i}" if i % 5 else "",
        title=[
            "plain",
            'quoted "so"',
            "two\r\nlines",
            "comma, and | bar",
            "Ünïcode \U0001f45f",
            "",
        ][i % 6],
        weight=i % 4 / 8,
        servable=i % 7 != 3,
        tags=[("a", "category:shoes"), ("b c",), (), ("é", "a")][i % 4],
    )
    for i in range(200)
]


def compiled(folder: Path, source: Path, **options: Any) -> bytes:
    out = folder / f"{source.name}.xgrc"
    build_catalog_from_file(out, source, **TOKENS, **options)
    return out.read_bytes()


def test_three_formats_give_the_same_bytes(tmp_path: Path) -> None:
    expected = compiled(tmp_path, write_jsonl(tmp_path / "i.jsonl", MANY))
    sources = [
        write_csv(tmp_path / "a.csv", MANY),
        write_csv(tmp_path / "b.csv", MANY, has_mark=True, one_sid_field=False, end="\n"),
        write_csv(tmp_path / "c.CSV", MANY, quote_all=True),
        write_npz(tmp_path / "d.npz", MANY),
        write_npz(tmp_path / "e.npz", MANY, is_compressed=True),
    ]
    assert [compiled(tmp_path, source) == expected for source in sources] == [True] * len(sources)
    with Catalog.open(tmp_path / "d.npz.xgrc") as catalog:
        catalog.verify()
        at = catalog.positions_of_ids([row.item_id or 0 for row in MANY])
        assert catalog.sids_of_positions(at).tolist() == [list(row.sid) for row in MANY]
        assert catalog.keys_of(at) == [row.key for row in MANY]
        assert catalog.titles_of(at) == [row.title for row in MANY]
        assert catalog.weights_of(at).tolist() == [row.weight for row in MANY]
        assert (at < catalog.num_servable).tolist() == [row.servable for row in MANY]
        for tag in ("a", "b c", "category:shoes", "é"):
            positions = catalog.tag_positions(tag)
            assert positions is not None
            having = sorted(at[i] for i, row in enumerate(MANY) if tag in row.tags)
            assert positions.tolist() == having


@settings(max_examples=60)
@given(rows(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_any_items_survive_any_format(
    items: list[Row], one_sid_field: bool, quote_all: bool, has_mark: bool, unix: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        how: Any = {"one_sid_field": one_sid_field, "quote_all": quote_all}
        how |= {"has_mark": has_mark, "end": "\n" if unix else "\r\n"}
        from_jsonl = compiled(folder, write_jsonl(folder / "i.jsonl", items))
        assert compiled(folder, write_csv(folder / "i.csv", items, **how)) == from_jsonl
        assert compiled(folder, write_npz(folder / "i.npz", items)) == from_jsonl
        with Catalog.open(folder / "i.npz.xgrc") as catalog:
            catalog.verify()
            ids = [n if row.item_id is None else row.item_id for n, row in enumerate(items)]
            at = catalog.positions_of_ids(ids)
            assert catalog.sids_of_positions(at).tolist() == [list(row.sid) for row in items]
            keys, titles = catalog.keys_of(at), catalog.titles_of(at)
            assert keys == ([row.key for row in items] if any(row.key for row in items) else None)
            has_titles = any(row.title for row in items)
            assert titles == ([row.title for row in items] if has_titles else None)
            assert catalog.weights_of(at).tolist() == [row.weight for row in items]
            assert catalog.tags == sorted({tag for row in items for tag in row.tags})


def test_the_format_is_that_of_the_suffix_or_the_one_named(tmp_path: Path) -> None:
    names = ("a.csv", "b.NPZ", "c.jsonl", "d.ndjson", "e")
    assert list(map(guess_format, names)) == ["csv", "npz", "jsonl", "jsonl", "jsonl"]
    plain = write_csv(tmp_path / "items", MANY)
    with pytest.raises(CatalogError, match="items, row 1: one JSON object expected"):
        compiled(tmp_path, plain)
    assert compiled(tmp_path, plain, source_format="csv") == compiled(
        tmp_path, write_jsonl(tmp_path / "i.jsonl", MANY)
    )
    with pytest.raises(CatalogError, match="source_format must be jsonl, csv or npz, got 'xlsx'"):
        compiled(tmp_path, plain, source_format="xlsx")


def test_other_names_of_the_columns(tmp_path: Path) -> None:
    (tmp_path / "i.csv").write_text("asin,code_0,code_1\n5,1,2\n4,0,0\n")
    np.savez(tmp_path / "i.npz", asins=[5, 4], codes=[[1, 2], [0, 0]])
    (tmp_path / "i.jsonl").write_text('{"asin": 5, "code": [1, 2]}\n{"asin": 4, "code": [0, 0]}\n')
    options = {"sid_field": "code", "id_field": "asin"}
    built = {
        compiled(tmp_path, tmp_path / f"i.{suffix}", **options)
        for suffix in ("csv", "npz", "jsonl")
    }
    assert len(built) == 1


def test_the_command_takes_all_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [
        write_csv(tmp_path / "i.csv", MANY),
        write_npz(tmp_path / "i.npz", MANY),
        write_jsonl(tmp_path / "i.jsonl", MANY),
        write_csv(tmp_path / "other", MANY),
    ]
    digests = set()
    for source in sources:
        words = ["--token-offsets", "10,14", "--codes", "4,3"]
        words += ["--format", "csv"] if source.name == "other" else []
        assert main(["catalog", "build", str(source), str(tmp_path / "c"), *words]) == 0
        digests.add(capsys.readouterr().out.split("digest")[1].split()[0])
    assert len(digests) == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"a": 1, "a": 2}',
        '{"a": ":", "b": 1, "b": ":"}',
        '{"a": "x:", "a": 1}',
        '{"a": {"b": 1, "b": 2}}',
        '{"a": [{"b": 1, "b": 2}]}',
        r'{"a": 1, "b": "\u003a", "b": 2}',
        r'{"a": "\u003a", "\u0061": 1}',
        '{"a:": 1, "a:": 2}',
        '{"a": ["x:"], "a": ["x"]}',
    ],
)
def test_names_given_twice_are_found_by_the_quick_reading_too(line: str) -> None:
    for parse in (parse_json, parse_flat_object):
        with pytest.raises(ValueError, match=r"gives .* twice in one object"):
            parse(line.encode())


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text('a:\\"', max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text("ab:", max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c:", "d"]), _VALUES), max_size=4))
def test_the_quick_reading_is_the_careful_one(members: list[tuple[str, Any]]) -> None:
    """Objects with and without names given twice, written member by member."""
    line = "{" + ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in members) + "}"
    outcomes = []
    for parse in (parse_json, parse_flat_object):
        try:
            outcomes.append(parse(line.encode()))
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    assert isinstance(outcomes[0], str) == (len({k for k, _ in members}) < len(members))
