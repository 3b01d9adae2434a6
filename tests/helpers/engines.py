"""Engines over tiny checkpoints and catalogues made in a test's folder, and what their batches did.

The oracle's `Catalog` is the one description of a catalogue in these tests; `write_catalog` compiles it for the
product, `Recording` turns the product's batches back into prefixes and scores that the oracles understand.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.helpers import devices
from tests.helpers.oracle import Rules as OracleRules
from tests.helpers.oracle import expand_items
from tests.helpers.product import place_of, watch_batches
from tests.helpers.tiny_models import hf_reference, load_hf
from xgr_runtime.config import (
    BucketsConfig,
    CacheConfig,
    LimitsConfig,
    ModelConfig,
    OpsConfig,
    RuntimeConfig,
    SchedulerConfig,
    SearchDefaults,
    TemplateConfig,
)
from xgr_runtime.config_check import check_config
from xgr_runtime.conformance.same_answer import (
    Answer,
    BeamTrace,
    SameAnswerStats,
    assert_same_answer,
)
from xgr_runtime.types import RecRequest, RecResult, Rules, Search, SearchResult
from xgr_runtime.xbeam.catalog_build import build_catalog
from xgr_runtime.xschedule.engine import Engine
from xgr_runtime.xschedule.results import beam_levels

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from tests.helpers.oracle import Catalog, Item, Sid
    from xgr_runtime.conformance.same_answer import Reference
    from xgr_runtime.hal.device import Device
    from xgr_runtime.xschedule.batch import Batch, BatchOutput, GroupOutput, SearchGroup

PREFIX_TOKENS = (1,)
PATIENT_MS = 60_000.0
SMALL_CACHE_BYTES = 1 << 20


def write_catalog(path: Path, catalog: Catalog, version: str | None = None) -> Path:
    """Compiles the oracle's catalogue."""
    items = catalog.items
    build_catalog(
        path,
        sids=[item.sid for item in items],
        item_ids=[item.item_id for item in items],
        keys=[item.key for item in items] if any(item.key for item in items) else None,
        weights=[item.weight for item in items],
        servable=[item.servable for item in items],
        tags=[sorted(item.tags) for item in items] if any(item.tags for item in items) else None,
        token_of=[np.asarray(table, dtype=np.int32) for table in catalog.token_of],
        version=version,
    )
    return path


def make_config(
    model: Path,
    catalogs: Mapping[str, Path],
    *,
    template: TemplateConfig | None = None,
    search: SearchDefaults | None = None,
    limits: LimitsConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    cache: CacheConfig | None = None,
    buckets: BucketsConfig | None = None,
    allow_reference: bool = False,
) -> RuntimeConfig:
    """A checked configuration for the device of this run; small buffers unless asked otherwise.

    Graphs are captured when they are needed, which for a few batches is far fewer than all of a ladder. The prefix cache
    is small, as the default is hundreds of megabytes, all of which an engine writes when it is made.
    """
    kind = devices.of_this_run().kind
    limits = limits or LimitsConfig(max_prompt_tokens=256, max_beam_width=1024)
    scheduler = scheduler or SchedulerConfig(
        max_batch_tokens=1024,
        max_batch_rows=max(2048, limits.max_beam_width),
        max_wait_ms=1.0,
    )
    cache = cache or CacheConfig()
    if cache.prefix_cache_bytes == CacheConfig().prefix_cache_bytes:
        cache = replace(cache, prefix_cache_bytes=SMALL_CACHE_BYTES)
    config = RuntimeConfig(
        device=kind,  # type: ignore[arg-type]
        model=ModelConfig(path=str(model)),
        template=template or TemplateConfig(prefix_token_ids=PREFIX_TOKENS),
        catalogs={name: str(path) for name, path in catalogs.items()},
        search=search or SearchDefaults(),
        limits=limits,
        scheduler=scheduler,
        cache=cache,
        buckets=buckets or BucketsConfig(at_start=False),
        ops=OpsConfig(allow_reference=allow_reference),
    )
    check_config(config)
    return config


