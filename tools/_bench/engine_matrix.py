"""The rows of one model: answers checked first, all of an engine's rows at once, then timed, normalisations in turn."""

from __future__ import annotations

import contextlib
import statistics
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tools._bench.answer_check import Judges, Verdict
from tools._bench.drawn_model import DrawnWeights, draw_decoder
from tools._bench.engine_parity import Oracle
from tools._bench.engine_rows import ALL_SHAPES, NORMALIZATIONS, RULES_TEXT, Normalised, Row
from tools._bench.engine_run import (
    EngineSizes,
    LastBatches,
    RequestMaker,
    engine_config,
    run_batch,
    stages_ms,
)
from tools._bench.floor import Work, floor_ms
from tools._bench.plain_decoder import PlainDecoder, strict_float32
from tools._bench.timing import progress
from tools._bench.unconstrained import unconstrained_selection
from xgr_runtime import Engine
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from tools._bench.sid_catalog import SidItems
    from xgr_runtime.hal.device import Device
    from xgr_runtime.models.base import RecModel

MODEL_SEED, HISTORY_SEED = 11, 12
CPU_WIDTH, CPU_HISTORY = 16, 48
CPU_PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Plan:
    """What every row of a run shares. checked: requests of a batch whose answers are checked.

    max_prompt_tokens and max_width are those of all engines, whatever a row needs: its graphs are those of a deployment.
    """

    device: Device
    dtype: torch.dtype
    items: SidItems
    catalog: Path
    commit: str
    repetitions: int
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
    """rows: of the results file. failures: (row, reason). cpu_checks: by model and normalisation, what was compared."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    cpu_checks: list[dict[str, Any]] = field(default_factory=list)


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
        self._sizes = EngineSizes(plan.max_prompt_tokens, plan.max_width, plan.page_size)
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
                    self._fail(rows, "no time was left")
                    continue
                with self._noting(", ".join(row.name for row in rows)):
                    self._run_engine(rows)
        finally:
            self._judges.close()

    def _run_engine(self, rows: list[Row]) -> None:
        plan, last = self._plan, LastBatches([])
        config = engine_config(
            rows[0],
            self._sizes,
            plan.device.kind,
            str(plan.dtype).removeprefix("torch."),
            plan.catalog,
            allow_reference=plan.allow_reference,
        )
        is_free = rows[0].kind == "unconstrained"
        selection = (
            unconstrained_selection(plan.device.kind) if is_free else contextlib.nullcontext()
        )
        progress(f"{self._name}: engine for {', '.join(row.name for row in rows)}")
        with (
            selection,
            Engine(config, plan.device, self._model, "drawn", on_batch=last.note) as engine,
        ):
            last.pairs.clear()
            checks = {}
            for row in rows:
                with self._noting(row.name), strict_float32():
                    checks[row.name] = self._ask(engine, last, row)
            for row in rows:
                if row.name not in checks:
                    continue
                with self._noting(row.name):
                    if not self._plan.has_time():
                        raise SystemExit("no time was left")
                    self._time(engine, last, row, checks[row.name])

    def _ask(self, engine: Engine, last: LastBatches, row: Row) -> dict[Normalised, _Checked]:
        """One batch under each normalisation, its first and last requests to be checked."""
        maker, found = self._makers[row.name], {}
        for normalization in NORMALIZATIONS:
            requests = maker.batch(row, normalization)
            self._visit_before(engine, last, row, requests)
            results, _ = run_batch(engine, requests)
            batch, output = last.take()
            checked = found[normalization] = _Checked()
            for number in np.unique(
                np.linspace(0, row.requests - 1, self._plan.checked).astype(int)
            ):
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
        plan, maker = self._plan, self._makers[row.name]
        for normalization, checked in checks.items():
            bad = [verdict for verdict in checked.verdicts() if verdict.violation]
            if bad:
                what = f"{normalization}: {len(bad)} of {len(checked.known)} answers are wrong"
                raise SystemExit(f"{what}: {bad[0].violation}")
        self._free_caches()
        taken: dict[Normalised, list[dict[str, float]]] = {n: [] for n in NORMALIZATIONS}
        cached = 0
        for turn in range(plan.warmup + plan.repetitions):
            for normalization in NORMALIZATIONS if turn % 2 else NORMALIZATIONS[::-1]:
                requests = maker.batch(row, normalization)
                self._visit_before(engine, last, row, requests)
                results, wall_ms = run_batch(engine, requests)
                _, output = last.take()
                cached = results[0].num_cached_tokens
                if turn >= plan.warmup:
                    taken[normalization].append({"wall": wall_ms, **stages_ms(output)})
        stats = engine.stats()
        memory_mib = self._memory_mib()
        for normalization in NORMALIZATIONS:
            figures = self._figures(row, normalization, taken[normalization], cached)
            figures |= _parity(checks[normalization].verdicts())
            figures["memory_mib"] = memory_mib
            figures["providers"] = {op: list(bound) for op, bound in stats.providers.items()}
            self._outcome.rows.append(figures)
            progress(_line(figures))

    def _figures(
        self, row: Row, normalization: Normalised, taken: list[dict[str, float]], cached: int
    ) -> dict[str, Any]:
        work = Work(row.history, row.width, row.requests, cached, normalization == "vocab")
        floor = floor_ms(self._shape, work)
        device, wall = ([run[name] for run in taken] for name in ("device", "wall"))
        medians = {name: statistics.median(run[name] for run in taken) for name in taken[0]}
        stages = {name: round(ms, 4) for name, ms in medians.items() if ms == ms}
        median, low, high = _percentiles(device)
        wall_median, wall_low, wall_high = _percentiles(wall)
        return {
            "row": row.name,
            "commit": self._plan.commit,
            "model": row.model,
            "width": row.width,
            "history": row.history,
            "requests": row.requests,
            "items": len(self._plan.items.sids),
            "normalization": normalization,
            "rules": RULES_TEXT[row.kind],
            "cached_tokens": cached,
            "median_ms": median,
            "p20_ms": low,
            "p80_ms": high,
            "wall_median_ms": wall_median,
            "wall_p20_ms": wall_low,
            "wall_p80_ms": wall_high,
            "runs": len(taken),
            "floor_ms": round(floor, 4),
            "share_of_floor": round(floor / median, 4),
            "stages_ms": {n: ms for n, ms in stages.items() if n not in ("wall", "device")},
        }

    def _visit_before(
        self, engine: Engine, last: LastBatches, row: Row, requests: list[Any]
    ) -> None:
        if row.hit_tokens:
            maker = self._makers[row.name]
            engine.recommend([maker.before_hit(row, request) for request in requests])
            last.pairs.clear()

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
                self._outcome.cpu_checks.append({**found, **_parity([verdict])})
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
        return RequestMaker(self._plan.items, self._first_code_token, HISTORY_SEED + number)

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

    def _fail(self, rows: list[Row], reason: str) -> None:
        for row in rows:
            self._outcome.failures.append((row.name, reason))
            progress(f"FAILED {row.name}: {reason}")


@contextlib.contextmanager
def noting(outcome: Outcome, what: str) -> Iterator[None]:
    """Whatever is raised inside is a failure of `what`, and the next one runs."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 - noted with its message
        outcome.failures.append((what, f"{type(error).__name__}: {error}"[:3000]))
        progress(f"FAILED {what}: {error}")
        if not isinstance(error, SystemExit):
            progress(traceback.format_exc(limit=-6))


