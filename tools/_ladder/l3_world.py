"""A small model, catalogues of several shapes, and batches by hand that reach every kind of segment and class of bucket.

Nothing here knows a device. Prompts, pages and widths are made up; a batch is what the scheduler would have made of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tools._bench.random_model import Qwen3Shape, write_random_model
from xgr_runtime.config import (
    CacheConfig,
    LimitsConfig,
    ModelConfig,
    OpsConfig,
    RuntimeConfig,
    SchedulerConfig,
    TemplateConfig,
)
from xgr_runtime.xbeam.catalog_build import build_catalog
from xgr_runtime.xbeam.rules import TagExpression, build_rule_set, clear_exclusions
from xgr_runtime.xschedule.batch import Batch, RuleRow, SearchGroup, pack_histories

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from xgr_runtime.types import Normalization
    from xgr_runtime.xschedule.engine_parts import EngineParts

VOCAB = 10000  # more than a tile of the head
MAX_PROMPT_TOKENS = 512
MAX_HISTORIES = 4
TAGS = ("new", "region:eu")
# Codes and items of each level decide its layout: a thin level (few children of many codes) is laid out as CSR, others densely.
CATALOGS: dict[str, tuple[tuple[int, ...], int]] = {
    "one level": ((200,), 150),
    "two levels": ((16, 20), 200),
    "four levels": ((16, 64, 48, 40), 600),
    # Dense, and with 128 rows more candidates than a tile of the selection.
    "wide level": ((100, 9000), 150_000),
}
NUM_LEVELS = 4
NORMALIZATIONS: tuple[Normalization, ...] = ("vocab", "level", "valid")


@dataclass(frozen=True)
class Setting:
    """One engine: dtype of weights and KV, tokens of a page, the checkpoint, whether segments are captured.

    is_large: with the limits that a configuration has by itself, instead of small ones.
    """

    dtype: str
    page_size: int
    model: str = "tied-64"
    is_capturing: bool = True
    is_large: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        how = "graphs" if self.is_capturing else "eager"
        how += ", the largest batch" * self.is_large
        return f"{self.dtype}, page {self.page_size}, model {self.model}, {how}"


@dataclass(frozen=True)
class Wanted:
    """One search. history: which of the batch's; widths: beams of each level."""

    history: int
    widths: tuple[int, ...]
    is_tagged: bool = False
    num_excluded: int = 0


