"""A batch whose graphs exist allocates nothing and makes no thread wait for the GPU, from its inputs to its results' copy.

Both are counted by torch: calls of its allocator, and an error at whatever has the host wait. Waiting for the event behind
a batch's results is none of these: the engine does that when everything has been issued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.cuda.waiting import no_waiting
from tests.helpers.catalogs import contiguous_tokens, random_catalog
from tests.helpers.engines import make_config, make_engine, request_of, write_catalog
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from xgr_runtime.config import LimitsConfig, SchedulerConfig, SearchDefaults
from xgr_runtime.types import NORMALIZATIONS, Search

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helpers.oracle import Catalog
    from xgr_runtime.types import Normalization, RecRequest

pytestmark = pytest.mark.device("cuda")
VOCAB = 64
LIMITS = LimitsConfig(max_prompt_tokens=64, max_beam_width=32, max_num_results=64)
DEFAULTS = SearchDefaults(beam_width=32)  # what every Search here overrides fits the limits
# Two requests fill a batch, so nothing depends on how fast this machine is.
PAIRS = SchedulerConfig(
    max_batch_histories=2, max_batch_tokens=128, max_batch_rows=64, max_wait_ms=60_000.0
)


def num_allocations() -> int:
    """Calls of torch's allocator for memory of the GPU so far."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def pair(catalog: Catalog, normalization: Normalization, seed: int) -> list[RecRequest]:
    """Two requests of one bucket, other items for another seed, so that no history is cached."""
    rng = np.random.default_rng(seed)
    ids = [item.item_id for item in catalog.items]
    search = Search(beam_widths=(8, 16, 24, 32), num_results=20, normalization=normalization)
    return [
        request_of(
            f"{normalization} {seed} {i}", rng.choice(ids, 9, replace=False).tolist(), search
        )
        for i in range(2)
    ]


def test_a_batch_of_graphs_allocates_nothing_and_waits_for_nothing(tmp_path: Path) -> None:
    tokens = contiguous_tokens([8, 9, 7, 8], 2)
    catalog = random_catalog(5, 500, tokens, skew=0.4)
    model = write_tiny_model(tmp_path / "model", "qwen3", TinyShape(vocab_size=VOCAB))
    file = write_catalog(tmp_path / "items.xgr", catalog)
    config = make_config(model, {"main": file}, search=DEFAULTS, limits=LIMITS, scheduler=PAIRS)
    with make_engine(config) as engine:
        for normalization in NORMALIZATIONS:
            for seed in range(2):
                engine.recommend(pair(catalog, normalization, seed))
        torch.cuda.synchronize()
        before = num_allocations(), engine.worker.graphs.num_captures
        with no_waiting():
            replies = [
                engine.recommend(pair(catalog, normalization, 7))
                for normalization in NORMALIZATIONS
            ]
        assert (num_allocations(), engine.worker.graphs.num_captures) == before
    assert all(reply.results[0].num_valid for both in replies for reply in both)


def test_an_allocation_is_counted() -> None:
    before = num_allocations()
    assert torch.empty(1, device="cuda").numel() == 1
    assert num_allocations() == before + 1


def test_whoever_waits_is_an_error() -> None:
    x = torch.ones(3, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        x.sum().item()
    assert x.sum().item() == 3
