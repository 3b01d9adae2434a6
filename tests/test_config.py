"""The configuration: unknown keys, wrong types, ranges, overrides, origins, relative paths."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from xgr_runtime.config import (
    CacheConfig,
    ModelConfig,
    RuntimeConfig,
    TemplateConfig,
    load_config,
)
from xgr_runtime.config_check import RANGES, check_config
from xgr_runtime.errors import ConfigError, shown
from xgr_runtime.hal.discovery import DEVICE_CHOICES

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
    path = write(tmp_path, "cpu_threads: 1\n\ndevise: cpu\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"unknown option devise ({path}:3); did you mean device?"


@pytest.mark.parametrize("section", sorted(sections()))
def test_an_unknown_key_in_every_section(tmp_path: Path, section: str) -> None:
    known = dataclasses.fields(getattr(RuntimeConfig(), section))[0].name
    wrong = known[:-1] + "x" + known[-1]
    path = write(tmp_path, {section: {wrong: 1}})
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    where = f"({path}:2)"
    assert str(caught.value) == (
        f"unknown option {section}.{wrong} {where}; did you mean {section}.{known}?"
    )


def test_a_key_like_no_other_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown option service\.qqqq \(.*:2\); known: host, port, drain_s"
    ):
        load_config(write(tmp_path, {"service": {"qqqq": 1}}))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"search": {"beam_width": "50"}}, "search.beam_width must be a whole number, got '50'"),
        ({"search": {"beam_width": True}}, "search.beam_width must be a whole number, got True"),
        ({"search": {"beam_width": 50.0}}, "search.beam_width must be a whole number, got 50.0"),
        ({"search": {"beam_width": None}}, "search.beam_width must be a whole number, got None"),
        ({"ops": {"allow_reference": 1}}, "ops.allow_reference must be true or false, got 1"),
        (
            {"ops": {"allow_reference": "yes"}},
            "ops.allow_reference must be true or false, got 'yes'",
        ),
        ({"model": {"path": 5}}, "model.path must be a text, got 5"),
        ({"scheduler": {"max_wait_ms": "2"}}, "scheduler.max_wait_ms must be a number, got '2'"),
        ({"scheduler": {"max_wait_ms": float("nan")}}, "must be a number, got nan"),
        ({"template": {"prefix_token_ids": 3}}, "template.prefix_token_ids must be a list, got 3"),
        (
            {"template": {"suffix_token_ids": [1, "a"]}},
            r"template.suffix_token_ids\[1\] must be a whole number",
        ),
        ({"catalogs": ["a"]}, "catalogs must be a mapping"),
        ({"catalogs": {"a": 1}}, "catalogs.a must be a text, got 1"),
        ({"model": "path"}, "model must be a section, got 'path'"),
        ({"model": None}, "model must be a section, got None"),
        ({"device": "gpu"}, f"device must be one of {', '.join(DEVICE_CHOICES)}, got 'gpu'"),
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
        (["cache.num_pages=2147483648"], r"cache.num_pages must be in \[0, 4194304\]"),
        (["scheduler.max_batch_tokens=2147483648"], r"max_batch_tokens must be in \[1, 1048576\]"),
        (["scheduler.max_batch_rows=2147483648"], r"max_batch_rows must be in \[1, 1048576\]"),
        (["catalogs={'': a.xgr}"], "a name in catalogs must have a character at least"),
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
    assert f"search.num_results = 5  # {path}:3" in lines
    assert "catalogs.main = '/x.xgr'  # --set" in lines
    assert "search.normalization = 'vocab'  # default" in lines


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("beam_width=3", "search.beam_width"),
        ("service.max_queue=3", "scheduler.max_queue"),
        ("scheduler.num_page=3", "cache.num_pages"),
        ("model.prefix_token_ids=[1]", "template.prefix_token_ids"),
    ],
)
def test_an_option_in_the_wrong_section(override: str, suggestion: str) -> None:
    name = override.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert str(caught.value) == f"unknown option {name}; did you mean {suggestion}?"


def test_every_entry_of_a_mapping_has_its_own_origin(tmp_path: Path) -> None:
    """Also one whose name has dots, spaces or a line break, which an override of another does not touch."""
    path = write(tmp_path, 'catalogs:\n  a: /a.xgr\n\n  "a.b c": /b.xgr\n  "x\\ny": /c.xgr\n')
    lines = load_config(path, ["catalogs.new=/d.xgr", "catalogs.a=/e.xgr"]).lines()
    assert [line for line in lines if line.startswith("catalogs")] == [
        "catalogs.a = '/e.xgr'  # --set",
        f"catalogs.\"a.b c\" = '/b.xgr'  # {path}:4",
        f"catalogs.\"x\\ny\" = '/c.xgr'  # {path}:5",
        "catalogs.new = '/d.xgr'  # --set",
    ]
    lines = load_config(path, ["catalogs={one: /f.xgr}"]).lines()
    assert [line for line in lines if line.startswith("catalogs")] == [
        "catalogs.one = '/f.xgr'  # --set"
    ]


def test_lists_and_empty_mappings_are_one_value(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "template:\n  prefix_token_ids:\n  - 1\n  - 2\n  suffix_token_ids: [3]\ncatalogs: {}\n",
    )
    lines = load_config(path).lines()
    assert f"template.prefix_token_ids = (1, 2)  # {path}:2" in lines
    assert f"template.suffix_token_ids = (3,)  # {path}:5" in lines
    assert f"catalogs = {{}}  # {path}:6" in lines


def test_no_environment_variable_changes_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_config(None).lines()
    for name in ("DEVICE", "XGR_DEVICE", "XGR_SEARCH_BEAM_WIDTH", "search.beam_width"):
        monkeypatch.setenv(name, "7")
    assert load_config(None).lines() == before


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


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(TemplateConfig)][:-1])
@pytest.mark.parametrize("token", [-1, 2**31, 99999999999999999999])
def test_template_tokens_outside_32_bits(field: str, token: int) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"template.{field}\[1\] must be a token id in \[0, 2147483647\], got {token}",
    ):
        load_config(None, [f"template.{field}=[1, {token}]"])


def test_the_largest_template_token() -> None:
    config = load_config(None, [f"template.prefix_token_ids=[0, {2**31 - 1}]"]).config
    assert config.template.prefix_token_ids == (0, 2**31 - 1)


@pytest.mark.parametrize("text", [r"a\0b", r"\ud800"])
@pytest.mark.parametrize(
    "name", ["model.path", "catalogs.main", "model.version", "template.version", "service.host"]
)
def test_text_that_no_path_or_reply_can_carry(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} must be text without NUL characters"):
        load_config(None, [f'{name}="{text}"'])


def test_a_path_may_hold_bytes_that_are_not_utf8() -> None:
    path = os.fsdecode(b"/models/caf\xe9")
    config = dataclasses.replace(RuntimeConfig(), model=ModelConfig(path=path))
    check_config(config)


def numeric_options() -> list[str]:
    return [name for name in RANGES if "." in name]


@pytest.mark.parametrize(
    "value",
    [True, "8", 1e300, float("nan"), float("inf"), 1 << 20000, -(10**400)],
    ids=shown,
)
@pytest.mark.parametrize("name", numeric_options())
def test_numbers_of_a_configuration_built_by_hand(name: str, value: Any) -> None:
    section, option = name.split(".")
    part = dataclasses.replace(getattr(RuntimeConfig(), section), **{option: value})
    with pytest.raises(ConfigError, match=rf"^{name} must be "):
        check_config(dataclasses.replace(RuntimeConfig(), **{section: part}))


def test_a_fraction_where_an_integer_is_meant_built_by_hand() -> None:
    config = dataclasses.replace(RuntimeConfig(), cache=CacheConfig(num_pages=300.5))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cache.num_pages must be an integer, got 300.5"):
        check_config(config)


FRACTIONS = [
    f"{section}.{field.name}"
    for section in sections()
    for field in dataclasses.fields(getattr(RuntimeConfig(), section))
    if isinstance(getattr(getattr(RuntimeConfig(), section), field.name), float)
]


@pytest.mark.parametrize("text", [".nan", ".inf", "-.inf", "1.0e+999", "1.0", "true", '"1"', "[1]"])
def test_what_is_no_integer(text: str) -> None:
    for name in RANGES:
        if name in FRACTIONS:
            continue
        with pytest.raises(ConfigError, match=rf"^{name} must be ") as caught:
            load_config(None, [f"{name}={text}"])
        assert "\n" not in str(caught.value)


def test_an_override_of_a_section_replaces_its_origins(tmp_path: Path) -> None:
    path = write(tmp_path, {"limits": {"max_tags": 5, "max_exclusions": 7}})
    resolved = load_config(path, ["limits={max_tags: 6}"])
    assert resolved.origins == {"limits": "--set", "limits.max_tags": "--set"}
    assert resolved.config.limits.max_exclusions == RuntimeConfig().limits.max_exclusions


def test_messages_stay_short() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"search.beam_width={list(range(10000))}"])
    assert len(str(caught.value)) < 300
    with pytest.raises(ConfigError) as caught:
        load_config(None, ['search={"a\\nb": 1}'])
    assert r"unknown option search.'a\nb'" in str(caught.value)
