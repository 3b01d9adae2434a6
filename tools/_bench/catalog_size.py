"""Catalogues at size, each built in a child process: its time from start to exit and its peak memory.

JSONL: `xgr catalog build` itself, verification included, of items with key, title, weight and two tags. Arrays: the Python
API on item ids, weights and two tags an item; the arrays are made in the child and count into its peak.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):
    sys.path.insert(0, str(ROOT))

from xgr_runtime.xbeam.catalog import Catalog  # noqa: E402
from xgr_runtime.xbeam.catalog_build import build_catalog  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_LEVELS = 3
NUM_TAGS = 50
_BLOCK = 50_000


def write_jsonl(path: Path, num_items: int, num_codes: int, seed: int) -> None:
    """Random items, one a line, 180 bytes each; five in a hundred are not servable."""
    rng = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as file:
        for first in range(0, num_items, _BLOCK):
            n = min(_BLOCK, num_items - first)
            sids = rng.integers(0, num_codes, (n, NUM_LEVELS)).tolist()
            tags = rng.integers(0, NUM_TAGS, (n, 2)).tolist()
            weights = rng.random(n).round(4).tolist()
            hidden = (rng.random(n) < 0.05).tolist()
            for row in range(n):
                item = {
                    "item_id": 7 * (first + row),
                    "key": f"B{first + row:09d}",
                    "sid": sids[row],
                    "title": f"Item number {first + row} of the catalogue",
                    "tags": [f"category:{tags[row][0]}", f"brand:{tags[row][1]}"],
                    "weight": weights[row],
                }
                item |= {"servable": False} if hidden[row] else {}
                file.write(json.dumps(item) + "\n")


def build_arrays(path: Path, num_items: int, num_codes: int, seed: int) -> None:
    """What the child of `arrays_case` does."""
    rng = np.random.default_rng(seed)
    share = 2 / NUM_TAGS
    build_catalog(
        path,
        sids=rng.integers(0, num_codes, (num_items, NUM_LEVELS), np.int32),
        item_ids=7 * rng.permutation(num_items),
        weights=rng.random(num_items),
        tags={
            f"tag:{tag}": np.flatnonzero(rng.random(num_items, np.float32) < share)
            for tag in range(NUM_TAGS)
        },
        num_codes=[num_codes] * NUM_LEVELS,
        token_offsets=[num_codes * level for level in range(NUM_LEVELS)],
    )


def run_child(command: Sequence[str]) -> dict[str, float]:
    """Runs a Python command in this checkout with one thread; its seconds and peak. Its failure ends the benchmark."""
    launcher = [sys.executable, str(Path(__file__).with_name("child_peak.py")), sys.executable]
    done = subprocess.run(
        [*launcher, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    facts: dict[str, float] = json.loads(done.stdout)
    return facts


def jsonl_case(
    folder: Path, num_items: int, num_codes: int, runs: int, seed: int
) -> dict[str, Any]:
    """`xgr catalog build` of a JSONL file; the median of the runs and all of them."""
    source, out = folder / "bench.jsonl", folder / "bench_jsonl.catalog"
    write_jsonl(source, num_items, num_codes, seed)
    codes = ",".join([str(num_codes)] * NUM_LEVELS)
    offsets = ",".join(str(num_codes * level) for level in range(NUM_LEVELS))
    command = ["-m", "xgr_runtime.cli", "catalog", "build", str(source), str(out)]
    command += ["--token-offsets", offsets, "--codes", codes]
    children = [run_child(command) for _ in range(runs)]
    check(out, num_items)
    facts = {
        "items": num_items,
        "source_mib": round(source.stat().st_size / 2**20, 1),
        "file_mib": round(out.stat().st_size / 2**20, 1),
        "runs": children,
    }
    for name in ("seconds", "cpu_seconds"):
        facts[name] = statistics.median(child[name] for child in children)
    facts["peak_rss_mib"] = max(child["peak_rss_mib"] for child in children)
    source.unlink()
    out.unlink()
    return facts


def arrays_case(folder: Path, num_items: int, num_codes: int, seed: int) -> dict[str, Any]:
    """`build_catalog` of arrays."""
    out = folder / "bench_arrays.catalog"
    options = ["--items", str(num_items), "--codes", str(num_codes), "--seed", str(seed)]
    child = run_child([str(Path(__file__)), str(out), *options])
    check(out, num_items)
    facts = {"items": num_items, "file_mib": round(out.stat().st_size / 2**20, 1), **child}
    out.unlink()
    return facts


def check(path: Path, num_items: int) -> None:
    """The file is sound and has every item."""
    with Catalog.open(path) as catalog:
        catalog.verify()
        if not np.array_equal(catalog.sorted_ids, 7 * np.arange(num_items)):
            raise SystemExit(f"{path} has other items than it was built from")


def main() -> int:
    """The child of `arrays_case`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--items", type=int, required=True)
    parser.add_argument("--codes", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    build_arrays(args.out, args.items, args.codes, args.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
