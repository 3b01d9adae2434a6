"""`xgr catalog build | info | verify` through the command itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

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
