"""Whole batches through an engine as a caller sends them: its configuration, its requests, and what came back of each batch."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tools._bench.engine_rows import NUM_EXCLUSIONS, Normalised, Row
from tools._bench.sid_catalog import NUM_CATEGORIES, NUM_REGIONS, SidItems
from xgr_runtime.config import (
    ModelConfig,
    OpsConfig,
    RuntimeConfig,
    SearchDefaults,
    TemplateConfig,
    load_config,
)
from xgr_runtime.shipped import config_file
from xgr_runtime.types import RecRequest, Rules, Search

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from xgr_runtime import Engine
    from xgr_runtime.types import RecResult
    from xgr_runtime.xschedule.batch import Batch, BatchOutput

SHIPPED = {"cuda": "h200"}  # kind of device -> name of the configuration
FIRST_TOKEN = 1  # before every history
MAX_WAIT_MS = (
    1000.0  # a batch is closed when it is full, long before that, also where rule sets are new
)
PREFIX_CACHE_BYTES = 2 << 30  # visits before are asked for just before they are hit


@dataclass(frozen=True)
class EngineSizes:
    """What the engines of a model hold at most; page_size in tokens, None: that of the configuration."""

    max_prompt_tokens: int
    max_width: int
    page_size: int | None = None


@dataclass
class LastBatches:
    """The batches since `clear`: its `note` is an engine's `on_batch`."""

    pairs: list[tuple[Batch, BatchOutput]]

    def note(self, batch: Batch, output: BatchOutput) -> None:
        """The engine's thread calls it before it answers, and reading follows the answers."""
        self.pairs.append((batch, output))

    def take(self) -> tuple[Batch, BatchOutput]:
        """The only batch since the last call; forgets them all."""
        pairs, self.pairs[:] = list(self.pairs), []
        if len(pairs) != 1:
            raise SystemExit(f"the requests of a batch ran in {len(pairs)} batches")
        return pairs[0]


def shipped_config(kind: str) -> RuntimeConfig:
    """What an engine on a device of that kind starts from: the configuration that comes with the package, or the defaults."""
    name = SHIPPED.get(kind)
    return RuntimeConfig() if name is None else load_config(config_file(name)).config


def engine_config(
    row: Row,
    sizes: EngineSizes,
    kind: str,
    dtype: str,
    catalog: Path,
    *,
    allow_reference: bool,
    captures_all: bool = False,
) -> RuntimeConfig:
    """For batches of up to row.requests requests of any history and width that the model is measured with.

    captures_all: every graph of the shipped list when the engine starts; else the same sizes, each when it is needed.
    """
    base, requests = shipped_config(kind), row.requests
    most_tokens = requests * sizes.max_prompt_tokens
    return replace(
        base,
        device=kind,  # type: ignore[arg-type]
        model=ModelConfig(name=row.model, dtype=dtype),  # type: ignore[arg-type]
        template=TemplateConfig(prefix_token_ids=(FIRST_TOKEN,)),
        catalogs={"items": str(catalog)},
        search=SearchDefaults(beam_width=row.width, num_results=row.width),
        limits=replace(
            base.limits,
            max_prompt_tokens=sizes.max_prompt_tokens,
            max_beam_width=sizes.max_width,
            max_num_results=sizes.max_width,
        ),
        scheduler=replace(
            base.scheduler,
            max_batch_histories=requests,
            max_batch_tokens=most_tokens,
            max_batch_rows=requests * sizes.max_width,
            max_wait_ms=MAX_WAIT_MS,
        ),
        cache=replace(
            base.cache,
            page_size_tokens=sizes.page_size or base.cache.page_size_tokens,
            prefix_cache=row.kind in ("miss", "hit"),
            prefix_cache_bytes=min(PREFIX_CACHE_BYTES, base.cache.prefix_cache_bytes),
        ),
        ops=OpsConfig(allow_reference=allow_reference),
        buckets=replace(
            base.buckets,
            at_start=captures_all,
            tokens=tuple(number for number in base.buckets.tokens if number <= most_tokens),
        ),
    )


