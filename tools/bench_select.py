"""Exact trie selection against the dense round (log-softmax, mask, top-k over rows x codes), one CPU thread.

    python tools/bench_select.py --json

Search: three rounds over random items. Hub: one round in which every beam has half of the codes below it. Each case
asserts identical lists before it is timed, and times both sides in turn. The dense side's top-k takes a 64 MiB
temporary: the figures are for fresh pages, the usual case; `kept_pages` has them for a heap that keeps its memory.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools._bench.allocator import (
    FRESH_PAGES,
    KEPT_PAGES,
    can_set_pages,
    page_faults,
    prepare_pages,
    set_pages,
)
from tools._bench.beam_search import (
    Beams,
    DenseSearch,
    Loaded,
    OpsSearch,
    Workload,
    check_same_lists,
    load_catalog,
)
from tools._bench.command import MAX_COUNT, NO_LIMIT, exit_code_of, whole
from tools._bench.timing import (
    MIN_RUNS,
    add_output_arguments,
    as_dict,
    environment,
    progress,
    ratio,
    time_interleaved,
    write_report,
)
from tools._bench.trained import trained_work
from tools.demo.checkpoint import ITEMS_PATH, MODEL_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

LogitsOf: TypeAlias = "Callable[[int, int, np.random.Generator], torch.Tensor]"

# Log-softmax and log-sum-exp round differently; see the fp32 row of the tolerance table.
NEAR = 1e-4


@dataclass(frozen=True)
class Sizes:
    """What the figures are for; a test makes it small."""

    width: int = 512
    num_codes: int = 8192
    num_items: int = 1_000_000
    num_levels: int = 3
    runs: int = 15


def random_sids(sizes: Sizes, rng: np.random.Generator) -> NDArray[np.int64]:
    """Distinct random items, int64 [items, levels]."""
    packed = np.zeros(0, np.int64)
    while len(packed) < sizes.num_items:
        missing = sizes.num_items - len(packed)
        drawn = np.zeros(missing, np.int64)
        for _ in range(sizes.num_levels):
            drawn = drawn * sizes.num_codes + rng.integers(0, sizes.num_codes, missing)
        packed = np.unique(np.concatenate((packed, drawn)))
    places = sizes.num_codes ** np.arange(sizes.num_levels - 1, -1, -1)
    return packed[:, None] // places % sizes.num_codes


def hub_sids(sizes: Sizes, rng: np.random.Generator) -> NDArray[np.int64]:
    """`width` prefixes of two codes, each with a random half of the codes below it."""
    half = sizes.num_codes // 2
    ranks = rng.random((sizes.width, sizes.num_codes), np.float32)
    sids = np.zeros((sizes.width, half, 3), np.int64)
    sids[:, :, 0], sids[:, :, 1] = np.divmod(np.arange(sizes.width)[:, None], sizes.num_codes)
    sids[:, :, 2] = np.argpartition(ranks, half, axis=1)[:, :half]
    return sids.reshape(-1, 3)


def normal_logits(rows: int, num_codes: int, rng: np.random.Generator) -> torch.Tensor:
    """Standard normal logits."""
    return torch.from_numpy(rng.standard_normal((rows, num_codes), np.float32))


def peaked_logits(rows: int, num_codes: int, rng: np.random.Generator) -> torch.Tensor:
    """Synthetic: log-probabilities fall as rank**-1.5 (what trained models look like), in random order, with noise."""
    ranked = -1.5 * np.log(np.arange(1, num_codes + 1, dtype=np.float32))
    logits = rng.permuted(np.broadcast_to(ranked, (rows, num_codes)), axis=1)
    logits += 0.1 * rng.standard_normal((rows, num_codes), np.float32)
    return torch.from_numpy(np.ascontiguousarray(logits))


def search_case(work: Workload, sizes: Sizes) -> dict[str, Any]:
    """Check, then time both sides with and without the normaliser."""
    ours, dense = OpsSearch(work), DenseSearch(work)
    lse = ours.normalisers()
    logp = [logits - row[:, None] for logits, row in zip(work.logits, lse, strict=True)]
    check_same_lists(ours.run(lse), dense.run(logp), 0.0)
    agreement = check_same_lists(ours.run(), dense.run(), NEAR)
    ours.counters.zero_()
    ours.run(lse)
    live, skipped = ours.counters.tolist()
    timings = time_interleaved(
        {
            "ops": ours.run,
            "dense": dense.run,
            "ops_without_norm": lambda: ours.run(lse),
            "dense_without_norm": lambda: dense.run(logp),
        },
        sizes.runs,
    )
    return {
        "ratio": ratio(timings, "ops", "dense"),
        "ratio_without_norm": ratio(timings, "ops_without_norm", "dense_without_norm"),
        "rows_skipped": round(skipped / live, 4),
        **agreement,
        "page_faults": {"ops": page_faults(ours.run), "dense": page_faults(dense.run)},
        "timings": as_dict(timings),
    }


def search_work(
    catalog: Loaded, sizes: Sizes, rng: np.random.Generator, logits_of: LogitsOf
) -> Workload:
    """All rounds from the root."""
    rows = [1, *(min(sizes.width, len(codes)) for codes in catalog.trie.codes[:-1])]
    logits = [logits_of(count, sizes.num_codes, rng) for count in rows]
    return Workload(catalog, 0, logits, Beams.root(), sizes.width)


def hub_work(
    catalog: Loaded, sizes: Sizes, rng: np.random.Generator, logits_of: LogitsOf, spread: float
) -> Workload:
    """The last round, from `width` beams whose scores spread over `spread` nats."""
    nodes = np.arange(sizes.width)
    scores = -np.linspace(0.0, spread, sizes.width, dtype=np.float32)
    logits = logits_of(sizes.width, sizes.num_codes, rng)
    return Workload(catalog, 2, [logits], Beams(scores, nodes, nodes, nodes), sizes.width)


def required(cases: dict[str, Any]) -> dict[str, float]:
    """The figures that have a required value."""
    return {
        "select_ratio_to_dense": cases["search"]["ratio"],
        "select_ratio_without_norm": cases["search"]["ratio_without_norm"],
        "select_ratio_hub": cases["hub"]["ratio"],
        "rows_skipped_hub": cases["hub"]["rows_skipped"],
        "select_ratio_hub_equal": cases["hub_equal"]["ratio"],
    }


def run(sizes: Sizes, seed: int, model_folder: Path, items_path: Path) -> dict[str, Any]:
    """All cases; the keys with a required value come first. Without a checkpoint the trained case says so."""
    torch.set_num_threads(1)
    prepare_pages()
    rng = np.random.default_rng(seed)
    items = load_catalog(random_sids(sizes, rng), sizes.num_codes)
    hub = load_catalog(hub_sids(sizes, rng), sizes.num_codes)
    works = {
        "search": search_work(items, sizes, rng, normal_logits),
        "search_peaked_synthetic": search_work(items, sizes, rng, peaked_logits),
        "hub": hub_work(hub, sizes, rng, normal_logits, 6.0),
        "hub_equal": hub_work(hub, sizes, rng, normal_logits, 0.0),
        "hub_peaked_synthetic": hub_work(hub, sizes, rng, peaked_logits, 6.0),
    }
    has_model = (model_folder / "model.safetensors").is_file()
    if has_model:
        works["search_trained"] = trained_work(model_folder, items_path, sizes.width)
    cases: dict[str, dict[str, Any]] = {}
    try:
        for regime in (FRESH_PAGES, KEPT_PAGES):
            set_pages(regime)
            cases[regime] = {name: search_case(work, sizes) for name, work in works.items()}
            for name, case in cases[regime].items():
                without = case["ratio_without_norm"]
                progress(f"{regime}, {name}: {case['ratio']} of dense, without norm {without}")
    finally:
        set_pages(FRESH_PAGES)
    return {
        **required(cases[FRESH_PAGES]),
        "pages": "set" if can_set_pages() else "as the C library has them, both times",
        "sizes": vars(sizes),
        "seed": seed,
        "layouts": {"search": items.layouts, "hub": hub.layouts},
        "trained_model": model_folder.name if has_model else f"not run: no {model_folder}",
        "environment": environment(),
        **{regime: {**required(of), "cases": of} for regime, of in cases.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs", type=whole(MIN_RUNS, MAX_COUNT), default=Sizes.runs, help=f"at least {MIN_RUNS}"
    )
    parser.add_argument(
        "--width", type=whole(1, MAX_COUNT), default=Sizes.width, help="beams of the search"
    )
    parser.add_argument(
        "--codes", type=whole(1, MAX_COUNT), default=Sizes.num_codes, help="codes of a level"
    )
    parser.add_argument(
        "--items", type=whole(1, MAX_COUNT), default=Sizes.num_items, help="random items"
    )
    parser.add_argument("--seed", type=whole(0, NO_LIMIT), default=0)
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="the demo's checkpoint")
    parser.add_argument("--model-items", type=Path, default=ITEMS_PATH, help="and its items")
    add_output_arguments(parser)
    args = parser.parse_args(arguments)
    sizes = Sizes(args.width, args.codes, args.items, runs=args.runs)
    write_report(run(sizes, args.seed, args.model, args.model_items), args)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
