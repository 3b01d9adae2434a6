"""CSV input: what spreadsheets and exports write is read, everything doubtful is refused with its row and line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xbeam.sources import TOKENS
from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import build_catalog_from_file

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "item_id,sid,key,title,weight,tags,servable"


def build(folder: Path, content: bytes | str) -> Catalog:
    source = folder / "items.csv"
    source.write_bytes(content if isinstance(content, bytes) else content.encode())
    build_catalog_from_file(folder / "c", source, **TOKENS)
    catalog = Catalog.open(folder / "c")
    catalog.verify()
    return catalog


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", ["", "end"])
def test_line_ends_marks_and_quotes(tmp_path: Path, end: str, mark: bytes, last: str) -> None:
    lines = [HEADER, '7,3 2,"k,7","say ""hi""",,a|b,TRUE', f'-8,"0 1",,"two{end}lines",.5e1,,0']
    text = end.join(lines) + (end if last else "")
    with build(tmp_path, mark + text.encode()) as catalog:
        at = catalog.positions_of_ids([7, -8])
        assert at.tolist() == [0, 1]
        assert catalog.keys_of(at) == ["k,7", ""]
        assert catalog.titles_of(at) == ['say "hi"', f"two{end}lines"]
        assert catalog.weights_of(at).tolist() == [0.0, 5.0]
        assert catalog.sids_of_positions(at).tolist() == [[3, 2], [0, 1]]
        assert (catalog.num_servable, catalog.tags) == (1, ["a", "b"])


