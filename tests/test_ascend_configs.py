"""The configurations for an Ascend 910B: they load as they are shipped, and their comments' arithmetic is theirs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from xgr_runtime.config import RuntimeConfig, load_config
from xgr_runtime.kvcache.layout import KVGroup, KVSpec
from xgr_runtime.shipped import config_file
from xgr_runtime.xschedule.capacities import default_num_pages

# What the fused attention documents: torch_npu 2.13 docs of npu_fused_infer_attention_score, block_size with page tables.
PAGE_SIZES = (128, 256, 384, 512)
GIB = 1 << 30
LAYERS, KV_HEADS, HEAD_DIM = 28, 8, 128  # Qwen3-0.6B and Qwen3-1.7B alike
QUERY_ROW_BYTES = 16 * HEAD_DIM * 2  # 16 query heads in half precision
NUM_PARAMETERS = 1_720_574_976


def shipped(name: str) -> RuntimeConfig:
    return load_config(config_file(name)).config


@pytest.mark.parametrize("name", ["ascend-910b", "demo-ascend-910b"])
def test_what_the_fused_attention_asks_for(name: str) -> None:
    config = shipped(name)
    assert config.device == "npu"
    assert config.model.dtype in ("bfloat16", "float16")
    assert config.cache.page_size_tokens in PAGE_SIZES
    assert not config.ops.allow_reference, "a slow op must not pass unseen"


def test_the_memory_of_the_comments() -> None:
    config, text = shipped("ascend-910b"), Path(config_file("ascend-910b")).read_text()
    group = KVGroup("history", "paged", LAYERS, KV_HEADS, HEAD_DIM, torch.bfloat16)
    rows = KVGroup("beams", "rows", LAYERS, KV_HEADS, HEAD_DIM, torch.bfloat16)
    spec, page_size = KVSpec(group, rows), config.cache.page_size_tokens
    page_bytes = spec.page_bytes(page_size)
    assert (group.bytes_per_token, page_bytes) == (112 << 10, 14 << 20)
    num_pages = default_num_pages(config, page_bytes)
    assert num_pages == 289 + 1609
    assert page_size * 1609 == 205_952
    num_rows = config.scheduler.max_batch_rows + 1
    # Two levels of as many edges as items, each a code (int32) and a bit (a byte) a row of rules; the nodes' offsets.
    num_edges = int(1_000_000 * config.cache.catalog_headroom)
    num_searches = config.scheduler.max_batches_in_flight * config.scheduler.max_batch_histories
    num_rule_rows = max(config.cache.rule_rows, num_searches + 1) + num_searches
    parts = {
        "weights": 2 * NUM_PARAMETERS,
        "pages": num_pages * page_bytes,
        "beams' own tokens": num_rows * spec.slot_bytes(num_rounds=3) + (64 << 20),
        "catalogue": config.cache.catalog_slots * num_edges * (2 * (4 + num_rule_rows) + 4),
        # Every history as high as the one with all rows, the worst case.
        "padded queries": 2
        * config.scheduler.max_batch_histories
        * config.scheduler.max_batch_rows
        * QUERY_ROW_BYTES,
        "logits": 2 * config.scheduler.max_batch_rows * 8192 * 4,
    }
    said = dict(re.findall(r"^#   ([a-z' ]+?)  .*? ([\d.]+) GiB", text, re.MULTILINE))
    for name, num_bytes in parts.items():
        assert float(said[name]) == pytest.approx(num_bytes / GIB, abs=0.06), name
    total = sum(float(gib) for name, gib in said.items() if name != "together")
    assert float(said["together"]) == pytest.approx(total, abs=0.06)
    assert total < 32, "half of the card is left"
    # An op addresses one layer's pages in 31 bits.
    assert num_pages * page_size * KV_HEADS * HEAD_DIM < 2**31


def test_the_widest_request_and_the_longest_fit() -> None:
    config = shipped("ascend-910b")
    limits, scheduler = config.limits, config.scheduler
    assert limits.max_history_items * 3 <= limits.max_prompt_tokens
    assert scheduler.max_batch_rows // limits.max_beam_width == 8
    assert scheduler.max_batch_tokens // limits.max_prompt_tokens == 8
    assert scheduler.max_batch_rows // scheduler.max_batch_histories == 256


def test_a_model_and_a_catalogue_are_given_on_the_command_line() -> None:
    overrides = ["model.path=m", "catalogs={shop: shop.xgr}", "template.prefix_token_ids=[1]"]
    config = load_config(config_file("ascend-910b"), overrides).config
    assert (config.model.path, dict(config.catalogs)) == ("m", {"shop": "shop.xgr"})
    assert config.template.prefix_token_ids == (1,)


def test_the_demo_differs_where_its_device_asks_for_it() -> None:
    plain, npu = load_config(config_file("demo")), load_config(config_file("demo-ascend-910b"))
    values = [dict(line.split("  #")[0].split(" = ") for line in c.lines()) for c in (plain, npu)]
    differing = {name for name in values[0] if values[0][name] != values[1][name]}
    assert differing == {
        *("device", "model.dtype"),
        *("cache.page_size_tokens", "cache.prefix_cache", "cache.prefix_cache_bytes"),
    }


def test_the_demos_model_suits_the_fused_attention() -> None:
    """Head dims of whole 16s (the same documentation), and prompts of one page."""
    config = shipped("demo-ascend-910b")
    model = json.loads((Path(config.model.path) / "config.json").read_text())
    assert model["head_dim"] % 16 == 0
    assert config.limits.max_prompt_tokens <= config.cache.page_size_tokens
