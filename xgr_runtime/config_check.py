"""Ranges and relations of a configuration: values of the right type that cannot work are refused by their names."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from xgr_runtime.errors import ConfigError, shown

if TYPE_CHECKING:
    from xgr_runtime.config import RuntimeConfig

# option: smallest value, largest value. The upper ends leave an order of magnitude beyond what serving needs; what they
# allow may still not fit a device, which says so when its buffers are allocated.
RANGES: dict[str, tuple[float, float]] = {
    "cpu_threads": (0, 1024),
    "search.beam_width": (1, 16384),
    "search.num_results": (1, 2**20),
    "limits.max_beam_width": (1, 16384),
    "limits.max_num_results": (1, 2**20),
    "limits.max_history_items": (1, 2**20),
    "limits.max_input_items": (1, 2**24),
    "limits.max_prompt_tokens": (1, 2**20),
    "limits.max_exclusions": (1, 2**24),
    "limits.max_key_length": (1, 2**16),
    "limits.max_tags": (1, 2**20),
    "limits.max_tag_length": (1, 2**16),
    "limits.max_searches": (1, 1),  # several of one history are not supported yet
    "limits.max_name_length": (1, 2**16),
    "limits.max_message_bytes": (1024, 2**30),
    "limits.max_metadata_bytes": (1024, 2**20),
    "limits.max_waiting_bytes": (1024, 2**40),
    "limits.max_concurrent_streams": (1, 2**20),
    "limits.max_connections": (1, 2**20),
    # Every UUID fits, and so do the ids that the service makes; longer ones would not fit the trailers of a reply.
    "limits.max_request_id_length": (36, 1024),
    "scheduler.max_queue": (1, 2**20),
    "scheduler.max_batch_histories": (1, 2**12),
    "scheduler.max_batch_tokens": (1, 2**20),
    "scheduler.max_batch_rows": (1, 2**20),
    "scheduler.max_batches_in_flight": (1, 8),
    "scheduler.max_wait_ms": (0, 60_000),
    "scheduler.patience_ms": (0, 3_600_000),
    "cache.page_size_tokens": (1, 2**12),
    "cache.num_pages": (0, 2**22),
    "cache.prefix_cache_bytes": (0, 2**40),
    "cache.catalog_slots": (1, 64),
    "cache.catalog_headroom": (1, 16),
    "cache.rule_rows": (1, 2**12),
    "cache.rule_cache_bytes": (0, 2**40),
    "cache.dense_level_bytes": (0, 2**33),
    "cache.max_levels": (0, 8),
    "service.port": (0, 65535),
    "service.drain_s": (0, 86_400),
    "service.metrics_port": (0, 65535),
    "service.handshake_s": (0.1, 3600),
    "service.receive_s": (0.1, 3600),
    "service.idle_s": (1, 1_000_000),
    "service.keepalive_s": (1, 1_000_000),
}
MAX_TOKEN_ID = 2**31 - 1
TEMPLATE_TOKENS = (
    "prefix_token_ids",
    "item_begin_token_ids",
    "item_end_token_ids",
    "separator_token_ids",
    "suffix_token_ids",
)
NAMES = (
    "model.name",
    "model.version",
    "template.version",
    "default_catalog",
    "service.host",
    "service.metrics_host",
)
# option, option that bounds it
BOUNDS = (
    ("limits.max_beam_width", "scheduler.max_batch_rows"),
    ("limits.max_prompt_tokens", "scheduler.max_batch_tokens"),
    ("limits.max_message_bytes", "limits.max_waiting_bytes"),
    ("search.beam_width", "limits.max_beam_width"),
    ("search.num_results", "limits.max_num_results"),
)
# list of sizes, option that bounds it
SIZES = (
    ("buckets.tokens", "scheduler.max_batch_tokens"),
    ("buckets.rows", "scheduler.max_batch_rows"),
    ("buckets.histories", "scheduler.max_batch_histories"),
    ("buckets.history_tokens", "limits.max_prompt_tokens"),
)


def check_config(config: "RuntimeConfig") -> None:
    """Raise ConfigError for a configuration that cannot work, however it was built."""
    for name, (lowest, highest) in RANGES.items():
        value = _value(config, name)
        if not lowest <= value <= highest:
            raise ConfigError(f"{name} must be in [{lowest}, {highest}], got {shown(value)}")
    for name, bound_name in BOUNDS:
        value, bound = _value(config, name), _value(config, bound_name)
        if value > bound:
            raise ConfigError(f"{name} must not exceed {bound_name} ({bound}), got {value}")
    _check_pages(config)
    _check_sizes(config)
    _check_tokens(config)
    _check_texts(config)
    if config.service.allow_catalog_admin and not config.service.catalog_folder:
        raise ConfigError(
            "service.allow_catalog_admin needs service.catalog_folder, the folder whose files may be loaded"
        )
    if config.default_catalog and config.default_catalog not in config.catalogs:
        known = ", ".join(sorted(config.catalogs)) or "none"
        raise ConfigError(
            f"default_catalog {config.default_catalog!r} is not among catalogs ({known})"
        )


def _check_pages(config: "RuntimeConfig") -> None:
    page_size, num_pages = config.cache.page_size_tokens, config.cache.num_pages
    needed = 1 + -(-config.limits.max_prompt_tokens // page_size)
    if num_pages and num_pages < needed:
        raise ConfigError(
            f"cache.num_pages must be 0 or at least {needed}, the null page and the longest prompt "
            f"(limits.max_prompt_tokens {config.limits.max_prompt_tokens}), got {num_pages}"
        )


def _check_sizes(config: "RuntimeConfig") -> None:
    for name, bound_name in SIZES:
        bound, before = _value(config, bound_name), 0
        for size in _sizes(config, name):
            if not before < size <= bound:
                raise ConfigError(
                    f"{name} must ascend from 1 at least to {bound_name} ({bound}) at most, got {shown(size)} behind {before}"
                )
            before = size


def _sizes(config: "RuntimeConfig", name: str) -> list[int]:
    sizes = []
    for size in _get(config, name):  # type: ignore[attr-defined]
        if type(size) is not int:
            raise ConfigError(f"{name} must be a list of whole numbers, got {shown(size)}")
        sizes.append(size)
    return sizes


def _check_tokens(config: "RuntimeConfig") -> None:
    for field in TEMPLATE_TOKENS:
        for i, token in enumerate(getattr(config.template, field)):
            if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
                raise ConfigError(
                    f"template.{field}[{i}] must be a token id in [0, {MAX_TOKEN_ID}], got {shown(token)}"
                )


def _check_texts(config: "RuntimeConfig") -> None:
    """Text that no file system or reply can carry. A path may hold bytes that are not UTF-8, as Python reads them."""
    for name in NAMES:
        _check_text(name, _get(config, name), str.encode)
    _check_text("model.path", config.model.path, os.fsencode)
    _check_text("service.catalog_folder", config.service.catalog_folder, os.fsencode)
    for name, path in config.catalogs.items():
        _check_text("a name in catalogs", name, str.encode)
        if not name:
            raise ConfigError("a name in catalogs must have a character at least, got ''")
        _check_text(f"catalogs.{name}", path, os.fsencode)


def _check_text(name: str, value: object, encode: Callable[[str], bytes]) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a str, got {shown(value)}")
    try:
        is_whole = b"\0" not in encode(value)
    except UnicodeEncodeError:
        is_whole = False
    if not is_whole:
        raise ConfigError(
            f"{name} must be text without NUL characters and lone surrogates, got {shown(value)}"
        )


def _value(config: "RuntimeConfig", name: str) -> float:
    section_name, _, option = name.rpartition(".")
    section = _get(config, section_name) if section_name else config
    value, default = getattr(section, option), getattr(type(section), option)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number, got {shown(value)}")
    if type(default) is int and type(value) is not int:
        raise ConfigError(f"{name} must be an integer, got {shown(value)}")
    return value


def _get(config: object, name: str) -> object:
    for part in name.split("."):
        config = getattr(config, part)
    return config
