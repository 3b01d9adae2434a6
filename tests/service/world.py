"""A tiny random model, a catalogue, their configuration file, and what transformers says the answers are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from tests.helpers.catalogs import contiguous_tokens, random_catalog, write_jsonl
from tests.helpers.oracle import Catalog, Item, Rules, expand_items
from tests.helpers.tiny_models import TinyShape, hf_reference, load_hf, write_tiny_model
from xgr_runtime.conformance.same_answer import (
    Answer,
    Reference,
    SameAnswerStats,
    assert_same_answer,
)
from xgr_runtime.xbeam.catalog_build import build_catalog_from_jsonl

if TYPE_CHECKING:
    from pathlib import Path

    from xgr_runtime.types import RecRequest, SearchResult

TOKENS = contiguous_tokens((12, 12, 12), first=8)
PREFIX, SUFFIX = [1, 2], [3]
NUM_ITEMS = 150
FP32_T = 1e-4
ALL_ITEMS = 1000


@dataclass
class World:
    """config: the YAML file. reference scores are kept per prompt, rules and normalisation."""

    config: Path
    catalog: Catalog
    model: Any
    references: dict[Any, Reference] = field(default_factory=dict)

    def item(self, item_id: int) -> Item:
        return next(item for item in self.catalog.items if item.item_id == item_id)

    def prompt(self, history: list[Item]) -> list[int]:
        """The history rendered by the template of the configuration."""
        sids = [TOKENS[level][code] for item in history for level, code in enumerate(item.sid)]
        return [*PREFIX, *sids, *SUFFIX]

    def check(self, request: RecRequest, history: list[Item], got: SearchResult) -> SameAnswerStats:
        """Raises unless `got` (with all its items) is a right answer."""
        search = request.searches[0]
        hidden = [i.item_id for i in history] if search.rules.exclude_history else []
        rules = Rules(
            search.rules.require,
            search.rules.exclude_tags,
            (*np.asarray(search.rules.exclude_item_ids, np.int64).tolist(), *hidden),
            search.rules.exclude_keys,
        )
        kept = self.catalog.keep(rules)
        key = (tuple(self.prompt(history)), tuple(kept.sids), got.normalization)
        if key not in self.references:
            self.references[key] = hf_reference(
                self.model,
                self.prompt(history),
                lambda prefix: kept.children.get(prefix, ()),
                TOKENS,
                got.normalization,
            )
        rows: dict[tuple[int, ...], float] = {}
        for sid, score in zip(got.sids.tolist(), got.scores.tolist(), strict=True):
            assert rows.setdefault(tuple(sid), score) == score
        widths = search.beam_widths or (search.beam_width or 20,) * 3
        assert got.beam_widths == widths
        expected = expand_items(rows.items(), kept, ALL_ITEMS, search.max_items_per_sid)
        assert got.item_ids.tolist() == [row.item_id for row in expected]
        assert list(got.keys or ()) == [f"key-{row.item_id}" for row in expected]
        return assert_same_answer(
            Answer(list(rows.items()), got.num_valid), self.references[key], FP32_T, widths
        )


def make_world(folder: Path) -> World:
    """Writes everything into `folder`."""
    catalog = random_catalog(5, NUM_ITEMS, TOKENS, skew=1.0)
    assert len(catalog.items) < ALL_ITEMS
    build_catalog_from_jsonl(
        folder / "items.xgrc", write_jsonl(catalog, folder / "items.jsonl"), token_of=TOKENS
    )
    write_tiny_model(folder / "model", "qwen3", TinyShape(vocab_size=64, head_dim=16), seed=11)
    config = {
        "device": "cpu",
        "model": {"path": "model", "name": "tiny", "version": "m1"},
        "template": {"prefix_token_ids": PREFIX, "suffix_token_ids": SUFFIX, "version": "t1"},
        "catalogs": {"items": "items.xgrc"},
        "default_catalog": "items",
        "search": {"beam_width": 20, "num_results": ALL_ITEMS},
        "limits": {"max_beam_width": 64, "max_prompt_tokens": 128, "max_history_items": 24},
        "scheduler": {"max_batch_tokens": 512, "max_batch_rows": 256, "max_queue": 400},
        "cache": {"prefix_cache_bytes": 1 << 20},  # the default is all written by every engine
        "service": {"port": 0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return World(folder / "config.yaml", catalog, load_hf(folder / "model"))
