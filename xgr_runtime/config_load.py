"""From text to dataclasses: the YAML file and the overrides as one tree of plain values, that tree as typed sections.

Nothing here knows an option but for those that are paths. Every value keeps where it came from, so that an error and
`xgr config show` can name the line.
"""

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from xgr_runtime.config_yaml import parse_yaml, read_yaml_file
from xgr_runtime.errors import ConfigError, shown

OVERRIDE = "--set"
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_T = TypeVar("_T")


def read_tree(
    path: str | Path | None, overrides: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of a file (None = no file) with the overrides applied, and the origin of each by its dotted name.

    Relative paths of the file are taken from its folder. Raises ConfigError.
    """
    origins: dict[str, str] = {}
    tree: dict[str, Any] = {}
    if path is not None:
        tree, found = read_yaml_file(path)
        origins = {_dotted(keys): f"{path}:{line}" for keys, line in found.items()}
        _resolve_paths(tree, Path(path).resolve().parent)
    for text in overrides:
        keys, value = _parse_override(text)
        _set(tree, keys, value)
        name = _dotted(keys)
        for old in [known for known in origins if known.startswith(f"{name}.")]:
            del origins[old]
        origins[name] = OVERRIDE
        _note_override(value, keys, origins)
    return tree, origins


def build(root: type[_T], tree: dict[str, Any], origins: Mapping[str, str]) -> _T:
    """The dataclass of a tree, every value of its declared type. Raises ConfigError naming the option."""
    return _Builder(root, origins).section(root, tree, "")


def flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted name, value) of every field below a dataclass, and of every entry of a mapping."""
    if dataclasses.is_dataclass(value):
        rows = []
        for f in dataclasses.fields(value):
            rows += flatten(getattr(value, f.name), f"{prefix}.{f.name}" if prefix else f.name)
        return rows
    if isinstance(value, Mapping):
        return [(f"{prefix}.{_dotted([key])}", entry) for key, entry in value.items()] or [
            (prefix, {})
        ]
    return [(prefix, value)]


def _note_override(value: Any, keys: tuple[str, ...], origins: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            own = (*keys, str(key))
            origins[_dotted(own)] = OVERRIDE
            _note_override(inner, own, origins)


def _dotted(keys: Sequence[str]) -> str:
    """The name of an option; keys that could be taken for several, or for something else, are quoted."""
    return ".".join(key if _PLAIN_KEY.fullmatch(key) else json.dumps(key) for key in keys)


def _resolve_paths(tree: dict[str, Any], folder: Path) -> None:
    model, catalogs, service = tree.get("model"), tree.get("catalogs"), tree.get("service")
    if isinstance(service, dict):
        path = service.get("catalog_folder")
        if isinstance(path, str) and path:
            service["catalog_folder"] = str(folder / path)
    if isinstance(model, dict) and isinstance(model.get("path"), str) and model["path"]:
        model["path"] = str(folder / model["path"])
    if isinstance(catalogs, dict):
        for name, value in catalogs.items():
            if isinstance(value, str):
                catalogs[name] = str(folder / value)


def _parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"an override must look like a.b=value, got {shown(text)}")
    keys = tuple(name.strip().split("."))
    return keys, parse_yaml(value, f"the value of override {shown(text)}")


def _set(tree: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    *parents, last = keys
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{shown('.'.join(keys))}: {shown(parent)} is a value, not a section")
    tree[last] = value


class _Builder:
    """Builds the sections of one root."""

    def __init__(self, root: type[Any], origins: Mapping[str, str]) -> None:
        self._root, self._origins = root, origins

    def section(self, cls: type[_T], tree: Any, prefix: str) -> _T:
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{prefix.rstrip('.') or 'the configuration'} must be a section, got {shown(tree)}"
            )
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for key, value in tree.items():
            if key not in hints:
                origin = self._origins.get(f"{prefix}{_dotted([str(key)])}", OVERRIDE)
                where = "" if origin == OVERRIDE else f" ({origin})"
                hint = self._suggestion(str(key)[:80], prefix, list(hints))
                raise ConfigError(f"unknown option {prefix}{_key(key)}{where}; {hint}")
            values[key] = self._convert(hints[key], value, f"{prefix}{key}")
        return cls(**values)

    def _suggestion(self, key: str, prefix: str, known: list[str]) -> str:
        """What an unknown key of a section may have meant: a similar one beside it, else one of that name elsewhere."""
        close = difflib.get_close_matches(key, known, n=1)
        if close:
            return f"did you mean {prefix}{close[0]}?"
        elsewhere = {name.rpartition(".")[2]: name for name, _ in flatten(self._root())}
        close = difflib.get_close_matches(key, list(elsewhere), n=1, cutoff=0.85)
        if close:
            return f"did you mean {elsewhere[close[0]]}?"
        return f"known: {', '.join(known)}"

    def _convert(self, hint: Any, value: Any, name: str) -> Any:
        if dataclasses.is_dataclass(hint):
            return self.section(typing.cast("type[Any]", hint), value, f"{name}.")
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is Literal:
            if value not in args:
                raise ConfigError(
                    f"{name} must be one of {', '.join(map(str, args))}, got {shown(value)}"
                )
            return value
        if origin is tuple:
            if not isinstance(value, (list, tuple)):
                raise ConfigError(f"{name} must be a list, got {shown(value)}")
            return tuple(
                self._convert(args[0], element, f"{name}[{i}]") for i, element in enumerate(value)
            )
        if origin is not None and issubclass(origin, Mapping):
            if not isinstance(value, dict):
                raise ConfigError(f"{name} must be a mapping, got {shown(value)}")
            return types.MappingProxyType(
                {
                    self._convert(args[0], k, name): self._convert(args[1], v, f"{name}.{_key(k)}")
                    for k, v in value.items()
                }
            )
        return _scalar(hint, value, name)


def _scalar(hint: type, value: Any, name: str) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        kind = {int: "a whole number", bool: "true or false", str: "a text"}.get(hint, "a number")
        raise ConfigError(f"{name} must be {kind}, got {shown(value)}")
    if hint is float and value != value:
        raise ConfigError(f"{name} must be a number, got nan")
    return value


def _key(key: Any) -> str:
    """A key of the file as messages name it."""
    return key if isinstance(key, str) and key.isprintable() and len(key) <= 80 else shown(key)
