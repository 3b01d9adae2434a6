"""The rows of one model: answers checked first, all of an engine's rows at once, then timed, normalisations in turn."""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tools._bench.answer_check import Judges, Verdict
from tools._bench.drawn_model import DrawnWeights, draw_decoder
from tools._bench.engine_log import progress
from tools._bench.engine_parity import Oracle
from tools._bench.engine_rows import ALL_SHAPES, NORMALIZATIONS, Normalised, Row
from tools._bench.engine_run import (
    EngineSizes,
    LastBatches,
    RequestMaker,
    engine_config,
    run_batch,
)
from tools._bench.engine_timing import figures_of, line_of, parity_of, time_row
from tools._bench.plain_decoder import PlainDecoder, strict_float32
from tools._bench.unconstrained import unconstrained_selection
from xgr_runtime import Engine
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from tools._bench.floor import ModelShape
    from tools._bench.sid_catalog import SidItems
    from xgr_runtime.hal.device import Device
    from xgr_runtime.models.base import RecModel
    from xgr_runtime.types import RecRequest

MODEL_SEED, HISTORY_SEED = 11, 12
CPU_WIDTH, CPU_HISTORY = 16, 48
CPU_PROMPT_TOKENS = 64
LONG_BATCH_TOKENS = 16_384  # one answer of a batch beyond is checked: the reference reads its whole history in float32


@dataclass(frozen=True)
class Plan:
    """What every row of a run shares. checked: requests of a batch whose answers are checked. repetitions: runs that are timed,
    fewer where they take longer than row_s seconds; never fewer than `FEWEST_RUNS`.

    max_prompt_tokens and max_width are those of all engines, whatever a row needs: its graphs are those of a deployment.
    """

    device: Device
    dtype: torch.dtype
    items: SidItems
    catalog: Path
    commit: str
    repetitions: int
    row_s: float
    warmup: int
    checked: int
    num_judges: int
    page_size: int | None
    max_prompt_tokens: int
    max_width: int
    allow_reference: bool
    has_time: Callable[[], bool]


@dataclass
class Outcome:
    """rows: of the results file. failures: (row, reason), and late: likewise, for what no time was left. cpu_checks: by model
    and normalisation, what was compared. on_change is called where something of it is new.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    cpu_checks: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[dict[str, Any]] = field(default_factory=list)
    late: list[tuple[str, str]] = field(default_factory=list)
    on_change: Callable[[], None] | None = None

    def changed(self) -> None:
        """Tells whoever wants to know."""
        if self.on_change is not None:
            self.on_change()


class NoTimeLeft(Exception):
    """What was not measured for want of time, which is no failure of it."""

    def __init__(self, reason: str = "no time was left") -> None:
        super().__init__(reason)


@dataclass
class _Checked:
    """Verdicts of a row's answers under one normalisation, as they come."""

    coming: list[Future[Verdict]] = field(default_factory=list)
    known: list[Verdict] = field(default_factory=list)

    def verdicts(self) -> list[Verdict]:
        self.known += [future.result() for future in self.coming]
        self.coming = []
        return self.known


