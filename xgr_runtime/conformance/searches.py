"""The search vectors through a whole engine on a device: alone, in mixed batches, and again from captured graphs.

Only the network is missing: catalogue slots, rules, prefill, pages, rounds, reorder, selection, batching and expansion
are the runtime's own, with the providers that it binds on the device.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from xgr_runtime.conformance.difference import Difference, require
from xgr_runtime.conformance.engines import (
    EngineEntry,
    EngineShape,
    Runs,
    ask,
    make_config,
    noting_failures,
    plans_of,
)
from xgr_runtime.conformance.table_model import TableModel
from xgr_runtime.conformance.vectors import Vector, VectorCatalog, VectorSet
from xgr_runtime.hal.device import Device
from xgr_runtime.types import RecResult
from xgr_runtime.xbeam.catalog_build import build_catalog
from xgr_runtime.xschedule.engine import Engine


def write_catalogs(catalogs: Mapping[str, VectorCatalog], folder: Path) -> dict[str, Path]:
    """Compile the vectors' catalogues; their files by name."""
    paths = {}
    for name, catalog in catalogs.items():
        paths[name] = folder / f"{name}.xgr"
        build_catalog(
            paths[name],
            sids=[item.sid for item in catalog.items],
            item_ids=[item.item_id for item in catalog.items],
            weights=[item.weight for item in catalog.items],
            servable=[item.is_servable for item in catalog.items],
            tags=[list(item.tags) for item in catalog.items],
            token_of=[np.array(table, np.int32) for table in catalog.token_of],
        )
    return paths


class SearchCheck:
    """Vectors whose catalogues are compiled once, into an existing folder."""

    what = "searches"

    def __init__(self, vectors: VectorSet, folder: Path) -> None:
        self._vectors = vectors
        self._paths = write_catalogs(vectors.catalogs, folder)

    def run(self, device: Device, shape: EngineShape, *, allow_reference: bool) -> EngineEntry:
        """Every vector in every way."""
        entry = EngineEntry(self.what, shape)
        with noting_failures(entry):
            model = TableModel(self._vectors, device.torch_device, shape.dtype)
            for plan in plans_of(device):
                config = make_config(
                    device.kind, shape, self._paths, plan, allow_reference=allow_reference
                )
                runs = Runs()
                with Engine(config, device, model, self.what, on_batch=runs.note) as engine:
                    for way in plan.ways:
                        _check_way(engine, runs, self._vectors, way, entry)
                    entry.note_engine(engine.stats())
        return entry


def _check_way(
    engine: Engine, runs: Runs, vectors: VectorSet, way: str, entry: EngineEntry
) -> None:
    runs.clear()
    answers = ask(engine, [vector.request() for vector in vectors.vectors], way)
    for vector, answer in zip(vectors.vectors, answers, strict=True):
        entry.num_checked += 1
        try:
            if isinstance(answer, Exception):
                raise Difference(f"{type(answer).__name__}: {answer}")
            error = compare_answer(vector, vectors.catalogs[vector.catalog], answer, runs)
            entry.max_error = max(entry.max_error, error)
        except Difference as difference:
            entry.note_failure(f"{vector.name}, {way}", str(difference))
    # Requests share a batch where they search one catalogue by one normalisation.
    groups = Counter((vector.catalog, vector.normalization) for vector in vectors.vectors)
    if way in ("together", "again") and max(groups.values()) > 2 and runs.largest < 2:
        entry.note_failure(way, "no batch held two histories")


def compare_answer(vector: Vector, catalog: VectorCatalog, answer: RecResult, runs: Runs) -> float:
    """The largest difference of a score; Difference naming the first thing that is not as the vector says."""
    (result,) = answer.results
    levels, status = runs.levels(vector.name)
    failed_round = None if status == 0 else status - 1
    require(
        failed_round == vector.failed_round,
        f"failed round: expected {vector.failed_round}, got {failed_round}",
    )
    expected_status = "ok" if vector.failed_round is None else "failed"
    require(
        result.status == expected_status, f"expected {expected_status!r}, got {result.status!r}"
    )
    if vector.failed_round is not None:
        require(result.num_items == 0, f"a failed search returned {result.num_items} items")
        return 0.0
    error = 0.0
    for level, (nodes, scores) in enumerate(levels):
        got = [
            (catalog.prefixes[level][node], float(score))
            for node, score in zip(nodes.tolist(), scores.tolist(), strict=True)
        ]
        error = max(error, _compare_level(vector, level, got))
    num_valid = len(vector.levels[-1])
    require(
        result.num_valid == num_valid, f"num_valid: expected {num_valid}, got {result.num_valid}"
    )
    got_ids, expected_ids = result.item_ids.tolist(), list(vector.item_ids)
    require(got_ids == expected_ids, f"items: expected {expected_ids[:20]}, got {got_ids[:20]}")
    return error


def _compare_level(
    vector: Vector, level: int, got: Sequence[tuple[tuple[int, ...], float]]
) -> float:
    expected, error = vector.levels[level], 0.0
    for rank, (one, two) in enumerate(zip(got, expected, strict=False)):
        difference = abs(one[1] - two[1])
        require(
            one[0] == two[0] and difference <= vector.score_tolerance,
            f"round {level}, rank {rank}: expected {two[0]} with {two[1]!r}, got {one[0]} with {one[1]!r}",
        )
        error = max(error, difference)
    require(
        len(got) == len(expected),
        f"round {level}: expected {len(expected)} beams, got {len(got)}",
    )
    return error
