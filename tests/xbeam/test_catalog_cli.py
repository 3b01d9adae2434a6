"""`xgr catalog build | info | verify` through the command itself."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from xgr_runtime.cli import main

if TYPE_CHECKING:
    from pathlib import Path


def run(*words: object) -> int:
    return main(["catalog", *map(str, words)])


@pytest.fixture
def items(tmp_path: Path) -> Path:
    path = tmp_path / "items.jsonl"
    path.write_text('{"id": 4, "sid": [0, 1], "tags": ["a"]}\n{"id": 3, "sid": [1, 1]}\n')
    return path


def test_build_info_verify(items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c"
    assert (
        run("build", items, out, "--token-offsets", "10,12", "--codes", "2,2", "--version", "v7")
        == 0
    )
    assert "built and verified in" in capsys.readouterr().out
    assert run("info", out, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    digest = facts.pop("digest")
    assert (len(digest), int(digest, 16) > 0) == (16, True)
    assert facts == {
        "path": str(out),
        "version": "v7",
        "num_items": 2,
        "num_servable": 2,
        "num_sids": 2,
        "num_levels": 2,
        "num_codes": [2, 2],
        "num_nodes": [2, 2],
        "max_fanout": [2, 1],
        "num_tags": 1,
        "has_keys": False,
        "has_titles": False,
        "file_bytes": out.stat().st_size,
    }
    assert run("info", out) == 0
    assert "num_codes     2, 2\n" in capsys.readouterr().out
    assert run("verify", out) == 0
    assert "(version v7, 2 items, 2 SIDs)" in capsys.readouterr().out


def test_build_with_a_token_map(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text('[{"0": 30, "1": 20}, [null, 9]]')
    assert run("build", items, tmp_path / "c", "--token-map", tokens) == 0
    assert "num_codes     2, 2\n" in capsys.readouterr().out


def test_refusals_are_one_line_and_exit_code_two(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "c"
    assert run("build", items, out, "--token-offsets", "10,12", "--codes", "2,1") == 2
    written = capsys.readouterr()
    assert (
        written.err == f"xgr: CatalogError: {items}, row 1: code 1 of level 1 is outside [0, 1)\n"
    )
    assert written.out == ""
    assert not out.exists()
    assert run("info", items) == 2
    assert "is no catalogue file" in capsys.readouterr().err
    assert run("build", items, out, "--token-offsets", "10,12", "--codes", "2,2") == 0
    content = bytearray(out.read_bytes())
    content[-70] ^= 1
    out.write_bytes(content)
    capsys.readouterr()
    assert run("verify", out) == 2
    written = capsys.readouterr()
    assert "is damaged" in written.err
    assert written.out == ""


def test_wrong_options_stop_the_parser(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("build", items, tmp_path / "c", "--token-offsets", "10,x")
    message = "argument --token-offsets: whole numbers with commas between expected, got '10,x'"
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run("build", items, tmp_path / "c")
    assert "--token-map" in capsys.readouterr().err


TOKENS = ("--token-offsets", "10,12", "--codes", "2,2")


@pytest.mark.parametrize("make", [None, os.symlink, os.link], ids=["same", "symlink", "hard link"])
def test_a_build_never_overwrites_its_own_input(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any
) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[[30, 20], [8, 9]]")
    for source, what in ((items, "the items"), (tokens, "the token map")):
        before, out = source.read_bytes(), source
        if make is not None:
            out = tmp_path / f"other-{source.name}"
            make(source, out)
        assert run("build", items, out, "--token-map", tokens) == 2
        written = capsys.readouterr()
        assert written.err == (
            f"xgr: CatalogError: cannot write the catalogue {out}: it is the same file as {what} {source}; "
            "name another file\n"
        )
        assert (source.read_bytes(), out.read_bytes()) == (before, before)
        assert os.path.samefile(source, out)


def test_outputs_that_are_no_files_are_refused_and_stay(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.symlink("/dev/full", tmp_path / "link")
    for out, kind in (("pipe", "a pipe"), ("link", "a character device")):
        assert run("build", items, tmp_path / out, *TOKENS) == 2
        assert capsys.readouterr().err == (
            f"xgr: CatalogError: cannot write the catalogue {tmp_path / out}: it is {kind}; "
            "name a file that may be replaced\n"
        )
    assert run("build", items, "/dev/full", *TOKENS) == 2
    assert "catalogue /dev/full: it is a character device" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["items.jsonl", "link", "pipe"]


def test_pipes_and_devices_do_not_hang_the_commands(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for words in (
        ("verify", pipe),
        ("info", pipe),
        ("build", pipe, tmp_path / "c", *TOKENS),
        ("build", items, tmp_path / "c", "--token-map", pipe),
    ):
        assert run(*words) == 2
        assert f"{pipe}: a regular file is needed, this is a pipe" in capsys.readouterr().err
    assert run("verify", "/dev/zero") == 2
    assert "this is a character device" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["9" * 5000, "\u0661", "-1", "1_0"])
def test_odd_numbers_are_refused_by_the_parser(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("build", items, tmp_path / "c", f"--token-offsets={number},2", "--codes", "2,2")
    error = capsys.readouterr().err.splitlines()[-1]
    assert "whole numbers with commas between expected, got" in error
    assert len(error) < 400


@pytest.mark.parametrize("version", ["", " ", "a\nb", "a\0b", "\udcff", "v" * 129])
def test_versions_that_cannot_be_printed_are_refused(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    assert run("build", items, tmp_path / "c", *TOKENS, "--version", version) == 2
    error = capsys.readouterr().err
    assert "a version is 1 to 128 printable characters, not all blank" in error
    assert error.count("\n") == 1
    assert os.listdir(tmp_path) == ["items.jsonl"]