def test_a_column_a_level_and_keys_alone(tmp_path: Path) -> None:
    with build(tmp_path, "sid_1,key,sid_0\n2,q,3\n1,p,0\n") as catalog:
        assert catalog.item_ids.tolist() == [1, 0]
        assert catalog.sids_of_positions([1]).tolist() == [[3, 2]]
    with build(tmp_path, "id,sid\n5,0 0\n") as catalog:
        assert catalog.item_ids.tolist() == [5]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("", "the names of the columns expected, such as item_id,sid"),
        ("item_id,sid,titel", "unknown column 'titel'; did you mean 'title'?"),
        ("item_id,sid,price", "unknown column 'price'; known: item_id, key, title, weight"),
        ("Item_ID,sid", "unknown column 'Item_ID'; did you mean 'item_id'?"),
        ("item_id, sid", "unknown column ' sid'; did you mean 'sid'?"),
        ("item_id;sid", "unknown column 'item_id;sid'; columns are separated by commas"),
        ("item_id\tsid", r"unknown column .*; columns are separated by commas"),
        ("item_id,sid,", "unknown column ''"),
        ("item_id,sid,sid", "the column 'sid' is there twice"),
        ("item_id,id,sid", "give 'item_id' or 'id', not both"),
        (
            "item_id,sid,sid_0,sid_1",
            "the SID is either one column 'sid' or the 2 columns sid_0, sid_1",
        ),
        ("item_id,sid_0", "the SID is either one column 'sid' or the 2 columns sid_0, sid_1"),
        ("item_id,sid_0,sid_1,sid_2", "unknown column 'sid_2'; did you mean"),
        ("item_id,title", "a column 'sid' or the columns sid_0, sid_1 are needed, got"),
        ("title,sid", "a column 'item_id' or 'key' is needed"),
        ('item_id,"sid', "unexpected end of data"),
    ],
)
def test_headers_that_cannot_be_right(tmp_path: Path, header: str, message: str) -> None:
    with pytest.raises(CatalogError, match=rf"items\.csv, header \(line 1\): {message}"):
        build(tmp_path, header + "\n")
    assert os.listdir(tmp_path) == ["items.csv"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("", "7 fields expected, got an empty line"),
        ("2,1 1,,,,", r"7 fields expected, got 6: \["),
        ("2,1 1,,,,,,", r"7 fields expected, got 8: \["),
        ("2.0,1 1,,,,,", "'item_id' must be an int64 in decimal digits .*, got '2.0'"),
        ("1E+05,1 1,,,,,", "'item_id' must be an int64"),
        ("007,1 1,,,,,", "'item_id' must be an int64 .* without leading zeros, got '007'"),
        (" 2,1 1,,,,,", "'item_id' must be an int64"),
        ("1_0,1 1,,,,,", "'item_id' must be an int64"),
        ("\u0663,1 1,,,,,", "'item_id' must be an int64"),
        ("9223372036854775808,1 1,,,,,", "'item_id' must be an int64, got 9223372036854775808"),
        (f"{'9' * 5000},1 1,,,,,", "'item_id' must be an int64"),
        ("1,1 1,,,,,", "item id 1 is already that of row 1"),
        (",1 1,,,,,", "'item_id' or 'key' is needed"),
        (",1 1,kk,,,,", "no 'item_id', other rows have one"),
        ("2,1 1,k,,,,", "key 'k' is already that of row 1"),
        (f"2,1 1,{'é' * 2049},,,,", "a key has at most 4096 bytes in UTF-8, got 4098"),
        ("2,,,,,,", "the SID must be whole numbers from 0, .*, got "),
        ("2,1,,,,,", r"a SID of 2 codes expected, got \[1\]"),
        ("2,1 1 1,,,,,", r"a SID of 2 codes expected, got \[1, 1, 1\]"),
        ("2,1  1,,,,,", "the SID must be whole numbers"),
        ("2,1-1,,,,,", "the SID must be whole numbers"),
        ("2,1 -1,,,,,", "the SID must be whole numbers"),
        ("2,1.0 1,,,,,", "the SID must be whole numbers"),
        ("2,4 1,,,,,", r"code 4 of level 0 is outside \[0, 4\)"),
        ("2,9999999999 1,,,,,", r"codes must be in \[0, 2\^31\)"),
        ("2,1 1,,,nan,,", "'weight' must be a number, got 'nan'"),
        ("2,1 1,,,inf,,", "'weight' must be a number, got 'inf'"),
        ('2,1 1,,,"1,5",,', "'weight' must be a number, got '1,5'"),
        ("2,1 1,,,1e999,,", "'weight' must be finite, got inf"),
        ("2,1 1,,,,a||b,", r"'tags' must be names with \| between, got 'a\|\|b'"),
        ("2,1 1,,,,|,", "'tags' must be names"),
        ("2,1 1,,,,a\x01b,", "a tag must not contain control characters"),
        ("2,1 1,,,,,yes", "'servable' must be true, false, 1, 0 or empty, got 'yes'"),
        ('2,1 1,,"a"b,,,', "',' expected after '\"'"),
        ('2,1 1,,"never closed,,,', "unexpected end of data"),
        (f'2,1 1,,"{"x" * 140000},,,', "field larger than field limit"),
        ("2,1 1,,a\0b,,,", "a NUL character cannot be part of a CSV file"),
        ("2,1 1,,a\rb,,,", "new-line character seen in unquoted field"),
    ],
)
def test_refusals_name_row_and_line(tmp_path: Path, row: str, message: str) -> None:
    """The first row spans two lines, so row 2 starts in line 4."""
    first = '1,0 0,k,"two\nlines",,a,'
    with pytest.raises(CatalogError, match=rf"items\.csv, row 2 \(line 4\): {message}"):
        build(tmp_path, f"{HEADER}\n{first}\n{row}\n")
    assert os.listdir(tmp_path) == ["items.csv"]


def test_bytes_that_are_no_utf_8(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"row 1 \(line 2\): 'utf-8' codec can't decode"):
        build(tmp_path, b"item_id,sid,title\n1,0 0,caf\xe9\n")
    with pytest.raises(CatalogError, match="it is UTF-16; save the file as UTF-8"):
        build(tmp_path, "item_id,sid\n".encode("utf-16"))
    with pytest.raises(CatalogError, match=r"items\.csv: the catalogue is empty"):
        build(tmp_path, "item_id,sid\n")
    assert os.listdir(tmp_path) == ["items.csv"]


def test_a_line_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"row 1 \(line 2\): a line has at most 16777216 bytes"):
        build(tmp_path, b"item_id,sid\n" + b"1" * (1 << 25))


@given(
    st.binary(max_size=60)
    | st.text(st.sampled_from('1,0 "\n\r|abk\0-.'), max_size=60).map(str.encode)
)
def test_any_bytes_are_built_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("any")
    refusal = ""
    try:
        build(folder, b"item_id,sid,tags\n" + content).close()
    except CatalogError as error:
        refusal = str(error)
    assert os.listdir(folder) == ["items.csv"] if refusal else (folder / "c").exists()
    assert refusal.startswith(str(folder / "items.csv") if refusal else "")
    assert "\n" not in refusal