def make_engine(config: RuntimeConfig, device: Device | None = None) -> Engine:
    """The engine, not started. In 16 bits an NPU's fused attention needs larger pages than the default."""
    is_fused = config.device == "npu" and config.model.dtype != "float32"
    if is_fused and config.cache.page_size_tokens == CacheConfig().page_size_tokens:
        config = replace(config, cache=replace(config.cache, page_size_tokens=128))
    return Engine.from_config(config, device)


@contextmanager
def started_patient(engine: Engine, max_wait_ms: float = PATIENT_MS) -> Iterator[Engine]:
    """A started engine that holds a request back that long for others that fit into its batch, whatever its configuration says.

    Longer than any machine is held up: batches have to be full, which closes them at once.
    """
    with engine:
        scheduler = engine._scheduler
        scheduler._config = replace(scheduler._config, max_wait_ms=max_wait_ms)
        yield engine


def recommend_together(engine: Engine, requests: Sequence[RecRequest]) -> list[RecResult]:
    """Answers of a patient engine to requests that are one batch, which is full with them."""
    scheduler = engine._scheduler
    before = scheduler._config
    scheduler._config = replace(before, max_batch_histories=len(requests))
    try:
        return engine.recommend(requests)
    finally:
        scheduler._config = before


@dataclass
class Recording:
    """Every batch the engine ran since `record_batches`, with its output."""

    batches: list[tuple[Batch, BatchOutput]] = field(default_factory=list)
    _prefixes: dict[str, tuple[npt.NDArray[np.int64], ...]] = field(default_factory=dict)

    def batch_of(self, request_id: str) -> Batch:
        """The one batch that answered a request."""
        found = [batch for batch, _ in self.batches if request_id in batch.request_ids]
        assert len(found) == 1, f"{request_id!r} ran in {len(found)} batches"
        return found[0]

    def of(self, request_id: str) -> tuple[SearchGroup, GroupOutput, int]:
        """The group that held the one search of a request, its output and the search's number in it."""
        batch = self.batch_of(request_id)
        (output,) = (output for one, output in self.batches if one is batch)
        return place_of(batch, output, batch.request_ids.index(request_id))

    def trace(self, request_id: str, catalog: Any) -> BeamTrace:
        """Per level the surviving prefixes and their scores; `catalog` is the product's, for its node numbers."""
        group, output, index = self.of(request_id)
        if catalog.digest not in self._prefixes:
            self._prefixes[catalog.digest] = node_prefixes(catalog)
        prefixes = self._prefixes[catalog.digest]
        levels: list[list[tuple[Sid, float]]] = []
        for level, (nodes, scores) in enumerate(beam_levels(group, output, index)):
            rows = prefixes[level][nodes].tolist()
            levels.append(
                [(tuple(row), float(s)) for row, s in zip(rows, scores.tolist(), strict=True)]
            )
        return BeamTrace(levels)


def record_batches(engine: Engine) -> Recording:
    """Wraps the worker's `submit`; what it does is unchanged."""
    recording = Recording()
    watch_batches(engine, after=lambda batch, output: recording.batches.append((batch, output)))
    return recording


def node_prefixes(catalog: Any) -> tuple[npt.NDArray[np.int64], ...]:
    """Per level int64 [nodes, level + 1]: the codes from the root to each node, read off the CSR arrays."""
    above = np.zeros((1, 0), dtype=np.int64)
    result = []
    for offsets, codes in zip(catalog.offsets, catalog.codes, strict=True):
        parent = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        above = np.concatenate([above[parent], codes.astype(np.int64)[:, None]], axis=1)
        result.append(above)
    return tuple(result)


def loaded_catalog(engine: Engine, name: str = "main", version: str = "") -> Any:
    """The product's catalogue object behind a name."""
    pinned = engine.catalogs.pin(name, version)
    engine.catalogs.release(pinned)
    return pinned.catalog


def prompt_of(
    catalog: Catalog, history: Sequence[int], prefix: Sequence[int] = PREFIX_TOKENS
) -> list[int]:
    """What a history of item ids must become under a template with nothing but a prefix."""
    by_id = {item.item_id: item for item in catalog.items}
    known = [by_id[item_id] for item_id in history if item_id in by_id]
    tokens = [
        catalog.token_of[level][code] for item in known for level, code in enumerate(item.sid)
    ]
    return [*prefix, *tokens]