def _percentiles(times_ms: list[float]) -> tuple[float, float, float]:
    low, high = np.percentile(times_ms, [20, 80]).round(4).tolist()
    return round(statistics.median(times_ms), 4), low, high


def _parity(verdicts: list[Verdict]) -> dict[str, Any]:
    stats = [verdict.stats for verdict in verdicts if verdict.stats is not None]
    return {
        "violations": sum(bool(verdict.violation) for verdict in verdicts),
        "near_ties": sum(found.num_rows - found.num_common for found in stats),
        "ranks_swapped": sum(verdict.num_swapped for verdict in verdicts),
        "checked_requests": len(verdicts),
        "checked_rows": sum(found.num_rows for found in stats),
        "safe_rows": sum(found.num_safe for found in stats),
        "possible_sets_checked": sum(found.possible_checked for found in stats),
        "largest_score_error": round(max((found.max_error for found in stats), default=0.0), 6),
    }


def _line(figures: dict[str, Any]) -> str:
    return (
        f"{figures['row']:32} {figures['normalization']:6} {figures['median_ms']:9.3f} ms "
        f"({figures['p20_ms']:.3f}-{figures['p80_ms']:.3f}), wall {figures['wall_median_ms']:.3f}, "
        f"floor {figures['floor_ms']:.3f} = {figures['share_of_floor']:.0%}, "
        f"error {figures['largest_score_error']}, near ties {figures['near_ties']}"
    )
