"""Files of others: what is opened, what is refused without waiting, and JSON read as its text says."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgr_runtime.errors import CatalogError, CheckpointError, ConfigError
from xgr_runtime.files import open_regular, parse_json

if TYPE_CHECKING:
    from pathlib import Path

ERRORS = (CatalogError, CheckpointError, ConfigError)


@pytest.mark.parametrize("kind", ERRORS)
def test_what_is_no_regular_file(tmp_path: Path, kind: type[Exception]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in (
        (tmp_path / "pipe", "a regular file is needed, this is a pipe"),
        (tmp_path, "a regular file is needed, this is a directory"),
        ("/dev/zero", "a regular file is needed, this is a character device"),
        (tmp_path / "none", "No such file or directory"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(kind, match=f"^cannot copy .*: .*{what}"):
            open_regular(path, "copy", kind)  # type: ignore[arg-type]


def test_a_missing_file_in_the_callers_words(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"^make it first$"):
        open_regular(tmp_path / "none", "read", CatalogError, missing="make it first")
    with pytest.raises(CatalogError, match=r"^cannot read"):
        open_regular(tmp_path, "read", CatalogError, missing="make it first")


def test_a_regular_file_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    os.symlink(tmp_path / "file", tmp_path / "link")
    with open_regular(tmp_path / "link", "read", CatalogError) as file:
        assert file.read() == b"content"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON: Expecting value"),
        (b"{} x", "is not JSON: Extra data"),
        (b"\xe9", "is not UTF-8: .* at byte 0"),
        (b"\xef\xbb\xbf{}", "starts with a byte order mark"),
        (b"[" * 100_000, "is nested too deep"),
        (b"9" * 5000, "has a number of too many digits"),
        (b'{"a": 1, "b": 2, "a": 1}', "gives 'a' twice in one object"),
        (b'[{"a": {"b": 1, "b": 1}}]', "gives 'b' twice in one object"),
        (b'{"%s": 1, "%s": 2}' % (b"k" * 9000, b"k" * 9000), r"gives 'k+\.\.\.k+' twice"),
    ],
)
def test_what_is_no_json(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}") as caught:
        parse_json(content)
    assert len(str(caught.value)) < 300


def test_integers_in_the_callers_way() -> None:
    assert parse_json(b'{"a": [1, 2.5]}', parse_int=lambda text: f"<{text}>") == {"a": ["<1>", 2.5]}
    with pytest.raises(ValueError, match="gives 'a' twice"):
        parse_json(b'{"a": 1, "a": 1}', parse_int=str)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_every_value_is_read_as_it_was_written(value: Any) -> None:
    for is_ascii in (True, False):
        text = json.dumps(value, ensure_ascii=is_ascii)
        assert parse_json(text.encode("utf-8", "surrogatepass")) == value
