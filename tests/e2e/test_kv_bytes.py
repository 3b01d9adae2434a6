"""What a history's keys and values cost does not depend on the width of the search, measured on live engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.catalogs import contiguous_tokens, random_catalog
from tests.helpers.engines import make_config, make_engine, request_of, write_catalog
from tests.helpers.product import watch_batches
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from xgr_runtime.config import CacheConfig, LimitsConfig, SchedulerConfig, SearchDefaults
from xgr_runtime.types import Search

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.e2e
PAGE = 16


def test_pages_and_bytes_of_a_history(tmp_path: Path) -> None:
    """W = 1 and W = 1,024: as many pages while the batch runs, as many bytes written, the same storage."""
    catalog = random_catalog(1, 3000, contiguous_tokens([16, 16, 16], 2))
    model = write_tiny_model(tmp_path / "model", "qwen3", TinyShape(vocab_size=64, head_dim=8))
    file = write_catalog(tmp_path / "items.xgr", catalog)
    history = [item.item_id for item in catalog.items[:21]]  # 1 + 63 tokens: 4 pages exactly
    measured = {}
    for width in (1, 1024):
        config = make_config(
            model,
            {"main": file},
            search=SearchDefaults(beam_width=width),
            limits=LimitsConfig(max_prompt_tokens=128, max_beam_width=width),
            scheduler=SchedulerConfig(
                max_batch_rows=width, max_batch_tokens=128, max_batch_histories=1, max_wait_ms=0.0
            ),
            cache=CacheConfig(page_size_tokens=PAGE, prefix_cache=False),
        )
        with make_engine(config) as engine:
            pages = engine.runner.kv.shared.all_pages
            pages.fill_(np.nan)
            used: list[int] = []
            watch_batches(engine, before=lambda _: used.append(engine.pages.num_in_use))  # noqa: B023 - called inside this turn only
            (reply,) = engine.recommend([request_of("one", history, Search(beam_width=width))])
            assert reply.results[0].num_valid == width
            # Whatever is no longer NaN was written; page 0 takes the padding.
            is_written = ~pages[0, 1:, :, 0, 0].isnan()
            written_bytes = int((~pages[:, 1:].isnan()).sum()) * pages.element_size()
            measured[width] = (used, int(is_written.sum()), written_bytes, pages.nbytes)
            assert engine.pages.num_in_use == 0
            own = engine.runner.kv.unshared
            assert own.num_slots == width
    assert measured[1] == measured[1024]
    used, tokens, written_bytes, _ = measured[1]
    assert used == [4]
    assert tokens == 64
    # 2 layers x (K and V) x 2 heads x 8 dims x 4 bytes
    assert written_bytes == 64 * 2 * 2 * 2 * 8 * 4
