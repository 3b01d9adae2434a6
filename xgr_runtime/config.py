"""The configuration: frozen dataclasses, strict YAML, dotted overrides, and the origin of every value.

Built once and never mutated. An unknown key is an error with a suggestion, because a misspelt limit that is silently
ignored is found in production.
"""

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from xgr_runtime.config_check import check_config
from xgr_runtime.config_yaml import parse_yaml, read_yaml_file
from xgr_runtime.errors import ConfigError, shown
from xgr_runtime.types import Normalization, OnOverflow, OnUnknown

DEFAULT, OVERRIDE = "default", "--set"
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class ModelConfig:
    """path: Hugging Face directory. name and version appear in replies. dtype: of weights and KV on the device."""

    path: str = ""
    name: str = "default"
    version: str = ""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


@dataclass(frozen=True)
class TemplateConfig:
    """Token ids around a history: prefix, then per item begin + SID tokens + end, separator between items, suffix."""

    prefix_token_ids: tuple[int, ...] = ()
    item_begin_token_ids: tuple[int, ...] = ()
    item_end_token_ids: tuple[int, ...] = ()
    separator_token_ids: tuple[int, ...] = ()
    suffix_token_ids: tuple[int, ...] = ()
    version: str = ""


@dataclass(frozen=True)
class SearchDefaults:
    """Used where a request leaves a field out."""

    beam_width: int = 50
    num_results: int = 10
    normalization: Normalization = "vocab"
    on_overflow: OnOverflow = "truncate"
    on_unknown: OnUnknown = "skip"


@dataclass(frozen=True)
class LimitsConfig:
    """What one request may ask for, and all requests together; beyond it a request is refused by the limit's name.

    max_metadata_bytes: headers of one call. max_waiting_bytes: messages of all requests that wait for their answer. max_concurrent_streams (calls open at once on one
    connection) and max_connections are kept by gRPC, which names nothing: a call waits or ends UNAVAILABLE, a further
    connection is closed.
    """

    max_beam_width: int = 1024
    max_num_results: int = 2048
    max_history_items: int = 1024
    max_input_items: int = 20000
    max_prompt_tokens: int = 4096
    max_exclusions: int = 20000
    max_key_length: int = 256
    max_tags: int = 64
    max_tag_length: int = 256
    max_searches: int = 1
    max_name_length: int = 256
    max_request_id_length: int = 128
    max_message_bytes: int = 4 * 1024 * 1024
    max_metadata_bytes: int = 16384
    max_waiting_bytes: int = 256 * 1024 * 1024
    max_concurrent_streams: int = 2048
    max_connections: int = 900


@dataclass(frozen=True)
class SchedulerConfig:
    """A batch is closed when a capacity is reached or its first request has waited max_wait_ms.

    max_queue: requests accepted and not yet answered. patience_ms: a request is due after it, or at its
    deadline where that is earlier; the earliest due runs first.
    """

    max_queue: int = 1024
    max_batch_histories: int = 8
    max_batch_tokens: int = 8192
    max_batch_rows: int = 8192
    max_wait_ms: float = 2.0
    patience_ms: float = 1000.0


@dataclass(frozen=True)
class CacheConfig:
    """History KV pages, catalogue slots, rule sets.

    num_pages 0: enough for a full batch and prefix_cache_bytes beyond it, which keep histories for returning users while
    prefix_cache is true; a num_pages of your own is all there is, for batches and the cache alike. max_levels 0: as many as the configured catalogues have. catalog_slots and
    catalog_headroom: versions loaded at once per catalogue, and how much larger a later version may be in place.
    """

    page_size_tokens: int = 16
    num_pages: int = 0
    prefix_cache: bool = True
    prefix_cache_bytes: int = 256 * 1024 * 1024
    catalog_slots: int = 2
    catalog_headroom: float = 1.25
    rule_rows: int = 8
    rule_cache_bytes: int = 256 * 1024 * 1024
    dense_level_bytes: int = 8 * 1024 * 1024
    max_levels: int = 0


@dataclass(frozen=True)
class OpsConfig:
    """allow_reference: accept the torch reference of an op on an accelerator (slow; listed as such by `Engine.describe`)."""

    allow_reference: bool = False


