"""The configuration for an H200: it loads as it is shipped, its comments' arithmetic is its own, its graphs fit a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tests.helpers.strict_device import StrictDevice
from xgr_runtime.config import load_config
from xgr_runtime.hal.cuda import CudaDevice
from xgr_runtime.kvcache.layout import KVGroup, KVSpec
from xgr_runtime.shipped import config_file
from xgr_runtime.xschedule.capacities import capacities_of, default_num_pages
from xgr_runtime.xschedule.ladder import captured_normalizations, ladder_of

LAYERS, KV_HEADS, HEAD_DIM = 28, 8, 128  # Qwen3-0.6B and Qwen3-1.7B alike


def test_what_its_comments_say() -> None:
    config, text = load_config(config_file("h200")).config, Path(config_file("h200")).read_text()
    assert (config.device, config.model.dtype, config.ops.allow_reference) == (
        "cuda",
        "bfloat16",
        False,
    )
    group = KVGroup("history", "paged", LAYERS, KV_HEADS, HEAD_DIM, torch.bfloat16)
    spec = KVSpec(group, KVGroup("beams", "rows", LAYERS, KV_HEADS, HEAD_DIM, torch.bfloat16))
    page_bytes = spec.page_bytes(config.cache.page_size_tokens)
    assert (group.bytes_per_token, page_bytes) == (112 << 10, 14 << 20)
    kept = config.cache.prefix_cache_bytes // page_bytes
    pages = default_num_pages(config, page_bytes)
    assert f"= {pages - kept}, {kept:,} of the prefix cache" in text
    assert f"{pages * page_bytes / 2**30:.1f} GiB\n" in text
    assert f"{kept * config.cache.page_size_tokens:,} tokens of returning users" in text
    own = (config.scheduler.max_batch_rows + 1) * spec.slot_bytes(num_rounds=3)
    assert f"{own / 2**30:.1f} GiB\n" in text


def test_its_graphs_fit_and_hold_the_measured_batches() -> None:
    config = load_config(config_file("h200")).config
    device = StrictDevice()
    device.max_graphs = CudaDevice.max_graphs
    catalog = "shop.xgr"  # not opened: the number of levels is given
    config = replace(config, catalogs={"shop": catalog}, cache=replace(config.cache, max_levels=3))
    ladder = ladder_of(config, capacities_of(config), device)
    versions = len(captured_normalizations(config)) * config.cache.catalog_slots
    num_graphs = len(list(ladder.prefills())) + versions * len(list(ladder.rounds(3)))
    assert num_graphs <= device.max_graphs
    rows = {rung.num_histories: [size for size, _ in rung.rows] for rung in ladder.rungs}
    assert {128, 256, 512, 1024} <= set(rows[1])
    assert {1024, 2048, 4096, 8192} <= set(rows[8])
    tokens = {rung.num_histories: rung.tokens for rung in ladder.rungs}
    assert {128, 1000, 1024, 5000, 5120} <= set(tokens[1])
    assert {8000, 8192, 40000, 40960} <= set(tokens[8])
