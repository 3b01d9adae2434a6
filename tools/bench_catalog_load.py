"""What loading a catalogue costs the requests beside it, and whether retired versions give their memory back.

    python tools/bench_catalog_load.py --json

One engine on the CPU serves a catalogue of a million items to one client that sends its next request when it has its
answer. Beside it versions are loaded, activated and retired in turn. A second thread sleeps a millisecond at a time and
notes how late it wakes: that is how long the interpreter's lock was held by somebody else. Latency and lateness of the
moments with a change are compared with those of the idle moments between them, so both see the same machine. After each
cycle the process's resident and anonymous memory and the bytes of the device slots are read, once what the load ran into
has ended. Exit code: 0, or 1 when nothing fell into one of the two, so that it has no figures.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools._bench.catalog_versions import (  # noqa: E402
    FIRST_TOKEN,
    NUM_LEVELS,
    write_versions,
)
from tools._bench.command import MAX_COUNT, NO_LIMIT, exit_code_of, number, whole  # noqa: E402
from tools._bench.memory import memory_mib  # noqa: E402
from tools._bench.random_model import Qwen3Shape, write_random_model  # noqa: E402
from tools._bench.samples import Samples, by_span, wait_past  # noqa: E402
from tools._bench.timing import (  # noqa: E402
    add_output_arguments,
    environment,
    progress,
    write_report,
)
from xgr_runtime import Engine, RecRequest, RuntimeConfig, Search  # noqa: E402
from xgr_runtime.config import LimitsConfig, ModelConfig, SchedulerConfig  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "main"


@dataclass(frozen=True)
class Sizes:
    """What is measured; a test makes it small."""

    num_items: int = 1_000_000
    num_codes: int = 8192
    num_tags: int = 50
    cycles: int = 6
    idle_s: float = 4.0
    hidden_size: int = 64


def make_engine(folder: Path, sizes: Sizes, catalog: Path, seed: int) -> Engine:
    """An engine over a small random model, so that the catalogue's share of a request shows."""
    shape = Qwen3Shape(
        num_layers=2,
        hidden_size=sizes.hidden_size,
        intermediate_size=2 * sizes.hidden_size,
        vocab_size=FIRST_TOKEN + NUM_LEVELS * sizes.num_codes,
    )
    config = RuntimeConfig(
        device="cpu",
        cpu_threads=1,
        model=ModelConfig(path=str(write_random_model(folder / "model", shape, seed))),
        catalogs={NAME: str(catalog)},
        limits=LimitsConfig(max_prompt_tokens=256, max_beam_width=64),
        scheduler=SchedulerConfig(
            max_batch_histories=2, max_batch_tokens=512, max_batch_rows=128, max_wait_ms=0.0
        ),
    )
    return Engine.from_config(config)


def send_requests(engine: Engine, stop: threading.Event, samples: Samples, seed: int) -> None:
    """One request after the other until `stop`."""
    rng = np.random.default_rng(seed)
    search = Search(beam_width=16, num_results=10)
    with samples.taking():
        while not stop.is_set():
            tokens = rng.integers(0, FIRST_TOKEN, 24)
            start = time.perf_counter()
            (result,) = engine.recommend([RecRequest(prompt_token_ids=tokens, searches=(search,))])
            samples.add(start, (time.perf_counter() - start) * 1e3)
            assert result.results[0].num_items == search.num_results


def note_lateness(stop: threading.Event, samples: Samples) -> None:
    """How late a sleep of one millisecond ends."""
    with samples.taking():
        while not stop.is_set():
            start = time.perf_counter()
            time.sleep(1e-3)
            samples.add(start, (time.perf_counter() - start) * 1e3 - 1.0)


def state(engine: Engine) -> dict[str, float]:
    """Memory of the process and of the slots, MiB; what is garbage is collected first."""
    gc.collect()
    named = engine.describe()["catalogs"][NAME]["versions"]
    slots = sum(version["device_bytes"] for version in named.values())
    return {**memory_mib(), "active_slots_mib": round(slots / 2**20, 1)}