class RequestMaker:
    """Requests with random histories, each drawn once: a prompt token, then items' tokens, cut to the row's length."""

    def __init__(self, items: SidItems, first_code_token: int, seed: int) -> None:
        self._items, self._first = items, first_code_token
        self._rng = np.random.default_rng(seed)
        self._count = 0

    def batch(self, row: Row, normalization: Normalised) -> list[RecRequest]:
        """One batch of the row."""
        return [self._request(row, normalization, number) for number in range(row.requests)]

    def before_hit(self, row: Row, request: RecRequest) -> RecRequest:
        """The visit before: the first tokens of that request's history."""
        assert request.prompt_token_ids is not None
        self._count += 1
        head = request.prompt_token_ids[: row.hit_tokens]
        return RecRequest(f"before-{self._count}", prompt_token_ids=head, searches=request.searches)

    def _request(self, row: Row, normalization: Normalised, number: int) -> RecRequest:
        self._count += 1
        search = Search(
            beam_width=row.width,
            num_results=row.width,
            normalization=normalization,
            rules=self.rules(number) if row.kind == "rules" else Rules(),
        )
        return RecRequest(
            f"{row.name}-{self._count}",
            prompt_token_ids=self._prompt(row.history),
            searches=(search,),
        )

    def _prompt(self, length: int) -> NDArray[np.int64]:
        levels = self._items.sids.shape[1]
        rows = self._rng.integers(0, len(self._items.sids), -(-length // levels))
        tokens = self._items.sids[rows] + self._items.num_codes * np.arange(levels) + self._first
        return np.concatenate([[FIRST_TOKEN], tokens.flatten()])[:length].astype(np.int64)

    def rules(self, number: int) -> Rules:
        """Two groups and a tag, one of four expressions by the request's place in its batch, and random items."""
        number %= NUM_REGIONS
        regions = tuple(f"region:{(number + i) % NUM_REGIONS}" for i in range(2))
        categories = tuple(f"category:{i}" for i in range(number, NUM_CATEGORIES, 2))
        ids = self._rng.integers(0, len(self._items.sids), NUM_EXCLUSIONS)
        return Rules(
            require=(regions, categories),
            exclude_tags=("adult",),
            exclude_item_ids=tuple(ids.tolist()),
        )


def run_batch(engine: Engine, requests: Sequence[RecRequest]) -> tuple[list[RecResult], float]:
    """The answers, and milliseconds from the first request's submission to the last answer."""
    start = time.perf_counter()
    futures = [engine.submit_future(request) for request in requests]
    results = [future.result() for future in futures]
    return results, (time.perf_counter() - start) * 1e3


def stages_ms(output: BatchOutput) -> dict[str, float]:
    """Milliseconds on the device, without what it cannot tell.

    span: from the first copy of the inputs to the end of the copy of the outcome, with whatever the device waited for the host
    in between. device: what is captured alone, the prefill and all rounds. Then the stages.
    """
    times = output.times
    (rounds,), (selects,), (all_rounds_s,) = times.rounds_s, times.selects_s, times.all_rounds_s
    found: dict[str, float | None] = {
        "span": times.span_s,
        "device": times.prefill_s + all_rounds_s,
        "inputs": times.to_device_s,
        "prefill": times.prefill_s,
        "rounds": all_rounds_s,
        **{f"round_{number}": seconds for number, seconds in enumerate(rounds)},
        **{f"round_{number}_select": seconds for number, seconds in enumerate(selects)},
        "outcome": times.to_host_s,
    }
    return {name: s * 1e3 for name, s in found.items() if s is not None and math.isfinite(s)}


def medians_ms(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of every stage over the runs that know it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {
        name: round(statistics.median(run[name] for run in runs if name in run), 4)
        for name in names
    }