@dataclass(frozen=True)
class Plan:
    """One batch: (tokens, of them cached) of each history, and groups of (catalogue, normalisation, searches)."""

    name: str
    histories: tuple[tuple[int, int], ...]
    groups: tuple[tuple[str, Normalization, tuple[Wanted, ...]], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """What fused attention is told: tokens of each history, one for a padding history, up to a power of two."""
        lengths = [tokens for tokens, _ in self.histories]
        room = 1 << (len(lengths) - 1).bit_length()
        return (*lengths, *[1] * (room - len(lengths)))

    @property
    def has_step(self) -> bool:
        """Whether a round reads the histories' keys."""
        return any(len(CATALOGS[name][0]) > 1 for name, _, _ in self.groups)


def _deep(history: int, width: int, **rules: Any) -> Wanted:
    return Wanted(history, (width, 2 * width, width, max(1, width // 2)), **rules)


_RULED = (
    _deep(0, 9, is_tagged=True, num_excluded=120),
    _deep(1, 5, num_excluded=60),
    _deep(1, 3),
    _deep(2, 8, is_tagged=True),
)
PLANS = (
    Plan("one token, one level", ((1, 0),), (("one level", "vocab", (Wanted(0, (1,)),)),)),
    Plan(
        "several histories, all normalisations, rules",
        ((40, 0), (130, 128), (7, 0)),
        tuple(("four levels", normalization, _RULED) for normalization in NORMALIZATIONS),
    ),
    Plan(
        "the same buckets, other lengths",
        ((39, 0), (129, 128), (5, 0)),
        tuple(("four levels", normalization, _RULED) for normalization in NORMALIZATIONS),
    ),
    Plan(
        "two catalogues, a history without a search",
        ((16, 0), (260, 256)),
        (
            ("two levels", "level", (Wanted(0, (16, 40)),)),
            ("one level", "valid", (Wanted(0, (64,), num_excluded=20),)),
        ),
    ),
    Plan(
        "a history that begins like a part of a page",
        ((40, 0), (150, 137)),
        (("one level", "level", (Wanted(0, (8,)), Wanted(1, (8,)))),),
    ),
    Plan(
        "tiles of candidates",
        ((24, 0),),
        tuple(("wide level", normalization, (Wanted(0, (100, 40)), Wanted(0, (100, 8)))) for normalization in NORMALIZATIONS),
    ),
    Plan(
        "full buckets",
        ((MAX_PROMPT_TOKENS, 0), (300, 0), (200, 128), (100, 0)),
        (("four levels", "vocab", tuple(_deep(h, 128) for h in range(MAX_HISTORIES))),),
    ),
)  # fmt: skip


_SMALL_LIMITS = LimitsConfig(max_prompt_tokens=MAX_PROMPT_TOKENS, max_beam_width=512)
_SMALL_BATCHES = SchedulerConfig(
    max_batch_histories=MAX_HISTORIES, max_batch_tokens=1024, max_batch_rows=1024
)
# All that LimitsConfig and SchedulerConfig allow by themselves: 8 histories, 4096 tokens of one, 8192 new ones, 8192 rows.
LARGEST_PLAN = Plan(
    "everything full",
    ((4096, 0), *((4096, 3584),) * 7),
    (("four levels", "vocab", tuple(Wanted(h, (1024,) * 4) for h in range(8))),),
)


def write_world(folder: Path) -> None:
    """The checkpoints "tied-64" and "biased-128" (a head of its own, biases in the attention), and the catalogues."""
    for name, head_dim in (("tied-64", 64), ("biased-128", 128)):
        shape = Qwen3Shape(
            num_layers=2,
            hidden_size=128,
            intermediate_size=192,
            num_heads=4,
            num_kv_heads=2,
            head_dim=head_dim,
            vocab_size=VOCAB,
            max_positions=8192,
        )
        write_random_model(folder / name, shape)
    _add_biases(folder / "biased-128")
    rng = np.random.default_rng(0)
    for name, (num_codes, num_items) in CATALOGS.items():
        sids = np.stack([rng.integers(0, codes, num_items) for codes in num_codes], axis=1)
        tokens = [rng.permutation(VOCAB)[:codes].astype(np.int32) for codes in num_codes]
        # A code without a token: the head's rows of such a level are masked. No item may use it.
        tokens[0] = np.concatenate([tokens[0], np.full(1, -1, np.int32)])
        tags = {tag: np.flatnonzero(rng.random(num_items) < 0.5) for tag in TAGS}
        build_catalog(folder / f"{name}.xgr", sids=sids, tags=tags, token_of=tokens)


def _add_biases(folder: Path) -> None:
    config_path, weights = folder / "config.json", folder / "model.safetensors"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config |= {"attention_bias": True, "tie_word_embeddings": False}
    config_path.write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(weights)
    products = [name for name in tensors if ".self_attn." in name and "_proj." in name]
    for name in products:
        tensors[name.replace(".weight", ".bias")] = torch.zeros(tensors[name].shape[0])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, weights, metadata={"format": "pt"})


def make_config(folder: Path, setting: Setting, *, allow_reference: bool) -> RuntimeConfig:
    """The configuration of an engine over that folder."""
    return RuntimeConfig(
        device="npu",
        graphs=setting.is_capturing,
        model=ModelConfig(
            path=str(folder / setting.model),
            dtype=setting.dtype,  # type: ignore[arg-type]
        ),
        template=TemplateConfig(prefix_token_ids=(1,)),
        catalogs={name: str(folder / f"{name}.xgr") for name in CATALOGS},
        default_catalog="four levels",
        limits=LimitsConfig() if setting.is_large else _SMALL_LIMITS,
        scheduler=SchedulerConfig() if setting.is_large else _SMALL_BATCHES,
        cache=CacheConfig(
            page_size_tokens=setting.page_size,
            prefix_cache_bytes=1 << (25 if setting.is_large else 20),
            catalog_slots=1,
        ),
        ops=OpsConfig(allow_reference=allow_reference),
    )


def make_batch(parts: EngineParts, plan: Plan, page_size: int) -> Batch:
    """The batch of a plan. Pages are numbered in order; what is cached is never read, so it need not be there.

    Cached tokens that do not fill a page are copied from the first page.
    """
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, tokens) for tokens, _ in plan.histories]
    pages, first = [], 1
    for tokens, _ in plan.histories:
        count = -(-tokens // page_size)
        pages.append(list(range(first, first + count)))
        first += count
    cached = [tokens for _, tokens in plan.histories]
    sources = [1 if tokens % page_size else None for tokens in cached]
    assert first <= parts.runner.kv.shared.num_pages, f"{plan.name} needs {first} pages"
    return Batch(
        batch_id=1,
        kind="full",
        request_ids=tuple(str(number) for number in range(len(prompts))),
        histories=pack_histories(prompts, pages, page_size, cached, sources),
        groups=tuple(_group(parts, *group) for group in plan.groups),
    )  # fmt: skip


def _group(
    parts: EngineParts, name: str, normalization: Normalization, searches: Sequence[Wanted]
) -> SearchGroup:
    """Tagged searches share rule row 1; excluded ones take scratch rows 0, 1, ..."""
    pinned = parts.catalogs.pin(name)
    parts.catalogs.release(pinned)
    tagged = TagExpression.canonical((TAGS[:1],))
    rules = list[RuleRow]()
    for search in searches:
        expression = tagged if search.is_tagged else TagExpression()
        edges = tuple(np.zeros(0, np.int32) for _ in search.widths)
        scratch = None
        if search.num_excluded:
            rule_set = build_rule_set(pinned.catalog, expression)
            edges = clear_exclusions(pinned.catalog, rule_set, np.arange(search.num_excluded)).edges
            scratch = sum(rule.scratch is not None for rule in rules)
        rules.append(RuleRow(int(search.is_tagged), scratch, edges))
    return SearchGroup(
        slot_index=pinned.slot_index,
        catalog_version=pinned.version,
        normalization=normalization,
        history_of_S=np.asarray([search.history for search in searches], dtype=np.int32),
        widths_SL=np.asarray([search.widths for search in searches], dtype=np.int32),
        rules=tuple(rules),
        rule_loads=((1, tagged),) if any(search.is_tagged for search in searches) else (),
    )