@dataclass(frozen=True)
class ServiceConfig:
    """Where `xgr serve` listens and how long it waits. port 0 takes a free port. drain_s: time given to requests at shutdown.

    handshake_s: until a new connection speaks HTTP/2. receive_s: until a call has sent its message. idle_s: until a connection
    without calls is closed. keepalive_s: until a silent client is asked whether it is still there.

    metrics_port: of GET /metrics over HTTP, 0 = off. reflection: describe the services to tools such as grpcurl.
    log_requests: one line per request at level info.

    allow_catalog_admin: offer xgr.v1.CatalogService, which loads files below catalog_folder, to whoever reaches the port.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    drain_s: float = 20.0
    handshake_s: float = 10.0
    receive_s: float = 30.0
    idle_s: float = 600.0
    keepalive_s: float = 60.0
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    reflection: bool = True
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_requests: bool = True
    allow_catalog_admin: bool = False
    catalog_folder: str = ""


@dataclass(frozen=True)
class RuntimeConfig:
    """Everything an Engine and its service are built from. catalogs maps a name to a compiled catalogue file."""

    device: Literal["auto", "npu", "cuda", "cpu"] = "auto"
    cpu_threads: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    template: TemplateConfig = field(default_factory=TemplateConfig)
    catalogs: Mapping[str, str] = field(default_factory=dict)
    default_catalog: str = ""
    search: SearchDefaults = field(default_factory=SearchDefaults)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> "RuntimeConfig":
        """Read a YAML file and apply overrides "a.b=value" (values in YAML syntax)."""
        return load_config(path, overrides).config


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration and where each value that is not a default came from, by dotted name.

    An origin is "FILE:LINE" or "--set". Nothing else changes a value: no environment variable does. No value is a secret.
    """

    config: RuntimeConfig
    origins: Mapping[str, str]

    def lines(self) -> list[str]:
        """One "name = value  # origin" line per field, and per entry of a mapping."""
        return [
            f"{name} = {value!r}  # {self.origins.get(name, DEFAULT)}"
            for name, value in _flatten(self.config, "")
        ]


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Read `path` (None = only defaults), apply overrides, check every value.

    Paths below `model.path` and `catalogs` that are relative are taken from the file's folder. Raises ConfigError.
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
    config = _build(RuntimeConfig, tree, "", origins)
    check_config(config)
    return ResolvedConfig(config, origins)


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


_T = TypeVar("_T")


def _build(cls: type[_T], tree: Any, prefix: str, origins: Mapping[str, str]) -> _T:
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{prefix.rstrip('.') or 'the configuration'} must be a section, got {shown(tree)}"
        )
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in hints:
            origin = origins.get(f"{prefix}{_dotted([str(key)])}", OVERRIDE)
            where = "" if origin == OVERRIDE else f" ({origin})"
            hint = _suggestion(str(key)[:80], prefix, list(hints))
            raise ConfigError(f"unknown option {prefix}{_key(key)}{where}; {hint}")
        values[key] = _convert(hints[key], value, f"{prefix}{key}", origins)
    return cls(**values)


def _suggestion(key: str, prefix: str, known: list[str]) -> str:
    """What an unknown key of a section may have meant: a similar one beside it, else one of that name elsewhere."""
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    elsewhere = {name.rpartition(".")[2]: name for name, _ in _flatten(RuntimeConfig(), "")}
    close = difflib.get_close_matches(key, list(elsewhere), n=1, cutoff=0.85)
    if close:
        return f"did you mean {elsewhere[close[0]]}?"
    return f"known: {', '.join(known)}"


def _convert(hint: Any, value: Any, name: str, origins: Mapping[str, str]) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast("type[Any]", hint), value, f"{name}.", origins)
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
            _convert(args[0], element, f"{name}[{i}]", origins) for i, element in enumerate(value)
        )
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ConfigError(f"{name} must be a mapping, got {shown(value)}")
        return types.MappingProxyType(
            {
                _convert(args[0], k, name, origins): _convert(
                    args[1], v, f"{name}.{_key(k)}", origins
                )
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


def _flatten(value: Any, prefix: str) -> list[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        rows = []
        for f in dataclasses.fields(value):
            rows += _flatten(getattr(value, f.name), f"{prefix}.{f.name}" if prefix else f.name)
        return rows
    if isinstance(value, Mapping):
        return [(f"{prefix}.{_dotted([key])}", entry) for key, entry in value.items()] or [
            (prefix, {})
        ]
    return [(prefix, value)]