def run(sizes: Sizes, folder: Path, seed: int = 0) -> dict[str, Any]:
    """The whole measurement."""
    # In a process of its own: what building leaves behind in the heap must not hide what serving does.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        counts = (sizes.num_items, sizes.num_codes, sizes.num_tags)
        paths = pool.submit(write_versions, folder, *counts, seed).result()
    progress(f"two versions of {sizes.num_items} items, {paths[0].stat().st_size >> 20} MiB each")
    requests, lateness, stop = Samples(), Samples(), threading.Event()
    loads: list[tuple[float, float]] = []
    changes: list[tuple[float, float]] = []
    pauses: list[tuple[float, float]] = []
    with make_engine(folder, sizes, paths[0], seed) as engine:
        threads = [
            threading.Thread(target=send_requests, args=(engine, stop, requests, seed)),
            threading.Thread(target=note_lateness, args=(stop, lateness)),
        ]
        for thread in threads:
            thread.start()
        states = [state(engine)]
        try:
            for cycle in range(sizes.cycles):
                idle(sizes.idle_s, requests, lateness)
                start = time.perf_counter()
                version = engine.load_catalog(NAME, str(paths[(cycle + 1) % 2]))
                loads.append((start, time.perf_counter()))
                engine.activate_catalog(NAME, version)
                retire(engine, f"v{1 + cycle % 2}")
                changes.append((start, time.perf_counter()))
                wait_past(changes[-1][1], requests, lateness)
                pause_s = time.perf_counter()
                states.append(state(engine))
                pauses.append((pause_s, time.perf_counter()))
                progress(f"cycle {cycle + 1}: load {loads[-1][1] - start:.2f} s, {states[-1]}")
            idle(sizes.idle_s, requests, lateness)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    return report(sizes, seed, requests, lateness, loads, changes, pauses, states)


def idle(seconds: float, *samples: Samples) -> None:
    """So long at least, and until something was seen in it."""
    start_s = time.perf_counter()
    time.sleep(seconds)
    wait_past(start_s, *samples)


def retire(engine: Engine, version: str) -> None:
    """As soon as no request is on it any more."""
    while engine.describe()["catalogs"][NAME]["versions"][version]["num_pins"]:
        time.sleep(1e-3)
    engine.retire_catalog(NAME, version)


def report(
    sizes: Sizes,
    seed: int,
    requests: Samples,
    lateness: Samples,
    loads: Sequence[tuple[float, float]],
    changes: Sequence[tuple[float, float]],
    pauses: Sequence[tuple[float, float]],
    states: Sequence[dict[str, float]],
) -> dict[str, Any]:
    """The figures. Spans in seconds; the first second warms up. A change: load, activation, retirement."""
    warmup_s = min(1.0, sizes.idle_s / 2)
    found = {
        name: by_span(samples, changes, pauses, warmup_s)
        for name, samples in (("requests", requests), ("lateness", lateness))
    }
    seconds = sorted(last - first for first, last in loads)
    growth = {
        key: round(states[-1][key] - states[1][key], 1) for key in ("resident_mib", "anonymous_mib")
    }
    return {
        "load_s": round(float(np.median(seconds)), 3),
        "p99_idle_ms": found["requests"]["idle"]["p99_ms"],
        "p99_during_change_ms": found["requests"]["during_change"]["p99_ms"],
        "stall_max_during_change_ms": found["lateness"]["during_change"]["max_ms"],
        "growth_after_second_cycle_mib": growth,
        **found,
        "states": list(states),
        "sizes": vars(sizes),
        "seed": seed,
        "environment": environment(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cycles", type=whole(3, MAX_COUNT), default=Sizes.cycles)
    parser.add_argument("--items", type=whole(100, MAX_COUNT), default=Sizes.num_items)
    parser.add_argument(
        "--idle-s", type=number(0, MAX_COUNT), default=Sizes.idle_s, help="between two loads"
    )
    parser.add_argument("--seed", type=whole(0, NO_LIMIT), default=0)
    add_output_arguments(parser)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        sizes = Sizes(num_items=args.items, cycles=args.cycles, idle_s=args.idle_s)
        found = run(sizes, Path(folder), args.seed)
    write_report(found, args)
    for span, advice in (("idle", "--idle-s"), ("during_change", "--items")):
        if not (found["requests"][span]["num"] and found["lateness"][span]["num"]):
            progress(f"error: no sample fell into {span!r}: take more {advice}")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
