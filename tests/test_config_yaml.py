"""YAML of configurations: what is refused, in one line that says where; and what stays plain text."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from xgr_runtime.config import load_config
from xgr_runtime.config_yaml import MAX_DEPTH, MAX_FILE_BYTES, parse_yaml
from xgr_runtime.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

DIGITS = "9" * 5000
BAD: dict[str, tuple[str, str]] = {
    "syntax": ("search: {beam_width: [1, 2}\n", ":1:27 is not YAML: "),
    "unfinished": ("search:\n  beam_width: [\n", ":3:1 is not YAML: "),
    "tab": ("search:\n\tbeam_width: 3\n", ":2:1 is not YAML: "),
    "two documents": (
        "device: cpu\n---\ndevice: cpu\n",
        ":2:1 is not YAML: expected a single document",
    ),
    "control character": ("device: c\x01pu\n", " is not YAML: character 10 is U+0001, "),
    "alias": ("model: {path: &a x, name: *a}\n", ":1:27: alias *a is not supported"),
    "recursive alias": ("model: &a {path: *a}\n", ":1:18: alias *a is not supported"),
    "recursive list": ("template: {prefix_token_ids: &a [*a]}\n", ":1:34: alias *a"),
    "undefined alias": ("device: *nowhere\n", ":1:9: alias *nowhere is not supported"),
    "many digits": (f"search:\n  beam_width: {DIGITS}\n", ":2:15: a number must be "),
    "many digits, negative": (f"cpu_threads: -{DIGITS}\n", ":1:14: a number must be "),
    "many digits as a key": (f"catalogs:\n  ? {DIGITS}\n  : a\n", ":2:5: a number must be "),
    "many digits, float": (f"service: {{drain_s: {DIGITS}.5}}\n", ":1:20: a number must be "),
    "base 60": ("service: {port: 22:22}\n", ":1:17: a number must be "),
    "base 60, float": ("service: {drain_s: 1:30.5}\n", ":1:20: a number must be "),
    "base 8": ("service:\n  port: 0755\n", ":2:9: a number must be "),
    "deep list": ("model: " + "[" * 3000, f":1:{8 + MAX_DEPTH - 1}: nested deeper than"),
    "deep mapping": ("{a: " * 3000, ":1:62: nested deeper than"),
    "deep blocks": ("".join(" " * i + "a:\n" for i in range(300)), ":16:16: nested deeper than"),
    "tag of a date": ("model: {version: !!timestamp x}\n", ":1:18: tag "),
    "tag of an integer": ("cpu_threads: !!int abc\n", ":1:14: tag "),
    "tag of a bool": ("ops: {allow_reference: !!bool x}\n", ":1:24: tag "),
    "tag of bytes": ("device: !!binary '='\n", ":1:9: tag "),
    "tag of a set": ("model: !!set {path}\n", ":1:8: tag "),
    "tag of Python": ("device: !!python/object:os.system x\n", ":1:9: tag "),
    "twice": ("search:\n  beam_width: 1\n  beam_width: 2\n", ":3:3: option 'beam_width' is given"),
    "twice, quoted": ("search: {beam_width: 1, 'beam_width': 2}\n", ":1:25: option 'beam_width'"),
    "a list as a key": ("? [a]\n: 1\n", ":1:3: a key must be a name"),
    "merge": ("search: {<<: {beam_width: 3}}\n", "unknown option search.<<"),
}


@pytest.mark.parametrize("case", BAD)
def test_one_line_that_says_where(tmp_path: Path, case: str) -> None:
    text, part = BAD[case]
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert (f"{path}{part}" if part[0] in ": " else part) in message
    assert "\n" not in message
    assert len(message) < 300 + len(str(path))


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("limits={max_tags: 3, max_tags: 4}", ":1:15: option 'max_tags' is given twice"),
        ("model.version=!!timestamp x", ":1:1: tag "),
        ("model={path: *a}", ":1:8: alias *a is not supported"),
        (f"search.beam_width={DIGITS}", ":1:1: a number must be "),
        ("template.prefix_token_ids=" + "[" * 3000, "nested deeper than"),
        ("search={beam_width: 3", " is not YAML: "),
        ("model.path=a\0b", " is not YAML: character 2 "),
    ],
)
def test_overrides_are_as_strict(override: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    message = str(caught.value)
    assert message.startswith("the value of override ")
    assert part in message
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize("text", ["2020-99-99", "2020-01-02", "2020-01-02 03:04:05", "=", "<<"])
def test_dates_and_signs_are_text(text: str) -> None:
    assert load_config(None, [f"model.version={text}"]).config.model.version == text


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("-7", -7), ("1_000", 1000), ("0x10", 16), ("9" * 40, int("9" * 40))],
)
def test_plain_integers(text: str, value: int) -> None:
    assert parse_yaml(text, "here") == value


def test_nesting_up_to_the_limit() -> None:
    value = parse_yaml("[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1), "here")
    for _ in range(MAX_DEPTH - 1):
        (value,) = value
    assert value == 1


def test_files_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"device: \xff\n")
    with pytest.raises(ConfigError, match="is not YAML: 'utf-8' codec"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"cannot read configuration .*: Is a directory"):
        load_config(tmp_path)
    with pytest.raises(
        ConfigError, match=r"cannot read configuration 'a\\x00b': embedded null byte"
    ):
        load_config("a\0b")


def test_a_pipe_of_the_shell_is_a_file_too() -> None:
    """`--config <(...)`."""
    reader, writer = os.pipe()
    os.write(writer, b"search: {beam_width: 7}\n")
    os.close(writer)
    assert load_config(f"/dev/fd/{reader}").config.search.beam_width == 7
    os.close(reader)


def test_files_that_have_no_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/dev/zero: a file of at most 1048576 bytes is needed"):
        load_config("/dev/zero")
    path = tmp_path / "c.yaml"
    path.write_text("device: cpu\n#" + "x" * (MAX_FILE_BYTES - 13))
    assert load_config(path).config.device == "cpu"
    with path.open("a") as file:
        file.write("x")
    with pytest.raises(ConfigError, match="a file of at most 1048576 bytes is needed"):
        load_config(path)


def test_line_ends_of_any_system(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for end in (b"\n", b"\r\n", b"\r"):
        path.write_bytes(end.join([b"device: cpu", b"model:", b"  name: x", b""]))
        config = load_config(path).config
        assert (config.device, config.model.name) == ("cpu", "x")