class ModelMatrix:
    """One model on the device: its decoder, its reference in float32, its engines one after the other."""

    def __init__(self, plan: Plan, name: str, rows: list[Row], outcome: Outcome) -> None:
        self._plan, self._name, self._rows, self._outcome = plan, name, rows, outcome
        self._shape = ALL_SHAPES[name]
        place = plan.device.torch_device
        weights = DrawnWeights(place, plan.dtype, MODEL_SEED)
        progress(f"{name}: drawing the weights")
        self._model: RecModel = draw_decoder(self._shape, weights)
        self._reference = PlainDecoder(self._shape, weights, place)
        self._first_code_token = self._shape.text_vocabulary
        self._oracle = self._oracle_for(plan.dtype)
        self._makers = {row.name: self._maker(number) for number, row in enumerate(rows)}
        self._judges = Judges(plan.num_judges)

    def run(self) -> None:
        """Every row; what fails is noted, and the next one runs."""
        try:
            with self._noting("reference against the CPU"):
                self._check_cpu()
            for key in dict.fromkeys(row.engine for row in self._rows):
                rows = [row for row in self._rows if row.engine == key]
                if not self._plan.has_time():
                    self._note_late(rows)
                    continue
                with self._noting(", ".join(row.name for row in rows)):
                    self._run_engine(rows)
        finally:
            self._judges.close()

    def _run_engine(self, rows: list[Row]) -> None:
        last = LastBatches([])
        progress(f"{self._name}: engine for {', '.join(row.name for row in rows)}")
        with open_engine(self._plan, self._model, rows[0], last) as engine:
            checks = {}
            for row in rows:
                if not self._plan.has_time():
                    self._note_late([row])
                    continue
                with self._noting(row.name), strict_float32():
                    checks[row.name] = self._ask(engine, last, row)
            for row in rows:
                if row.name not in checks:
                    continue
                with self._noting(row.name):
                    if not self._plan.has_time():
                        raise NoTimeLeft
                    self._time(engine, last, row, checks[row.name])

    def _ask(self, engine: Engine, last: LastBatches, row: Row) -> dict[Normalised, _Checked]:
        """One batch under each normalisation, its first and last requests to be checked."""
        found = {}
        is_long = row.requests * row.history > LONG_BATCH_TOKENS
        num_checked = 1 if is_long else self._plan.checked
        for normalization in NORMALIZATIONS:
            requests = self._ready(engine, last, row, normalization)
            results, _ = run_batch(engine, requests)
            batch, output = last.take()
            checked = found[normalization] = _Checked()
            for number in np.unique(np.linspace(0, row.requests - 1, num_checked).astype(int)):
                request, result = requests[number], results[number]
                if row.kind == "unconstrained":
                    checked.known.append(self._oracle.check_unconstrained(request, batch, output))
                else:
                    question = self._oracle.question(request, result, batch, output)
                    checked.coming.append(self._judges.ask(question))
        return found

    def _time(
        self, engine: Engine, last: LastBatches, row: Row, checks: dict[Normalised, _Checked]
    ) -> None:
        plan = self._plan
        for normalization, checked in checks.items():
            bad = [verdict for verdict in checked.verdicts() if verdict.violation]
            if bad:
                what = f"{normalization}: {len(bad)} of {len(checked.known)} answers are wrong"
                raise SystemExit(f"{what}: {bad[0].violation}")
        self._free_caches()

        def ready(row: Row, normalization: Normalised) -> list[RecRequest]:
            return self._ready(engine, last, row, normalization)

        taken = time_row(plan, engine, last, ready, row)
        stats = engine.stats()
        memory_mib = self._memory_mib()
        for normalization in NORMALIZATIONS:
            figures = {"row": row.name, "commit": plan.commit, "items": len(plan.items.sids)}
            figures |= figures_of(self._shape, row, normalization, taken[normalization])
            figures |= parity_of(checks[normalization].verdicts())
            figures["memory_mib"] = memory_mib
            figures["providers"] = {op: list(bound) for op, bound in stats.providers.items()}
            self._outcome.rows.append(figures)
            progress(line_of(figures))
        self._outcome.changed()

    def _ready(
        self, engine: Engine, last: LastBatches, row: Row, normalization: Normalised
    ) -> list[RecRequest]:
        return ready_batch(engine, last, self._makers[row.name], row, normalization)

    def _check_cpu(self) -> None:
        """A small search of the same weights on the CPU, in float32, against the reference on this device."""
        plan, last = self._plan, LastBatches([])
        row = Row(self._name, CPU_WIDTH, CPU_HISTORY, 1)
        weights = DrawnWeights(
            plan.device.torch_device, plan.dtype, MODEL_SEED, torch.device("cpu"), torch.float32
        )
        sizes = EngineSizes(CPU_PROMPT_TOKENS, CPU_WIDTH, plan.page_size)
        config = engine_config(row, sizes, "cpu", "float32", plan.catalog, allow_reference=True)
        model, maker = draw_decoder(self._shape, weights), self._maker(999)
        oracle = self._oracle_for(torch.float32)
        with Engine(config, CpuDevice(), model, "drawn", on_batch=last.note) as engine:
            last.pairs.clear()
            for normalization in NORMALIZATIONS:
                (request,) = maker.batch(row, normalization)
                (result,), _ = run_batch(engine, [request])
                with strict_float32():
                    question = oracle.question(request, result, *last.take())
                verdict = self._judges.ask(question).result()
                found: dict[str, Any] = {"model": self._name, "normalization": normalization}
                found |= {"width": CPU_WIDTH, "history": CPU_HISTORY}
                self._outcome.cpu_checks.append({**found, **parity_of([verdict])})
                if verdict.violation:
                    self._fail(
                        [row], f"CPU and device differ, {normalization}: {verdict.violation}"
                    )
        progress(f"{self._name}: the reference agrees with the CPU where no failure is listed")

    def _oracle_for(self, dtype: torch.dtype) -> Oracle:
        return Oracle(
            self._plan.items,
            self._reference,
            self._first_code_token,
            TOLERANCES[dtype].same_answer,
            is_half=dtype != torch.float32,
        )

    def _maker(self, number: int) -> RequestMaker:
        return maker_of(self._plan, self._shape, number)

    def _free_caches(self) -> None:
        if self._plan.device.kind == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _memory_mib(self) -> float:
        """Most memory reserved on the device while the row was timed, the reference's weights aside."""
        num_bytes = self._plan.device.memory().peak_bytes
        if self._plan.device.kind == "cuda":
            num_bytes -= self._reference.num_bytes
        return round(num_bytes / 2**20, 1)

    def _noting(self, what: str) -> contextlib.AbstractContextManager[None]:
        return noting(self._outcome, what)

    def _note_late(self, rows: list[Row]) -> None:
        self._outcome.late += [(row.name, str(NoTimeLeft())) for row in rows]

    def _fail(self, rows: list[Row], reason: str) -> None:
        for row in rows:
            self._outcome.failures.append((row.name, reason))
            progress(f"FAILED {row.name}: {reason}")


