"""The largest sizes of any batch, from the configuration: what static buffers are allocated for."""

from dataclasses import dataclass

from xgr_runtime.config import RuntimeConfig
from xgr_runtime.kvcache.allocator import num_pages_of
from xgr_runtime.xbeam.catalog import Catalog


@dataclass(frozen=True)
class Capacities:
    """The largest sizes any batch has; buffers are allocated for them once. num_batches: in flight at the same time."""

    num_tokens: int
    num_histories: int
    num_searches: int
    num_rows: int
    num_levels: int
    max_history_tokens: int
    num_pages_per_history: int
    num_batches: int = 1


def most_histories(config: RuntimeConfig) -> int:
    """Of one batch: each has a new token and a row at least, so that `max_batch_histories` beyond those never comes about."""
    scheduler = config.scheduler
    return min(scheduler.max_batch_histories, scheduler.max_batch_tokens, scheduler.max_batch_rows)


def capacities_of(config: RuntimeConfig) -> Capacities:
    """The sizes that a configuration asks for. Opens the catalogues for their number of levels; raises CatalogError."""
    limits, scheduler = config.limits, config.scheduler
    num_levels = config.cache.max_levels or max(
        (Catalog.open(path).num_levels for path in config.catalogs.values()), default=1
    )
    page_size, num_histories = config.cache.page_size_tokens, most_histories(config)
    return Capacities(
        num_tokens=scheduler.max_batch_tokens,
        num_histories=num_histories,
        num_searches=num_histories,
        num_rows=scheduler.max_batch_rows,
        num_levels=num_levels,
        max_history_tokens=limits.max_prompt_tokens,
        num_pages_per_history=num_pages_of(limits.max_prompt_tokens, page_size),
        num_batches=scheduler.max_batches_in_flight,
    )


def default_num_pages(config: RuntimeConfig, page_bytes: int) -> int:
    """The null page, full batches whose histories each waste part of a page, and the budget of the prefix cache."""
    cache, scheduler = config.cache, config.scheduler
    full = num_pages_of(scheduler.max_batch_tokens, cache.page_size_tokens)
    num_kept = cache.prefix_cache_bytes // page_bytes if cache.prefix_cache else 0
    of_batch = full + most_histories(config)
    return 1 + scheduler.max_batches_in_flight * of_batch + num_kept
