"""JSON files of a checkpoint: what is refused, and how it is named."""

from pathlib import Path

import pytest

from xgr_runtime.errors import CheckpointError
from xgr_runtime.models.checkpoint_files import find_weight_files, read_json


def refuse(path: Path, text: str, *parts: str) -> None:
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_json(path)
    for part in (str(path), *parts):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"a":['])
def test_endless_nesting(tmp_path: Path, opening: str) -> None:
    refuse(tmp_path / "config.json", opening * 200_000, "is nested too deep")


def test_a_key_given_twice(tmp_path: Path) -> None:
    refuse(tmp_path / "config.json", '{"a": 1, "b": 2, "a": 1}', "gives 'a' twice")
    refuse(tmp_path / "config.json", '{"x": [{"a": 1, "a": 2}]}', "gives 'a' twice")


def test_integers_too_long_for_any_count_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{{"a": {"9" * 5000}, "b": -{"9" * 39}, "c": 7}}')
    assert read_json(path) == {"a": "9" * 5000, "b": -int("9" * 39), "c": 7}


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000, "\ud800"])
def test_paths_that_no_file_has(name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        read_json(Path(name) / "config.json")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CheckpointError, match=r"config.json is not UTF-8: "):
        read_json(tmp_path / "config.json")


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        find_weight_files(tmp_path)
