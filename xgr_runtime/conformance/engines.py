"""Engines as the conformance run uses them: one configuration, catalogues in a folder, and what every batch did."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from xgr_runtime.config import (
    BucketsConfig,
    CacheConfig,
    LimitsConfig,
    ModelConfig,
    OpsConfig,
    RuntimeConfig,
    SchedulerConfig,
    SearchDefaults,
)
from xgr_runtime.conformance.difference import Difference
from xgr_runtime.errors import OpUnavailable
from xgr_runtime.hal.device import Device
from xgr_runtime.types import Float32Array, RecRequest, RecResult
from xgr_runtime.xschedule.batch import Batch, BatchOutput
from xgr_runtime.xschedule.engine import Engine
from xgr_runtime.xschedule.engine_stats import EngineStats
from xgr_runtime.xschedule.results import beam_levels

MAX_WIDTH = 128
WAIT_MS = 5.0  # long enough for requests that come together to share a batch


@dataclass(frozen=True)
class EngineShape:
    """What an engine is built with. is_dense: levels may be laid out densely, else in CSR."""

    dtype: torch.dtype
    page_size: int
    is_dense: bool = True

    @property
    def dtype_name(self) -> str:
        """As configurations write it."""
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        layout = "" if self.is_dense else ", CSR"
        return f"{self.dtype_name}, pages of {self.page_size}{layout}"


@dataclass
class EngineEntry:
    """The checks of engines of one shape. failures: (what was asked, first difference). reason: why it could not be built.

    max_error: the largest difference of a score, in nats. providers: those that were bound, by op.
    """

    what: str
    shape: EngineShape
    num_checked: int = 0
    num_failed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    reason: str = ""
    max_error: float = 0.0
    tolerance: float = 0.0
    num_graph_captures: int = 0
    providers: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def result(self) -> str:
        """passed, failed, or refused where an op had no provider for it."""
        if self.num_failed:
            return "failed"
        return "passed" if self.num_checked else "refused"

    def note_engine(self, stats: EngineStats) -> None:
        """What an engine bound and captured, beside the ones before."""
        for op, bound in stats.providers.items():
            self.providers[op] = sorted({*self.providers.get(op, ()), *bound})
        self.num_graph_captures += stats.num_graph_captures

    def note_failure(self, what: str, message: str, max_kept: int = 8) -> None:
        """Count a failed check; the first few keep their messages."""
        self.num_failed += 1
        if len(self.failures) < max_kept:
            self.failures.append((what, message[:600]))


@contextmanager
def noting_failures(entry: EngineEntry) -> Iterator[None]:
    """Around an engine: what has no provider is its reason, whatever else is raised its failure. Takes the time."""
    start = time.perf_counter()
    try:
        yield
    except OpUnavailable as error:
        entry.reason = str(error)
        if entry.num_checked:
            entry.note_failure("engine", entry.reason)
    except Exception as error:  # noqa: BLE001 - a provider may raise anything, and the run goes on
        entry.note_failure("engine", f"{type(error).__name__}: {error}")
    finally:
        entry.seconds = time.perf_counter() - start


@dataclass(frozen=True)
class EnginePlan:
    """One engine of a check: whether it captures graphs, and the ways in which it is asked everything, in order.

    "alone" and "captured" one request at a time; "together" in mixed batches; "again" the same batches, from graphs and
    from pages that the prefix cache has by then.
    """

    is_capturing: bool
    ways: tuple[str, ...]


def plans_of(device: Device) -> tuple[EnginePlan, ...]:
    """Where the device captures, an engine without graphs first, so that what capturing breaks is told from the rest."""
    if not device.is_capturing_supported:
        return (EnginePlan(False, ("alone", "together", "again")),)
    return (EnginePlan(False, ("alone",)), EnginePlan(True, ("captured", "together", "again")))


def make_config(
    kind: str,
    shape: EngineShape,
    catalogs: Mapping[str, Path],
    plan: EnginePlan,
    *,
    allow_reference: bool,
) -> RuntimeConfig:
    """Small buffers, prompts of up to 320 tokens, batches of up to 8 histories. Graphs are captured as vectors need them."""
    return RuntimeConfig(
        device=kind,  # type: ignore[arg-type]
        model=ModelConfig(dtype=shape.dtype_name),  # type: ignore[arg-type]
        catalogs={name: str(path) for name, path in catalogs.items()},
        search=SearchDefaults(beam_width=4),
        limits=LimitsConfig(max_prompt_tokens=320, max_beam_width=MAX_WIDTH),
        scheduler=SchedulerConfig(
            max_batch_tokens=1024, max_batch_rows=8 * MAX_WIDTH, max_wait_ms=WAIT_MS
        ),
        cache=CacheConfig(
            page_size_tokens=shape.page_size,
            prefix_cache_bytes=1 << 20,
            dense_level_bytes=1 << 20 if shape.is_dense else 0,
        ),
        buckets=BucketsConfig(at_start=False),
        ops=OpsConfig(allow_reference=allow_reference),
        graphs=plan.is_capturing,
    )


class Runs:
    """Every batch that an engine ran since `clear`, and what came back: its `note` is the engine's `on_batch`."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Batch, BatchOutput]] = []

    def note(self, batch: Batch, output: BatchOutput) -> None:
        """One batch. The engine's thread calls it before it answers, and reading follows the answers."""
        self.pairs.append((batch, output))

    def clear(self) -> None:
        """Forget the batches before; only while nothing is asked."""
        self.pairs.clear()

    @property
    def largest(self) -> int:
        """The most histories of one batch."""
        return max((batch.num_histories for batch, _ in self.pairs), default=0)

    def levels(self, request_id: str) -> tuple[list[tuple[np.ndarray, Float32Array]], int]:
        """Per round the trie nodes and scores of the live rows of the last run of a request, and the status of its search."""
        for batch, output in reversed(self.pairs):
            if request_id not in batch.request_ids:
                continue
            history = batch.request_ids.index(request_id)
            for group, out in zip(batch.groups, output.groups, strict=True):
                for index in np.flatnonzero(group.history_of_S == history).tolist():
                    return beam_levels(group, out, index), int(out.status_S[index])
        raise Difference(f"no batch held request {request_id!r}")


def ask(engine: Engine, requests: Sequence[RecRequest], way: str) -> list[RecResult | Exception]:
    """Answer requests in a way of an `EnginePlan`. What one raises is its answer."""
    futures = []
    for request in requests:
        futures.append(engine.submit_future(request))
        if way in ("alone", "captured"):
            futures[-1].exception()
    answers: list[RecResult | Exception] = []
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        answers.append(error or future.result())
    return answers
