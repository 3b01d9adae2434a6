"""Ranges and relations of a configuration: values of the right type that cannot work are refused by their dotted name."""

import math
from typing import TYPE_CHECKING

from xgr_runtime.errors import ConfigError

if TYPE_CHECKING:
    from xgr_runtime.config import RuntimeConfig

# option: smallest value, largest value
RANGES: dict[str, tuple[float, float]] = {
    "cpu_threads": (0, 4096),
    "search.beam_width": (1, 16384),
    "search.num_results": (1, 2**31),
    "limits.max_beam_width": (1, 16384),
    "limits.max_num_results": (1, 2**31),
    "limits.max_history_items": (1, 2**31),
    "limits.max_input_items": (1, 2**31),
    "limits.max_prompt_tokens": (1, 2**24),
    "limits.max_exclusions": (1, 2**31),
    "limits.max_tags": (1, 2**20),
    "limits.max_message_bytes": (1024, 2**31 - 1),
    "limits.max_request_id_length": (1, 4096),
    "scheduler.max_queue": (1, 2**31),
    "scheduler.max_batch_histories": (1, 2**16),
    "scheduler.max_batch_tokens": (1, 2**26),
    "scheduler.max_batch_rows": (1, 2**24),
    "scheduler.max_wait_ms": (0, 60_000),
    "scheduler.patience_ms": (0, 3_600_000),
    "cache.page_size_tokens": (1, 2**16),
    "cache.num_pages": (0, 2**31),
    "cache.catalog_slots": (1, 64),
    "cache.catalog_headroom": (1, 16),
    "cache.rule_rows": (1, 2**16),
    "cache.rule_cache_bytes": (0, 2**50),
    "cache.dense_level_bytes": (0, 2**40),
    "cache.max_levels": (0, 8),
    "service.port": (0, 65535),
    "service.drain_s": (0, 86_400),
}
# option, option that bounds it
BOUNDS = (
    ("limits.max_beam_width", "scheduler.max_batch_rows"),
    ("limits.max_prompt_tokens", "scheduler.max_batch_tokens"),
    ("search.beam_width", "limits.max_beam_width"),
    ("search.num_results", "limits.max_num_results"),
)


def check_config(config: "RuntimeConfig") -> None:
    """Raise ConfigError for a configuration that cannot work, however it was built."""
    for name, (lowest, highest) in RANGES.items():
        value = _value(config, name)
        if not math.isfinite(value) or not lowest <= value <= highest:
            raise ConfigError(f"{name} must be in [{lowest}, {highest}], got {value}")
    for name, bound_name in BOUNDS:
        value, bound = _value(config, name), _value(config, bound_name)
        if value > bound:
            raise ConfigError(f"{name} must not exceed {bound_name} ({bound}), got {value}")
    _check_pages(config)
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


def _value(config: "RuntimeConfig", name: str) -> float:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    return value
