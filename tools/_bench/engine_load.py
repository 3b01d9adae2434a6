"""What is measured of an engine in a process of its own: memory of the device, and how busy a saturated engine keeps it.

Memory is what torch has reserved: more than is in use, and what nobody else can have. The whole process, with the context of
the driver and loaded kernels, is told beside it. An answer of each engine is checked once everything is measured, because the
reference needs memory too; a wrong one withdraws the figures.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tools._bench.answer_check import judge
from tools._bench.busy_share import busy_share, device_intervals
from tools._bench.drawn_model import DrawnWeights, draw_decoder
from tools._bench.engine_log import progress
from tools._bench.engine_matrix import HISTORY_SEED, MODEL_SEED, Plan
from tools._bench.engine_memory import MIB, takes_mib, weight_bytes
from tools._bench.engine_parity import Oracle
from tools._bench.engine_rows import ALL_SHAPES, Row
from tools._bench.engine_run import (
    EngineSizes,
    LastBatches,
    RequestMaker,
    engine_config,
    run_batch,
)
from tools._bench.plain_decoder import PlainDecoder, strict_float32
from xgr_runtime import Engine
from xgr_runtime.hal.tolerances import TOLERANCES
from xgr_runtime.xschedule.ladder import Ladder

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tools._bench.floor import ModelShape
    from xgr_runtime.types import RecRequest, RecResult
    from xgr_runtime.xschedule.batch import Batch, BatchOutput

PROFILED_S, SETTLING_S = 3.6, 1.0
NUM_REQUESTS = 256  # distinct ones, asked again and again


def measure_engine(
    plan: Plan, row: Row, max_prompt_tokens: int, *, is_profiled: bool
) -> dict[str, Any]:
    """One engine: memory after its start, after one batch and under load; if asked for, how busy the device is then."""
    shape, place = ALL_SHAPES[row.model], plan.device.torch_device
    last = LastBatches([])
    config = engine_config(
        row,
        EngineSizes(max_prompt_tokens, row.width, plan.page_size),
        plan.device.kind,
        str(plan.dtype).removeprefix("torch."),
        plan.catalog,
        allow_reference=plan.allow_reference,
        captures_all=True,
    )
    weights = DrawnWeights(place, plan.dtype, MODEL_SEED)
    model = draw_decoder(shape, weights)
    if plan.device.kind == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    maker = RequestMaker(plan.items, shape.text_vocabulary, HISTORY_SEED)
    num_kernels = compiled_before()
    start = time.monotonic()
    with Engine(config, plan.device, model, "drawn", on_batch=last.note) as engine:
        start_s = round(time.monotonic() - start, 2)
        progress(f"{row.name}: engine started in {start_s} s")
        num_graphs = engine.stats().num_graph_captures
        started = {"seconds": start_s, "graphs": num_graphs, "kernels_compiled_before": num_kernels}
        figures = _memory(plan, engine, maker, row)
        if is_profiled:
            figures |= _busy(engine, maker, row)
        stats = engine.stats()
        sizes = engine.runner.sizes
        buckets = sizes.describe() if isinstance(sizes, Ladder) else {}
        last.pairs.clear()
        requests = maker.batch(row, "level")
        results, _ = run_batch(engine, requests)
        batch, output = last.take()
    check_answer(plan, shape, weights, (requests[0], results[0], batch, output))
    return {
        "commit": plan.commit,
        "model": row.model,
        "width": row.width,
        "history": row.history,
        "requests": row.requests,
        "items": len(plan.items.sids),
        "max_prompt_tokens": max_prompt_tokens,
        "max_batch_tokens": config.scheduler.max_batch_tokens,
        "max_batch_rows": config.scheduler.max_batch_rows,
        "prefix_cache": config.cache.prefix_cache,
        "max_batches_in_flight": config.scheduler.max_batches_in_flight,
        **figures,
        "start": started,
        "num_graphs": stats.num_graph_captures,
        "buckets": buckets,
        "violations": 0,
    }


def compiled_before() -> int:
    """Kernels that Triton's cache on disk holds: 0 where an engine's start has to compile them all."""
    place = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return sum(1 for _ in Path(place).glob("*/*.cubin"))


def check_answer(
    plan: Plan,
    shape: ModelShape,
    weights: DrawnWeights,
    answered: tuple[RecRequest, RecResult, Batch, BatchOutput],
) -> None:
    """Raises SystemExit where the answer to a request is not what the reference gives."""
    reference = PlainDecoder(shape, weights, plan.device.torch_device)
    t = TOLERANCES[plan.dtype].same_answer
    is_half = plan.dtype != torch.float32
    oracle = Oracle(plan.items, reference, shape.text_vocabulary, t, is_half=is_half)
    with strict_float32():
        verdict = judge(oracle.question(*answered))
    if verdict.violation:
        raise SystemExit(f"an answer is wrong: {verdict.violation}")


def _memory(plan: Plan, engine: Engine, maker: RequestMaker, row: Row) -> dict[str, Any]:
    weights_mib = weight_bytes(ALL_SHAPES[row.model], plan.dtype) / MIB
    started = _reserved_mib(plan)
    run_batch(engine, maker.batch(row, "level"))
    run_batch(engine, maker.batch(row, "vocab"))
    once = _reserved_mib(plan)
    used = plan.device.memory().used_bytes / MIB
    with _Load(engine, maker, row) as load:
        time.sleep(SETTLING_S)
        num_answered = load.num_answered
    peak = plan.device.memory().peak_bytes / MIB
    return {
        "weights_mib": round(weights_mib, 1),
        "started_mib": round(started, 1),
        "beyond_weights_mib": round(once - weights_mib, 1),
        "takes_mib": takes_mib(ALL_SHAPES[row.model], engine, plan.dtype, once),
        "graphs_mib": round(engine.stats().graph_bytes / MIB, 1),
        "used_beyond_weights_mib": round(used - weights_mib, 1),
        "peak_reserved_mib": round(peak, 1),
        "process_mib": round(_process_mib(plan), 1),
        "num_answered_under_load": num_answered,
    }


def _busy(engine: Engine, maker: RequestMaker, row: Row) -> dict[str, Any]:
    activity = torch.profiler.ProfilerActivity.CUDA
    with _Load(engine, maker, row) as load:
        time.sleep(SETTLING_S)
        with torch.profiler.profile(activities=[activity]) as profile:
            before, start = load.num_answered, time.monotonic()
            time.sleep(PROFILED_S)
            answered, seconds = load.num_answered - before, time.monotonic() - start
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = profile.profiler.kineto_results.events()
    found = busy_share(*device_intervals(events))
    if found.seconds < 3.0:
        raise SystemExit(f"the profile covers {found.seconds} s of work, 3 s are needed")
    return {
        "busy_share": found.share,
        "seconds": found.seconds,
        "num_intervals": found.num_intervals,
        "longest_gap_us": found.longest_gap_us,
        "requests_per_s": round(answered / seconds, 1),
    }


class _Load:
    """More requests than the engine can serve, as long as it is open."""

    def __init__(self, engine: Engine, maker: RequestMaker, row: Row) -> None:
        self._engine = engine
        batches = max(1, NUM_REQUESTS // row.requests)
        self._requests = [r for _ in range(batches) for r in maker.batch(row, "level")]
        self._room = threading.Semaphore(4 * row.requests)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._feed, name="feeder")
        self.num_answered = 0
        self._failure: BaseException | None = None

    def __enter__(self) -> _Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _feed(self) -> None:
        unanswered: deque[Future[Any]] = deque()
        try:
            for request in itertools.cycle(self._requests):
                self._room.acquire()
                if self._is_ending.is_set():
                    break
                while unanswered and unanswered[0].done():
                    unanswered.popleft()
                unanswered.append(self._engine.submit_future(request))
                unanswered[-1].add_done_callback(self._answered)
            for future in unanswered:
                future.exception()
        except Exception as error:  # noqa: BLE001 - raised where the load ends
            self._failure = error

    def _answered(self, future: Future[Any]) -> None:
        self._failure = self._failure or future.exception()
        self.num_answered += 1
        self._room.release()


def _reserved_mib(plan: Plan) -> float:
    if plan.device.kind == "cuda":
        return torch.cuda.memory_reserved() / MIB
    return plan.device.memory().used_bytes / MIB


def _process_mib(plan: Plan) -> float:
    """All that is in use on the device, by whomever: of this process alone where nobody else is on it."""
    if plan.device.kind == "cuda":
        free, total = torch.cuda.mem_get_info()
        return (total - free) / MIB
    return plan.device.memory().used_bytes / MIB