@contextlib.contextmanager
def open_engine(plan: Plan, model: RecModel, row: Row, last: LastBatches) -> Iterator[Engine]:
    """An engine of the plan for the rows that share the row's; batches are noted in `last`, which is empty."""
    config = engine_config(
        row,
        EngineSizes(plan.max_prompt_tokens, plan.max_width, plan.page_size),
        plan.device.kind,
        str(plan.dtype).removeprefix("torch."),
        plan.catalog,
        allow_reference=plan.allow_reference,
    )
    is_free = row.kind == "unconstrained"
    selection = unconstrained_selection(plan.device.kind) if is_free else contextlib.nullcontext()
    with selection, Engine(config, plan.device, model, "drawn", on_batch=last.note) as engine:
        last.pairs.clear()
        yield engine


def maker_of(plan: Plan, shape: ModelShape, number: int) -> RequestMaker:
    """Of the requests of the model's row of that number."""
    return RequestMaker(plan.items, shape.text_vocabulary, HISTORY_SEED + number)


def ready_batch(
    engine: Engine, last: LastBatches, maker: RequestMaker, row: Row, normalization: Normalised
) -> list[RecRequest]:
    """A batch's requests, whose users' visits before have been answered."""
    requests = maker.batch(row, normalization)
    if row.hit_tokens:
        engine.recommend([maker.before_hit(row, request) for request in requests])
        last.pairs.clear()
    return requests


@contextlib.contextmanager
def noting(outcome: Outcome, what: str) -> Iterator[None]:
    """Whatever is raised inside is a failure of `what`, and the next one runs."""
    try:
        yield
    except NoTimeLeft as error:
        outcome.late.append((what, str(error)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - noted with its message
        outcome.failures.append((what, f"{type(error).__name__}: {error}"[:3000]))
        progress(f"FAILED {what}: {error}")
        if not isinstance(error, SystemExit):
            progress(traceback.format_exc(limit=-6))
