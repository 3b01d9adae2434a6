"""The configuration: frozen dataclasses, strict YAML, dotted overrides, and the origin of every value.

Built once and never mutated. An unknown key is an error with a suggestion, because a misspelt limit that is silently
ignored is found in production.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from xgr_runtime.config_check import check_config
from xgr_runtime.config_load import build, flatten, read_tree
from xgr_runtime.types import Normalization, OnOverflow, OnUnknown

DEFAULT = "default"


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

    max_metadata_bytes: headers of one call. max_waiting_bytes: messages of all requests that wait for their answer.
    max_concurrent_streams (calls open at once on one connection) and max_connections are kept by gRPC, which names
    nothing: a further call waits at the client, a further connection is closed.
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
    """A batch is closed when a capacity is reached, or when the device is about to be free and its first request has waited
    max_wait_ms.

    max_queue: requests accepted and not yet answered. patience_ms: a request is due after it, or at its
    deadline where that is earlier; the earliest due runs first. max_batches_in_flight: while the device runs one batch, the
    host prepares and issues the next; 1 waits for each batch before the next.
    """

    max_queue: int = 1024
    max_batch_histories: int = 8
    max_batch_tokens: int = 8192
    max_batch_rows: int = 8192
    max_batches_in_flight: int = 2
    max_wait_ms: float = 0.0
    patience_ms: float = 1000.0


@dataclass(frozen=True)
class CacheConfig:
    """History KV pages, catalogue slots, rule sets.

    num_pages 0: enough for a full batch and prefix_cache_bytes beyond it, which keep histories for returning users
    while prefix_cache is true; a num_pages of your own is all there is, for batches and the cache alike. max_levels 0:
    as many as the configured catalogues have. catalog_slots and catalog_headroom: versions loaded at once per
    catalogue (a load beyond them retires the one that was active longest ago), and how much larger a later version may
    be in place.
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
class BucketsConfig:
    """Sizes that graphs are captured for, each list ascending; its largest possible size is always added.

    An empty list is one of ours, as fine as the device's number of graphs allows (`xgr_runtime/xschedule/ladder.py`).
    tokens: new history tokens of a batch. rows: beam rows of a group in one round. histories: of a batch.
    history_tokens: bounds of the longest history, cached tokens included. normalizations: beside search.normalization,
    those that are captured; any other is answered by the same kernels launched one by one.

    at_start false: a graph is captured when the first batch of its bucket comes, which waits for it.
    """

    at_start: bool = True
    tokens: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    histories: tuple[int, ...] = ()
    history_tokens: tuple[int, ...] = ()
    normalizations: tuple[Normalization, ...] = ("vocab", "level")


@dataclass(frozen=True)
class OpsConfig:
    """allow_reference: accept the torch reference of an op on an accelerator (slow; `Engine.describe` lists it)."""

    allow_reference: bool = False


@dataclass(frozen=True)
class ServiceConfig:
    """Where `xgr serve` listens and how long it waits. port 0 takes a free port. drain_s: for requests at shutdown.

    handshake_s: until a new connection speaks HTTP/2. receive_s: until a call has sent its message. idle_s: until a
    connection without calls is closed. keepalive_s: until a silent client is asked whether it is still there.

    metrics_port: of GET /metrics over HTTP, 0 = off. reflection: describe the services to tools such as grpcurl.
    log_requests: one line per request at level info.

    allow_catalog_admin: offer xgr.v1.CatalogService, which loads files below catalog_folder, to whoever reaches the
    port.
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
    graphs: bool = True
    model: ModelConfig = field(default_factory=ModelConfig)
    template: TemplateConfig = field(default_factory=TemplateConfig)
    catalogs: Mapping[str, str] = field(default_factory=dict)
    default_catalog: str = ""
    search: SearchDefaults = field(default_factory=SearchDefaults)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    buckets: BucketsConfig = field(default_factory=BucketsConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
    service: ServiceConfig = field(default_factory=ServiceConfig)

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> "RuntimeConfig":
        """Read a YAML file and apply overrides "a.b=value" (values in YAML syntax)."""
        return load_config(path, overrides).config


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration and where each value that is not a default came from, by dotted name.

    An origin is "FILE:LINE" or "--set". Nothing else changes a value: no environment variable does. No value is a
    secret.
    """

    config: RuntimeConfig
    origins: Mapping[str, str]

    def lines(self) -> list[str]:
        """One "name = value  # origin" line per field, and per entry of a mapping."""
        return [
            f"{name} = {value!r}  # {self.origins.get(name, DEFAULT)}"
            for name, value in flatten(self.config)
        ]


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Read `path` (None = only defaults), apply overrides, check every value.

    Paths below `model.path` and `catalogs` that are relative are taken from the file's folder. Raises ConfigError.
    """
    tree, origins = read_tree(path, overrides)
    config = build(RuntimeConfig, tree, origins)
    check_config(config)
    return ResolvedConfig(config, origins)
