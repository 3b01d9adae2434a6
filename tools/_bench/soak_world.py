"""What a soak runs on: the demo's model, two versions of its catalogue with tags, and the service's process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tools._bench.traffic import TrafficOptions
from xgr_runtime.config import load_config
from xgr_runtime.config_load import read_tree
from xgr_runtime.errors import XgrError
from xgr_runtime.service.address import read_address
from xgr_runtime.xbeam.catalog_build import build_catalog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo"
TAGS = tuple(f"genre:{number}" for number in range(12))
START_LIMIT_S = 120.0


def build_catalogs(folder: Path) -> tuple[list[str], int]:
    """Two versions of the demo's catalogue with tags, the second without every tenth item; and the largest item id."""
    rows = [json.loads(line) for line in (DEMO / "items.jsonl").read_text().splitlines()]
    offsets, files = [8, 72, 136], []
    for number, kept in enumerate((rows, [row for i, row in enumerate(rows) if i % 10])):
        path = folder / f"items-{number}.xgr"
        build_catalog(
            path,
            sids=[row["sid"] for row in kept],
            item_ids=[row["item_id"] for row in kept],
            tags=[(TAGS[row["item_id"] % 12], TAGS[row["item_id"] % 7]) for row in kept],
            token_offsets=offsets,
            num_codes=[64, 64, 64],
            version=f"v{number}",
        )
        files.append(str(path))
    return files, max(row["item_id"] for row in rows)


def write_config(folder: Path, catalog: str, overrides: Sequence[str]) -> Path:
    """The demo's model with longer histories; caches so small that they are full, and evict, after the warm-up.

    Raises ConfigError for overrides that the service would refuse.
    """
    config: dict[str, Any] = {
        "device": "cpu",
        "cpu_threads": 1,
        "model": {"path": str(DEMO / "model"), "name": "movielens-demo"},
        "template": {"prefix_token_ids": [1]},
        "catalogs": {"movielens": catalog},
        "default_catalog": "movielens",
        "search": {"beam_width": 50},
        "limits": {"max_history_items": 40, "max_prompt_tokens": 124},
        "scheduler": {"max_batch_tokens": 1024},
        "cache": {"rule_cache_bytes": 2**20, "prefix_cache_bytes": 2**24},
        "ops": {"allow_reference": True},
        "service": {"port": 0},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    tree, _ = read_tree(path, overrides)
    path.write_text(yaml.safe_dump(tree))
    load_config(path)
    return path


def traffic_options(num_items: int) -> TrafficOptions:
    """Mostly returning users; every kind of trouble in small shares."""
    return TrafficOptions(
        num_users=2000,
        num_items=num_items,
        max_length=60,
        tags=TAGS,
        rules_share=0.4,
        bad_share=0.03,
        cancel_share=0.05,
        cancel_after_s=0.05,
    )


@contextlib.contextmanager
def service(
    config: Path, report: Path, swap_every_s: float, files: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The service's process and its address; killed at the end if it still runs."""
    command = [sys.executable, "-m", "tools._bench.soak_server"]
    arguments = [str(config), str(report), str(swap_every_s), *files]
    with subprocess.Popen(
        [*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            address = read_address(process.stdout, START_LIMIT_S)
            if not address:
                raise XgrError("the service did not start; what it said is above")
            yield process, address
        finally:
            if process.poll() is None:
                process.kill()
