"""ops/ascend/FIRST_DAY.md: its commands exist with those options, and what it quotes is what is said."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from xgr_runtime.cli import build_parser
from xgr_runtime.config import load_config
from xgr_runtime.shipped import config_file

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "ops" / "ascend" / "FIRST_DAY.md").read_text(encoding="utf-8")
FOLDER = ("model.path=FOLDER", "catalogs={shop: shop.xgr}")


def commands() -> list[list[str]]:
    """Every `xgr ...` of a console block or between backticks, as a shell splits it."""
    lines = re.findall(r"^\$ (xgr [^#\n]*)", PAGE, re.MULTILINE)
    quoted = re.findall(r"`(xgr (?:serve|doctor|demo|conformance) [^`]*)`", PAGE)
    return [shlex.split(text.partition(" > ")[0]) for text in (*lines, *quoted)]


def test_the_page_has_commands() -> None:
    assert {command[1] for command in commands()} == {"doctor", "conformance", "demo", "serve"}


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_each_command_is_one(command: list[str]) -> None:
    args = build_parser().parse_args(command[1:])
    if getattr(args, "config", None):
        load_config(config_file(args.config), args.overrides)


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`--set ([\w.]+=[\w.]+)`", PAGE))))
def test_each_option_that_may_help_is_one(option: str) -> None:
    load_config(config_file("ascend-910b"), [*FOLDER, option])


def test_the_reasons_are_those_of_the_probe() -> None:
    source = (ROOT / "xgr_runtime" / "hal" / "ascend_probe.py").read_text(encoding="utf-8")
    table = PAGE.partition("| the line says | missing |")[2].partition("\n\n")[0]
    said = [row.split(" | ")[0].removeprefix("| ") for row in table.strip().splitlines()[1:]]
    assert len(said) == 8
    for line in said:
        words = max(re.split(r"\*\w+\*|\b[ABC]\b|\(lib.*|: aclInit.*", line), key=len).strip()
        assert words.lower().removeprefix("un") in source.lower(), line


def test_nothing_is_claimed_to_have_run_on_hardware() -> None:
    assert "nothing of the Ascend backend was run on hardware" in PAGE
