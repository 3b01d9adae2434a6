"""The files that come with the package, as an editable installation finds them; tests/test_wheel.py does it for a wheel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xgr_runtime import shipped
from xgr_runtime.cli import main
from xgr_runtime.config import load_config
from xgr_runtime.errors import ConfigError
from xgr_runtime.xbeam.catalog import Catalog

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "configs" / "demo"


def output_of(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_the_checkout_is_where_they_are() -> None:
    assert shipped.folder("configs") == ROOT / "configs"
    assert shipped.folder("proto") == ROOT / "proto"


def test_proto_prints_the_import_root(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(output_of(capsys, ["proto"]).rstrip("\n"))
    assert (root / "xgr" / "v1" / "recommend.proto").is_file()


def test_config_reference_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "configs" / "reference.yaml").read_text(encoding="utf-8")
    assert output_of(capsys, ["config", "reference"]) == text


def test_a_name_is_the_file_of_that_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").write_text("device: cpu\n", encoding="utf-8")
    (tmp_path / "mine").write_text("device: cpu\n", encoding="utf-8")
    assert shipped.config_names() == [
        *("ascend-910b", "demo", "demo-ascend-910b", "h200", "reference")
    ]
    assert shipped.config_file("demo") == str(ROOT / "configs" / "demo.yaml")
    assert [shipped.config_file(path) for path in ("./demo", "demo.yaml", "mine", "")] == [
        *("./demo", "demo.yaml", "mine", "")
    ]
    shown = output_of(capsys, ["config", "show", "--config", "demo"])
    assert f"default_catalog = 'movielens'  # {ROOT / 'configs' / 'demo.yaml'}" in shown


@pytest.mark.parametrize("command", [["serve"], ["config", "show"]])
def test_a_word_that_is_neither_names_those_known(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main([*command, "--config", "dmo"]) == 2
    error = capsys.readouterr().err
    assert "no configuration is named 'dmo' (known: ascend-910b, demo, " in error
    with pytest.raises(ConfigError):
        shipped.config_file("dmo")


def test_the_demos_catalogue_is_what_its_items_compile_to(tmp_path: Path) -> None:
    """By digest: the header may gain fields. configs/demo.yaml has the command that makes it anew."""
    config = load_config(shipped.config_file("demo")).config
    command = ["catalog", "build", str(DEMO / "items.jsonl"), str(tmp_path / "new.xgr")]
    assert main([*command, "--token-offsets", "8,72,136", "--codes", "64,64,64"]) == 0
    with (
        Catalog.open(config.catalogs["movielens"]) as committed,
        Catalog.open(tmp_path / "new.xgr") as new,
    ):
        committed.verify()
        assert new.digest == committed.digest
