"""ops/ascend/FIRST_DAY.md: its commands exist with those options, and what it quotes is what is said."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from xgr_runtime.cli import build_parser
from xgr_runtime.config import load_config
from xgr_runtime.hal import ascend_probe
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
    assert len(said) == 9
    for line in said:
        words = max(re.split(r"\*\w+\*|\b[ABC]\b|\(lib.*|: aclInit.*", line), key=len).strip()
        assert words.lower().removeprefix("un") in source.lower(), line


def test_canns_python_packages_are_those_that_the_probe_names() -> None:
    (line,) = re.findall(r"^\$ pip install (attrs[^#\n]*?) +#", PAGE, re.MULTILINE)
    assert line == ascend_probe.CANN_PACKAGES


def test_the_two_demos_write_to_places_of_their_own_and_those_are_sent() -> None:
    runs = [build_parser().parse_args(c[1:]) for c in commands() if c[1] == "demo"]
    places = [place for run in runs for place in (run.report, f"{run.work}/serve.log")]
    assert len(runs) == 2
    assert len(set(places)) == 4
    assert all(f"`{place}`" in PAGE.partition("## What to send back")[2] for place in places)


# What a figure of speed or accuracy looks like, and what says that something has happened on a card.
FIGURE = re.compile(
    r"\d[\d.,]* ?(?:[mnµu]?s|ms|seconds?|%|[GT]i?B/s|TFLOP/?s|tokens/s|requests/s|QPS|x faster)\b|\b0\.\d{3,}|1e-\d"
)
HAPPENED = re.compile(
    r"\b(?:ran|run|was run|measured|tested|tried|verified|confirmed|passed|passes|works|worked|launched|reaches|took)\b"
)
CARD = re.compile(r"\b(?:hardware|cards?|chips?|NPUs?|Ascend\w*|910\w*|Atlas)\b")
DENIED = re.compile(r"\b(?:no|not|never|nothing|none|unknown|whether)\b|\bto run\b", re.IGNORECASE)


def claims(text: str) -> list[str]:
    """Sentences that say that something ran on a card, and figures that nobody has seen there."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"`[^`]*`", "CODE", prose)
    found = []
    for block in re.split(r"\n\n|(?<=\|)\n|\n(?=\d\. )", prose):
        for sentence in re.split(r"(?<=[.:;!])\s+(?=[*A-Z])|;", " ".join(block.split())):
            is_told = HAPPENED.search(sentence) and CARD.search(sentence)
            is_figure = FIGURE.search(sentence) and not sentence.startswith("On the CPU")
            if (is_told and not DENIED.search(sentence)) or is_figure:
                found.append(sentence)
    return found


def test_nothing_is_claimed_to_have_run_on_hardware() -> None:
    assert claims(PAGE) == []
    assert "nothing of the Ascend backend was run on hardware" in PAGE


@pytest.mark.parametrize(
    "claim",
    [
        "The demo ran on an Ascend910B2.",
        "All of it was tested on a card of the Atlas A2 series.",
        "A round takes 21.5 ms.",
        "With graphs bfloat16 gave Recall@10 0.1654.",
        "| capture, update and replay | verified on hardware |",
        "Fused attention reaches 210 TFLOP/s.",
    ],
)
def test_a_claim_is_seen(claim: str) -> None:
    before, title, after = PAGE.partition("## What to expect\n")
    assert len(claims(f"{before}{title}\n{claim}\n\n{after}")) == 1


def test_the_table_of_providers_names_no_hardware() -> None:
    """`ran on`, the last column of ops/ascend/README.md; FIRST_DAY.md refers to it."""
    page = (ROOT / "ops" / "ascend" / "README.md").read_text(encoding="utf-8")
    table = page.partition("| ran on |\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert len(table) > 20
    assert {row.rstrip("| ").rpartition(" | ")[2] for row in table} == {"not run on hardware"}
