"""What an engine is made of: built once from a configuration, a device and a model, each part checked against the others."""

from dataclasses import dataclass

import torch

from xgr_runtime.config import RuntimeConfig
from xgr_runtime.config_check import check_config
from xgr_runtime.errors import ConfigError
from xgr_runtime.hal.device import Device
from xgr_runtime.kvcache.allocator import PageAllocator
from xgr_runtime.kvcache.prefix_cache import PrefixCache
from xgr_runtime.kvcache.prefix_keys import root_key
from xgr_runtime.models.base import RecModel, check_positions
from xgr_runtime.xbeam.rules import RuleCache
from xgr_runtime.xbeam.template import Template
from xgr_runtime.xschedule.buckets import CloseFit, Sizes
from xgr_runtime.xschedule.capacities import capacities_of, default_num_pages
from xgr_runtime.xschedule.catalogs import CatalogStore
from xgr_runtime.xschedule.graph_runner import GraphRunner
from xgr_runtime.xschedule.intake import Intake
from xgr_runtime.xschedule.ladder import ladder_of
from xgr_runtime.xschedule.model_runner import ModelRunner
from xgr_runtime.xschedule.scheduler import Scheduler
from xgr_runtime.xschedule.worker import Worker


@dataclass(frozen=True)
class EngineParts:
    """pages and scheduler are the loop's, intake and rule_cache the intake thread's as well; the caller serialises."""

    template: Template
    rule_cache: RuleCache
    pages: PrefixCache
    runner: ModelRunner
    catalogs: CatalogStore
    worker: Worker
    intake: Intake
    scheduler: Scheduler


def build_parts(
    config: RuntimeConfig, device: Device, model: RecModel, model_version: str
) -> EngineParts:
    """Allocate every buffer and bind every op. Raises ConfigError, DeviceError, OpUnavailable, CatalogError."""
    check_config(config)
    template = _template(config, model)
    if not config.catalogs:
        raise ConfigError("catalogs must name at least one compiled catalogue file")
    cache, capacities = config.cache, capacities_of(config)
    check_positions(model, config.limits.max_prompt_tokens, capacities.num_levels)
    page_size = cache.page_size_tokens
    num_pages = cache.num_pages or default_num_pages(config, model.kv_spec.page_bytes(page_size))
    graphs = GraphRunner(device, is_allowed=config.graphs)
    sizes: Sizes = CloseFit(capacities)
    if graphs.is_capturing:
        sizes = ladder_of(config, capacities, device)
    runner = ModelRunner(
        model,
        device,
        getattr(torch, config.model.dtype),
        capacities,
        num_pages,
        page_size,
        allow_reference=config.ops.allow_reference,
        is_capturing=graphs.is_capturing,
        sizes=sizes,
    )
    rule_cache = RuleCache(cache.rule_cache_bytes)
    catalogs = CatalogStore(
        cache,
        device,
        model.head,
        rule_cache,
        capacities.num_batches * capacities.num_searches,
        graphs.drop_slot,
    )
    root = root_key(model_version, repr(model.kv_spec), page_size)
    pages = PrefixCache(PageAllocator(num_pages))
    return EngineParts(
        template=template,
        rule_cache=rule_cache,
        pages=pages,
        runner=runner,
        catalogs=catalogs,
        worker=Worker(device, runner, catalogs.by_slot, rule_cache, graphs),
        intake=Intake(
            config,
            template,
            catalogs,
            rule_cache,
            model.vocab_size,
            root if cache.prefix_cache else None,
        ),
        scheduler=Scheduler(
            config.scheduler,
            pages,
            page_size,
            is_counting_shared_pages=device.is_counting_shared_pages,
            padded_histories=sizes.padded_histories,
        ),
    )


def _template(config: RuntimeConfig, model: RecModel) -> Template:
    template = Template.from_config(config.template)
    if not template.min_token_id >= 0 or template.max_token_id >= model.vocab_size:
        raise ConfigError(
            f"template token ids must be in [0, {model.vocab_size}), the model's vocabulary; got "
            f"{template.min_token_id} to {template.max_token_id}"
        )
    num_tokens, most = template.num_tokens(0, 1), config.limits.max_prompt_tokens
    if num_tokens > most:
        raise ConfigError(
            f"the template has {num_tokens} tokens without any item, limits.max_prompt_tokens is {most}"
        )
    return template
