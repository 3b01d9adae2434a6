"""The product as the tests drive it: compiled catalogues, small engines, and the beams of every round of its runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.helpers.catalogs import write_jsonl
from tests.helpers.table_model import LogitTable, TableRecModel
from xgr_runtime.config import RuntimeConfig, load_config
from xgr_runtime.conformance.same_answer import Answer, BeamTrace
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.types import RecRequest, Search
from xgr_runtime.xbeam.catalog_build import build_catalog_from_jsonl
from xgr_runtime.xschedule.engine import Engine
from xgr_runtime.xschedule.results import beam_levels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.helpers.oracle import Catalog, Sid
    from xgr_runtime.types import RecResult, SearchResult
    from xgr_runtime.xschedule.batch import Batch, BatchOutput, GroupOutput, SearchGroup
    from xgr_runtime.xschedule.worker import PendingBatch

SMALL = (
    "device=cpu",
    "scheduler.max_batch_rows=2048",
    "scheduler.max_batch_tokens=256",
    "scheduler.max_wait_ms=0",
    "limits.max_beam_width=1024",
    "limits.max_num_results=4096",
    "limits.max_prompt_tokens=64",
    "search.num_results=4000",
    "cache.page_size_tokens=4",
    "cache.prefix_cache_bytes=65536",
)


class ReferenceCpu(CpuDevice):
    """The CPU under a name that no provider knows, so that every op is the torch reference."""

    kind = "reference"


CPU_DEVICES = {"providers": CpuDevice, "reference": ReferenceCpu}


def compile_catalog(catalog: Catalog, path: Path, version: str | None = None) -> Path:
    """Build the compiled file from a JSONL of the same items."""
    source = write_jsonl(catalog, path.with_suffix(".jsonl"))
    token_of = [np.array(table) for table in catalog.token_of]
    build_catalog_from_jsonl(path, source, token_of=token_of, version=version)
    return path


def small_config(catalogs: Mapping[str, Path], *overrides: str) -> RuntimeConfig:
    """A configuration for small tests; overrides in the form "a.b=value"."""
    named = [f"catalogs.{name}={path}" for name, path in catalogs.items()]
    return load_config(None, [*SMALL, *named, *overrides]).config


def table_engine(
    table: LogitTable, catalogs: Mapping[str, Path], *overrides: str, device: str = "providers"
) -> Engine:
    """An engine on given logits (not started). device: a key of CPU_DEVICES."""
    config = small_config(catalogs, "ops.allow_reference=true", *overrides)
    return Engine(config, CPU_DEVICES[device](), TableRecModel(table), "table")


def prompt_request(prompt: Sequence[int], request_id: str = "", **search: Any) -> RecRequest:
    """A request with a rendered prompt and one search."""
    return RecRequest(
        request_id=request_id,
        prompt_token_ids=np.array(prompt, np.int64),
        searches=(Search(**search),),
    )


def rows_of(result: SearchResult) -> list[tuple[Sid, float]]:
    """The distinct SIDs of a result with their scores, in its order."""
    rows: dict[Sid, float] = {}
    for sid, score in zip(result.sids.tolist(), result.scores.tolist(), strict=True):
        rows.setdefault(tuple(sid), score)
    return list(rows.items())


def items_of(result: SearchResult) -> list[tuple[int, Sid, float]]:
    """(item id, SID, score) of every returned item."""
    sids = [tuple(sid) for sid in result.sids.tolist()]
    return list(zip(result.item_ids.tolist(), sids, result.scores.tolist(), strict=True))


def one(results: Sequence[RecResult]) -> SearchResult:
    """The only search result of the only request."""
    assert len(results) == 1
    assert len(results[0].results) == 1
    return results[0].results[0]


def place_of(
    batch: Batch, output: BatchOutput, history: int
) -> tuple[SearchGroup, GroupOutput, int]:
    """The group and its output that hold the only search of a history, and the search's number there."""
    found = [
        (group, out, index)
        for group, out in zip(batch.groups, output.groups, strict=True)
        for index in np.flatnonzero(group.history_of_S == history).tolist()
    ]
    assert len(found) == 1, f"history {history} has {len(found)} searches"
    return found[0]


class Prefixes:
    """The prefix behind each trie node: a level's nodes are its distinct prefixes in order of their codes."""

    def __init__(self, catalog: Catalog) -> None:
        sids = catalog.sids
        self._of_level = [
            sorted({sid[: level + 1] for sid in sids}) for level in range(catalog.num_levels)
        ]

    def of(self, level: int, node: int) -> Sid:
        return self._of_level[level][node]


class RecordedRuns:
    """Every batch an engine ran and what came back."""

    def __init__(self) -> None:
        self.runs: list[tuple[Batch, BatchOutput]] = []

    def trace(self, request_id: str, prefixes: Prefixes) -> BeamTrace:
        """The beams of each round of the last run of a request."""
        for batch, output in reversed(self.runs):
            if request_id in batch.request_ids:
                place = place_of(batch, output, batch.request_ids.index(request_id))
                levels = beam_levels(*place)
                return BeamTrace(
                    [
                        [
                            (prefixes.of(level, node), score)
                            for node, score in zip(nodes.tolist(), scores.tolist(), strict=True)
                        ]
                        for level, (nodes, scores) in enumerate(levels)
                    ]
                )
        raise AssertionError(f"no batch held request {request_id!r}")

    def answer(self, request_id: str, prefixes: Prefixes, num_valid: int) -> Answer:
        """The request's run for `assert_same_answer`; num_valid is what its reply said."""
        trace = self.trace(request_id, prefixes)
        return Answer(trace.levels[-1], num_valid, trace)


@contextmanager
def recorded(engine: Engine) -> Iterator[RecordedRuns]:
    """Notes the runs of an engine while it is open."""
    notes, submit = RecordedRuns(), engine.worker.submit
    watch_batches(engine, after=lambda batch, output: notes.runs.append((batch, output)))
    try:
        yield notes
    finally:
        engine.worker.submit = submit  # type: ignore[method-assign]


class WatchedBatch:
    """A batch on its way, of which something is told when it has ended."""

    def __init__(
        self, batch: Batch, pending: PendingBatch, after: Callable[[Batch, BatchOutput], object]
    ) -> None:
        self._batch, self._pending, self._after = batch, pending, after

    def is_done(self) -> bool:
        return self._pending.is_done()

    def wait(self) -> BatchOutput:
        output = self._pending.wait()
        self._after(self._batch, output)
        return output


def watch_batches(
    engine: Engine,
    before: Callable[[Batch], object] = lambda batch: None,
    after: Callable[[Batch, BatchOutput], object] = lambda batch, output: None,
) -> None:
    """Wraps the worker's `submit`: `before` is called when a batch is to be issued, `after` when it has ended well."""
    submit = engine.worker.submit

    def watched(batch: Batch) -> WatchedBatch:
        before(batch)
        return WatchedBatch(batch, submit(batch), after)

    engine.worker.submit = watched  # type: ignore[method-assign, assignment]
