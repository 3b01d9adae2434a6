"""Building, opening and verifying a catalogue of random items, and rules over it, one CPU thread; then building at size.

    python tools/bench_catalog.py --json

Build: arrays to a synced, checksummed file, against numpy.lexsort of the same int32 rows, in turn. Item ids are random
int64, so their look-up is paid for. Rules: tags over all items, exclusions given as item ids. Every figure is taken
only after what it measures was compared with a plain numpy reading of the same items.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools._bench.catalog_items import Items, expressions, passes, tag_rows
from tools._bench.catalog_size import arrays_case, jsonl_case
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
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_build import build_catalog
from xgr_runtime.xbeam.rules import TagExpression, build_rule_set, clear_exclusions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Sizes:
    """What the figures are for; a test makes it small."""

    num_items: int = 1_000_000
    num_levels: int = 3
    num_codes: int = 8192
    num_tags: int = 50
    tags_per_item: int = 2
    few_exclusions: int = 100
    many_exclusions: int = 5000
    runs: int = 15
    jsonl_items: int = 1_000_000
    jsonl_runs: int = 3
    array_items: int = 10_000_000


def random_items(sizes: Sizes, rng: np.random.Generator) -> Items:
    """Uniform codes, ids over all of int64, tags drawn with repetition."""
    n = sizes.num_items
    sids = rng.integers(0, sizes.num_codes, (n, sizes.num_levels), np.int32)
    ids = np.unique(rng.integers(-(2**63), 2**63, n + n // 10 + 8, np.int64))
    tags = rng.integers(0, sizes.num_tags, (n, sizes.tags_per_item))
    return Items(sids, rng.permutation(ids)[:n], tags)


def check_build(catalog: Catalog, items: Items) -> None:
    """Every id leads to its SID; the number of SIDs is numpy's."""
    positions = catalog.positions_of_ids(items.ids)
    if not np.array_equal(catalog.sids_of_positions(positions), items.sids):
        raise SystemExit("the catalogue does not give back the SIDs it was built from")
    if catalog.num_sids != len(np.unique(items.sids, axis=0)):
        raise SystemExit("the catalogue has another number of SIDs than the items")


def check_rules(
    catalog: Catalog, items: Items, expression: TagExpression, excluded: NDArray[np.int64]
) -> None:
    """Alive edges after the exclusions are the prefixes of the items that are left."""
    rule_set = build_rule_set(catalog, expression)
    cleared = clear_exclusions(catalog, rule_set, catalog.positions_of_ids(excluded))
    keep = passes(items, expression) & ~np.isin(items.ids, excluded)
    prefixes = np.zeros(len(keep), np.int64)
    for level, size in enumerate(catalog.num_codes):
        prefixes = prefixes * size + items.sids[:, level]
        alive = rule_set.alive[level].copy()
        alive[cleared.edges[level]] = False
        if not np.array_equal(np.unique(prefixes)[alive], np.unique(prefixes[keep])):
            raise SystemExit("rules and exclusions differ from the items that are left")


def build_case(sizes: Sizes, items: Items, path: Path) -> dict[str, Any]:
    """Build against lexsort, open, verify; the file is left at `path`."""
    tokens: dict[str, Any] = {
        "num_codes": [sizes.num_codes] * sizes.num_levels,
        "token_offsets": [10 + sizes.num_codes * level for level in range(sizes.num_levels)],
    }

    def build() -> None:
        build_catalog(path, sids=items.sids, item_ids=items.ids, **tokens)

    def lexsort() -> None:
        np.lexsort([items.sids[:, level] for level in reversed(range(sizes.num_levels))])

    build()
    with Catalog.open(path) as catalog:
        catalog.verify()
        check_build(catalog, items)
    timings = time_interleaved({"build": build, "lexsort": lexsort}, sizes.runs)
    opened: list[Catalog] = []

    def verify() -> None:
        catalog = Catalog.open(path)
        catalog.verify()
        opened.append(catalog)

    cases = {"open": lambda: opened.append(Catalog.open(path)), "verify": verify}
    timings |= time_interleaved(cases, sizes.runs)
    for catalog in opened:
        catalog.close()
    return {
        "build_ratio_to_lexsort": ratio(timings, "build", "lexsort"),
        "file_mib": round(path.stat().st_size / 2**20, 3),
        "open_ms": timings["open"].median_ms,
        "verify_ms": timings["verify"].median_ms,
        "timings": as_dict(timings),
    }


