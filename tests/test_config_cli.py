"""`xgr config show` as a command: every value with its origin, overrides, and refusals with exit code 2."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from xgr_runtime.cli import main
from xgr_runtime.config import RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
LINE = re.compile(r"(?P<name>[a-z_.]+) = (?P<value>.*)  # (?P<origin>.+)")
Shown = dict[str, tuple[Any, str]]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> Shown:
    """name -> (value, origin) of every line."""
    assert main(["config", "show", *arguments]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return parse(output.out)


def parse(text: str) -> Shown:
    lines = [LINE.fullmatch(line) for line in text.splitlines()]
    rows = [line.groups() for line in lines if line is not None]
    assert len(rows) == len(lines), "a line a value"
    values = {name: (ast.literal_eval(value), origin) for name, value, origin in rows}
    assert len(values) == len(rows), "no value twice"
    return values


def defaults() -> Iterator[tuple[str, Any]]:
    """Every value of a configuration by its dotted name."""
    for field in dataclasses.fields(RuntimeConfig()):
        value = getattr(RuntimeConfig(), field.name)
        if dataclasses.is_dataclass(value):
            for inner in dataclasses.fields(value):
                yield f"{field.name}.{inner.name}", getattr(value, inner.name)
        else:
            yield field.name, value


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tree = {
        "device": "cpu",
        "model": {"path": "model"},
        "catalogs": {"films": "films.xgr"},
        "search": {"beam_width": 20},
        "limits": {"max_beam_width": 64},
    }
    path = tmp_path / "service.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def test_without_a_file_everything_is_a_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys) == {name: (value, "default") for name, value in defaults()}


def test_each_value_says_where_it_came_from(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    values = shown(
        capsys, "--config", str(file), "--set", "search.beam_width=30", "--set", "service.port=0"
    )
    changed = {
        "device": ("cpu", f"{file}:3"),
        "model.path": (str(file.parent / "model"), f"{file}:7"),
        "catalogs.films": (str(file.parent / "films.xgr"), f"{file}:2"),
        "search.beam_width": (30, "--set"),
        "limits.max_beam_width": (64, f"{file}:5"),
        "service.port": (0, "--set"),
    }
    unchanged = {name: (value, "default") for name, value in defaults() if name != "catalogs"}
    assert values == unchanged | changed


def test_the_last_override_wins(capsys: pytest.CaptureFixture[str]) -> None:
    values = shown(capsys, "--set", "service.port=1", "--set", "service.port=2")
    assert values["service.port"] == (2, "--set")


def test_as_a_process(file: Path) -> None:
    done = run(["--config", str(file), "--set", "template.prefix_token_ids=[1, 2]"])
    assert (done.returncode, done.stderr) == (0, "")
    assert parse(done.stdout)["template.prefix_token_ids"] == ((1, 2), "--set")


def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xgr_runtime.cli", "config", "show", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_unknown_key_ends_the_process_with_a_suggestion() -> None:
    done = run(["--set", "search.beam_widht=5"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "xgr: ConfigError: unknown option search.beam_widht; did you mean search.beam_width?\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "serch.beam_width=5"], "unknown option serch; did you mean search?"),
        (["--set", "search.beam_width=wide"], "search.beam_width must be"),
        (["--set", "search.beam_width"], "an override must look like a.b=value"),
        (["--config", "absent.yaml"], "cannot read configuration absent.yaml: No such file"),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["config", "show", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("xgr: ConfigError: ")
    assert message in output.err
    assert output.err.count("\n") == 1


def test_an_unknown_key_in_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("scheduler:\n  max_batch_row: 5\n", encoding="utf-8")
    assert main(["config", "show", "--config", str(path)]) == 2
    assert "did you mean scheduler.max_batch_rows?" in capsys.readouterr().err


def test_config_alone_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["config"])
    assert ended.value.code == 2
    assert "config_command" in capsys.readouterr().err
