"""The configuration: unknown keys, wrong types, ranges, overrides, origins, relative paths."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from xgr_runtime.config import RuntimeConfig, load_config
from xgr_runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def write(folder: Path, tree: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    return path


def sections() -> Iterator[str]:
    config = RuntimeConfig()
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(getattr(config, field.name)):
            yield field.name


def test_defaults_are_valid() -> None:
    resolved = load_config(None)
    assert resolved.config == RuntimeConfig()
    assert resolved.origins == {}


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n")).config == RuntimeConfig()


def test_values_are_read(tmp_path: Path) -> None:
    tree = {
        "device": "cpu",
        "template": {"prefix_token_ids": [1, 2]},
        "search": {"beam_width": 20, "normalization": "valid"},
        "scheduler": {"max_wait_ms": 3},
    }
    config = RuntimeConfig.from_yaml(write(tmp_path, tree))
    assert config.template.prefix_token_ids == (1, 2)
    assert (config.search.beam_width, config.search.normalization) == (20, "valid")
    assert config.scheduler.max_wait_ms == 3.0
    assert isinstance(config.scheduler.max_wait_ms, float)


def test_an_unknown_key_at_the_top(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown option devise; did you mean device"):
        load_config(write(tmp_path, {"devise": "cpu"}))


@pytest.mark.parametrize("section", sorted(sections()))
def test_an_unknown_key_in_every_section(tmp_path: Path, section: str) -> None:
    known = dataclasses.fields(getattr(RuntimeConfig(), section))[0].name
    wrong = known[:-1] + "x" + known[-1]
    with pytest.raises(
        ConfigError, match=f"unknown option {section}.{wrong}; did you mean {section}.{known}"
    ):
        load_config(write(tmp_path, {section: {wrong: 1}}))


def test_a_key_like_no_other_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown option service\.qqqq; known: host, port, drain_s"
    ):
        load_config(write(tmp_path, {"service": {"qqqq": 1}}))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"search": {"beam_width": "50"}}, "search.beam_width must be a int, got '50'"),
        ({"search": {"beam_width": True}}, "search.beam_width must be a int, got True"),
        ({"search": {"beam_width": 50.0}}, "search.beam_width must be a int, got 50.0"),
        ({"search": {"beam_width": None}}, "search.beam_width must be a int, got None"),
        ({"ops": {"allow_reference": 1}}, "ops.allow_reference must be a bool, got 1"),
        ({"ops": {"allow_reference": "yes"}}, "ops.allow_reference must be a bool, got 'yes'"),
        ({"model": {"path": 5}}, "model.path must be a str, got 5"),
        ({"scheduler": {"max_wait_ms": "2"}}, "scheduler.max_wait_ms must be a float, got '2'"),
        ({"scheduler": {"max_wait_ms": float("nan")}}, "must be a number, got nan"),
        ({"template": {"prefix_token_ids": 3}}, "template.prefix_token_ids must be a list, got 3"),
        (
            {"template": {"suffix_token_ids": [1, "a"]}},
            r"template.suffix_token_ids\[1\] must be a int",
        ),
        ({"catalogs": ["a"]}, "catalogs must be a mapping"),
        ({"catalogs": {"a": 1}}, "catalogs.a must be a str, got 1"),
        ({"model": "path"}, "model must be a section, got 'path'"),
        ({"model": None}, "model must be a section, got None"),
        ({"device": "gpu"}, "device must be one of auto, npu, cuda, cpu, got 'gpu'"),
        ({"search": {"normalization": "softmax"}}, "must be one of vocab, level, valid"),
        ([1, 2], "must hold a mapping of options, got list"),
        ("a: [", "is not YAML"),
    ],
)
def test_wrong_types(tmp_path: Path, tree: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, tree))


def positive_limits() -> list[str]:
    return [f"limits.{field.name}" for field in dataclasses.fields(RuntimeConfig().limits)]


@pytest.mark.parametrize(
    "name",
    [
        *positive_limits(),
        "scheduler.max_queue",
        "scheduler.max_batch_histories",
        "scheduler.max_batch_tokens",
        "scheduler.max_batch_rows",
        "cache.page_size_tokens",
        "cache.catalog_slots",
        "cache.rule_rows",
        "search.beam_width",
        "search.num_results",
    ],
)
def test_what_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be in \[\d+, \d+\], got 0"):
        load_config(None, [f"{name}=0"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["service.port=65536"], r"service.port must be in \[0, 65535\], got 65536"),
        (["service.port=-1"], "service.port must be in"),
        (["scheduler.max_wait_ms=-1"], r"scheduler.max_wait_ms must be in \[0, 60000\], got -1"),
        (["cache.catalog_headroom=0.5"], r"cache.catalog_headroom must be in \[1, 16\], got 0.5"),
        (
            ["search.beam_width=2000", "limits.max_num_results=9000"],
            r"search.beam_width must not exceed limits.max_beam_width \(1024\), got 2000",
        ),
        (
            ["limits.max_beam_width=9000"],
            "limits.max_beam_width must not exceed scheduler.max_batch_rows",
        ),
        (["limits.max_prompt_tokens=9000"], "must not exceed scheduler.max_batch_tokens"),
        (["search.num_results=9000"], "search.num_results must not exceed limits.max_num_results"),
        (["scheduler.max_wait_ms=.inf"], "scheduler.max_wait_ms must be in .* got inf"),
        (["scheduler.patience_ms=-1"], "scheduler.patience_ms must be in"),
        (["service.drain_s=.inf"], "service.drain_s must be in"),
        (["cpu_threads=-1"], "cpu_threads must be in"),
        (["cache.max_levels=9"], r"cache.max_levels must be in \[0, 8\], got 9"),
        (["cache.num_pages=-5"], "cache.num_pages must be in"),
        (["cache.num_pages=256"], "cache.num_pages must be 0 or at least 257, .* got 256"),
        (["default_catalog=x"], r"default_catalog 'x' is not among catalogs \(none\)"),
    ],
)
def test_ranges(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


def test_overrides_win_and_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, {"search": {"beam_width": 20, "num_results": 5}})
    overrides = ["search.beam_width=30", "template.prefix_token_ids=[1, 2]", "catalogs.main=/x.xgr"]
    resolved = load_config(path, overrides)
    assert resolved.config.search.beam_width == 30
    assert resolved.config.template.prefix_token_ids == (1, 2)
    assert resolved.config.catalogs == {"main": "/x.xgr"}
    lines = resolved.lines()
    assert "search.beam_width = 30  # --set" in lines
    assert f"search.num_results = 5  # {path}" in lines
    assert "search.normalization = 'vocab'  # default" in lines


def test_every_field_has_a_line() -> None:
    names = [line.split(" = ")[0] for line in load_config(None).lines()]
    assert len(names) == len(set(names))
    for section in sections():
        for field in dataclasses.fields(getattr(RuntimeConfig(), section)):
            assert f"{section}.{field.name}" in names


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("search.beam_width", "must look like a.b=value"),
        ("=3", "must look like a.b=value"),
        ("search.beam_with=3", "did you mean search.beam_width"),
        ("device.kind=cpu", "device must be one of"),
        ("search.beam_width=[", "is not YAML"),
    ],
)
def test_wrong_overrides(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [override])


def test_an_override_below_a_value(tmp_path: Path) -> None:
    path = write(tmp_path, {"search": {"beam_width": 20}})
    with pytest.raises(ConfigError, match="'beam_width' is a value, not a section"):
        load_config(path, ["search.beam_width.x=1"])


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    tree = {"model": {"path": "model"}, "catalogs": {"a": "../a.xgr", "b": "/b.xgr"}}
    config = load_config(write(tmp_path / "configs", tree)).config
    assert config.model.path == str(tmp_path / "configs" / "model")
    assert config.catalogs["a"] == str(tmp_path / "configs" / ".." / "a.xgr")
    assert config.catalogs["b"] == "/b.xgr"


def test_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration .*absent.yaml: No such file"):
        load_config(tmp_path / "absent.yaml")


def test_a_configuration_is_frozen(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, {"catalogs": {"a": "/a.xgr"}})).config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.search.beam_width = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.catalogs["b"] = "/b.xgr"  # type: ignore[index]


def test_a_key_given_twice(tmp_path: Path) -> None:
    text = "search:\n  beam_width: 10\n  beam_width: 20\n"
    with pytest.raises(ConfigError, match="option 'beam_width' is given twice"):
        load_config(write(tmp_path, text))
