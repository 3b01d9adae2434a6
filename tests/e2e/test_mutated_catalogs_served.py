"""Changed catalogue files offered to a serving engine: refused by name and nothing changes, or loaded, verified and searched."""

from __future__ import annotations

import collections
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.engines import make_config
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from tests.xbeam.catalogs import build_full, raw_header, with_header
from tests.xbeam.test_mutated_catalogs import Forger
from xgr_runtime.errors import CatalogError, CheckpointError
from xgr_runtime.types import RecRequest, Search
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xschedule.engine import Engine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e


def answer(engine: Engine) -> tuple[bytes, ...]:
    request = RecRequest(
        "r",
        history_sids=np.array([[0, 1], [1, 2]], np.uint32),
        searches=(Search(beam_width=6, num_results=20),),
    )
    (result,) = engine.recommend([request])[0].results
    assert result.status == "ok"
    return tuple(a.tobytes() for a in (result.item_ids, result.sids, result.scores))


def items_of(path: Path) -> dict[int, tuple[int, ...]]:
    with Catalog.open(path) as catalog:
        catalog.verify()
        servable = np.arange(catalog.num_servable)
        sids = catalog.sids_of_positions(servable).tolist()
        ids = catalog.item_ids[servable].tolist()
        return {item: tuple(sid) for item, sid in zip(ids, sids, strict=True)}


@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_changed_files_change_nothing_or_are_sound(tmp_path: Path, count: int) -> None:
    build_full(tmp_path / "good")
    shape = TinyShape(vocab_size=24, hidden_size=16, intermediate_size=24, num_heads=2)
    model = write_tiny_model(tmp_path / "model", "qwen3", shape)
    good = (tmp_path / "good").read_bytes()
    header = raw_header(good)
    header["meta"]["version"] = "v2"
    forger = Forger(with_header(good, json.dumps(header).encode()), seed=5)
    counts: collections.Counter[str] = collections.Counter()
    with Engine.from_config(make_config(model, {"items": tmp_path / "good"})) as engine:
        expected, before = answer(engine), engine.catalogs.describe()
        path = tmp_path / "changed"
        for name, content in forger.draw(count):
            path.write_bytes(content)
            try:
                version = engine.load_catalog("items", str(path))
            except (CatalogError, CheckpointError) as error:
                counts[f"refused: {type(error).__name__}"] += 1
                assert engine.catalogs.describe() == before
                continue
            counts["loaded"] += 1
            engine.activate_catalog("items", version)
            ids, sids, _ = answer(engine)
            items = items_of(path)
            rows = np.frombuffer(sids, np.uint32).reshape(-1, 2).tolist()
            for item, sid in zip(np.frombuffer(ids, np.int64).tolist(), rows, strict=True):
                assert items[item] == tuple(sid), name
            engine.activate_catalog("items", "v1")
            engine.retire_catalog("items", version)
            assert answer(engine) == expected
    assert counts["refused: CatalogError"] > count / 2
    assert counts["loaded"] >= 1