def rules_case(sizes: Sizes, items: Items, path: Path, rng: np.random.Generator) -> dict[str, Any]:
    """Rule sets of new tag combinations; exclusions on top of everything and on top of a rule set."""
    build_catalog(
        path,
        sids=items.sids,
        item_ids=items.ids,
        tags=tag_rows(items, sizes.num_tags),
        num_codes=[sizes.num_codes] * sizes.num_levels,
        token_offsets=[0] * sizes.num_levels,
    )
    catalog = Catalog.open(path)
    catalog.verify()
    named = expressions(sizes.num_tags)
    few = rng.choice(items.ids, min(sizes.few_exclusions, sizes.num_items), replace=False)
    many = rng.choice(items.ids, min(sizes.many_exclusions, sizes.num_items), replace=False)
    everything, narrow = (
        build_rule_set(catalog, TagExpression()),
        build_rule_set(catalog, named["tags"]),
    )
    for expression in (TagExpression(), *named.values()):
        check_rules(catalog, items, expression, many)

    def exclude(rule_set: Any, ids: NDArray[np.int64]) -> Callable[[], object]:
        return lambda: clear_exclusions(catalog, rule_set, catalog.positions_of_ids(ids))

    timings = time_interleaved(
        {
            "tags": lambda: build_rule_set(catalog, named["tags"]),
            "tags_wide": lambda: build_rule_set(catalog, named["tags_wide"]),
            "exclude_few": exclude(everything, few),
            "exclude_many": exclude(everything, many),
            "exclude_few_of_tags": exclude(narrow, few),
            "exclude_many_of_tags": exclude(narrow, many),
        },
        sizes.runs,
    )
    facts = {
        "alive_share": round(narrow.num_alive_sids / catalog.num_sids, 4),
        "rule_set_mib": round(narrow.nbytes / 2**20, 3),
        "timings": as_dict(timings),
    }
    catalog.close()
    return facts


def run(sizes: Sizes, folder: Path, seed: int = 0) -> dict[str, Any]:
    """All cases; the keys with a required value come first."""
    rng = np.random.default_rng(seed)
    items = random_items(sizes, rng)
    build = build_case(sizes, items, folder / "bench.catalog")
    progress(f"build: {build['build_ratio_to_lexsort']} of lexsort, {build['file_mib']} MiB")
    rules = rules_case(sizes, items, folder / "bench_tags.catalog", rng)
    times = {name: timing["median_ms"] for name, timing in rules["timings"].items()}
    progress(f"rules: {times}")
    at_size = jsonl_case(folder, sizes.jsonl_items, sizes.num_codes, sizes.jsonl_runs, seed)
    progress(f"JSONL: {at_size['seconds']} s, {at_size['peak_rss_mib']} MiB at the peak")
    arrays = arrays_case(folder, sizes.array_items, sizes.num_codes, seed)
    progress(f"arrays: {arrays['seconds']} s, {arrays['peak_rss_mib']} MiB at the peak")
    return {
        **{name: figure for name, figure in build.items() if name != "timings"},
        "rule_set_ms": max(times["tags"], times["tags_wide"]),
        "exclude_few_ms": max(times["exclude_few"], times["exclude_few_of_tags"]),
        "exclude_many_ms": max(times["exclude_many"], times["exclude_many_of_tags"]),
        "jsonl_1m_s": at_size["seconds"],
        "peak_rss_mib_jsonl_1m": at_size["peak_rss_mib"],
        "build_10m_s": arrays["seconds"],
        "peak_rss_mib_10m": arrays["peak_rss_mib"],
        "sizes": vars(sizes),
        "seed": seed,
        "environment": environment(),
        "cases": {"build": build, "rules": rules, "jsonl": at_size, "arrays": arrays},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs", type=whole(MIN_RUNS, MAX_COUNT), default=Sizes.runs, help=f"at least {MIN_RUNS}"
    )
    parser.add_argument("--seed", type=whole(0, NO_LIMIT), default=0)
    parser.add_argument("--folder", type=Path, help="where to write the files (default: temporary)")
    add_output_arguments(parser)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        write_report(run(Sizes(runs=args.runs), Path(folder), args.seed), args)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