def kept_by(catalog: Catalog, rules: Rules, history: Sequence[int] = ()) -> Catalog:
    """The catalogue rebuilt without what the rules take out."""
    excluded = [*map(int, rules.exclude_item_ids), *(history if rules.exclude_history else ())]
    return catalog.keep(
        OracleRules(rules.require, rules.exclude_tags, excluded, rules.exclude_keys)
    )


class Oracle:
    """Right answers for requests on one checkpoint and one catalogue, from transformers; each score is computed once."""

    def __init__(self, folder: Path, catalog: Catalog) -> None:
        self.folder, self.catalog = folder, catalog
        self._model = load_hf(folder)
        self._references: dict[Any, Reference] = {}

    def reference(self, prompt: Sequence[int], kept: Catalog, normalization: Any) -> Reference:
        """Teacher-forced scores over the sub-catalogue `kept`."""
        key = (tuple(prompt), tuple(kept.sids), normalization)
        if key not in self._references:
            self._references[key] = hf_reference(
                self._model,
                prompt,
                lambda prefix: kept.children.get(prefix, ()),
                self.catalog.token_of,
                normalization,
            )
        return self._references[key]

    def check(
        self,
        result: SearchResult,
        trace: BeamTrace | None,
        history: Sequence[int],
        search: Search,
        prompt: Sequence[int] | None = None,
        t: float = 1e-4,
    ) -> SameAnswerStats:
        """One search against the same-answer rule on the rebuilt catalogue, and its items against the expansion."""
        kept = kept_by(self.catalog, search.rules, history)
        prompt = prompt_of(self.catalog, history) if prompt is None else prompt
        ref = self.reference(prompt, kept, result.normalization)
        answer = answer_of(result) if trace is None else Answer.from_trace(trace)
        stats = assert_same_answer(answer, ref, t, result.beam_widths)
        assert result.num_valid == answer.num_valid
        assert_expanded(
            result, answer.rows, kept, search.num_results or 10, search.max_items_per_sid
        )
        return stats


def answer_of(result: SearchResult) -> Answer:
    """The distinct SIDs of a result, for a result that was not cut below its live beams."""
    rows: dict[Sid, float] = {}
    for sid, score in zip(result.sids.tolist(), result.scores.tolist(), strict=True):
        rows.setdefault(tuple(sid), score)
    return Answer(list(rows.items()), result.num_valid)


def assert_expanded(
    result: SearchResult,
    rows: Sequence[tuple[Sid, float]],
    kept: Catalog,
    num_results: int,
    max_items_per_sid: int | None = None,
) -> None:
    """The items are those of the ranked SIDs: weight descending, id ascending, capped, cut."""
    wanted = {sid for sid, _ in rows}
    small = kept.keep(lambda item: item.sid in wanted)
    expected = expand_items(rows, small, num_results, max_items_per_sid)
    assert result.item_ids.tolist() == [row.item_id for row in expected]
    assert list(map(tuple, result.sids.tolist())) == [row.sid for row in expected]
    assert result.scores.tolist() == [np.float32(row.score) for row in expected]
    assert result.num_items == len(expected)
    if result.keys is not None:
        by_id = {item.item_id: item for item in small.items}
        assert list(result.keys) == [by_id[row.item_id].key for row in expected]


def same_bits(one: RecResult, two: RecResult) -> bool:
    """Whether two replies agree in everything but their timings and request id."""
    return bool(_plain(one) == _plain(two))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.str, value.tobytes())
    if isinstance(value, RecResult | SearchResult):
        ignored = ("timings", "request_id")
        return [_plain(getattr(value, f.name)) for f in fields(value) if f.name not in ignored]
    if isinstance(value, tuple):
        return [_plain(element) for element in value]
    return value


def request_of(
    request_id: str, history: Sequence[int], search: Search | None = None, **options: Any
) -> RecRequest:
    """A request by item ids."""
    return RecRequest(
        request_id,
        history_item_ids=np.asarray(history, dtype=np.int64),
        searches=(search or Search(),),
        **options,
    )


def items_of(catalog: Catalog) -> dict[int, Item]:
    """Items by id."""
    return {item.item_id: item for item in catalog.items}
