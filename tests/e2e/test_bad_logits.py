"""NaN or +inf from the model fails the search that read it, names the round, and touches no other search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch

from tests.helpers.catalogs import contiguous_tokens, random_catalog
from tests.helpers.engines import (
    PATIENT_MS,
    Oracle,
    Recording,
    items_of,
    loaded_catalog,
    make_config,
    make_engine,
    record_batches,
    request_of,
    started_patient,
    write_catalog,
)
from tests.helpers.oracle import Catalog, Item
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from xgr_runtime.config import SchedulerConfig
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.models.registry import load_model
from xgr_runtime.types import NORMALIZATIONS, RecRequest, Rules, Search
from xgr_runtime.xschedule.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from xgr_runtime import RuntimeConfig
    from xgr_runtime.types import Normalization, RecResult

pytestmark = pytest.mark.e2e
VOCAB = 64
TOGETHER = SchedulerConfig(max_batch_histories=4, max_batch_rows=2048, max_batch_tokens=512)


@dataclass(frozen=True)
class Poison:
    """One bad number in some rows of the embedding or the head; no checkpoint that holds one is loaded, so in memory."""

    rows: Sequence[int]
    value: float
    where: Literal["embedding", "head"] = "embedding"

    def put_into(self, model: Any) -> None:
        weight_VM = model.head.weight_VM if self.where == "head" else model._embedding_VM
        weight_VM[list(self.rows), 0] = self.value


def write_model(folder: Path) -> Path:
    """An untied model."""
    return write_tiny_model(folder, "qwen3", TinyShape(vocab_size=VOCAB))


def catalog_without(bad_code: int) -> Catalog:
    """Items on all codes; only one of them, 9999, has `bad_code` at any level."""
    catalog = random_catalog(3, 200, contiguous_tokens([8, 8, 8], 2))
    items = tuple(item for item in catalog.items if bad_code not in item.sid)
    return Catalog((*items, Item(9999, (bad_code,) * 3, key="key-9999")), catalog.token_of)


def recommend(
    config: RuntimeConfig,
    requests: Sequence[RecRequest],
    poison: Poison,
    max_wait_ms: float = PATIENT_MS,
) -> tuple[list[RecResult], Recording, Any]:
    model = load_model(config.model.path, torch.device("cpu"), torch.float32)
    config = replace(
        config, scheduler=replace(config.scheduler, max_batch_histories=len(requests))
    )  # a batch of all is closed at once
    poisoned = Engine(config, CpuDevice(), model, "poisoned")
    with started_patient(poisoned, max_wait_ms) as engine:
        poison.put_into(model)
        recording = record_batches(engine)
        replies = engine.recommend(requests)
        return replies, recording, loaded_catalog(engine)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_history_fails_alone(
    tmp_path: Path, value: float, normalization: Normalization
) -> None:
    catalog = catalog_without(0)
    bad_tokens = [catalog.token_of[level][0] for level in range(3)]
    folder = write_model(tmp_path / "model")
    oracle = Oracle(folder, catalog.keep(lambda item: item.item_id != 9999))
    file = write_catalog(tmp_path / "items.xgr", catalog)
    ids = [item.item_id for item in oracle.catalog.items]
    # The bad item is in the catalogue as history; being one SID of many it is excluded from every search.
    search = Search(
        beam_width=12,
        num_results=200,
        normalization=normalization,
        rules=Rules(exclude_item_ids=(9999,)),
    )
    histories = {"a": ids[:4], "bad": [ids[0], 9999, ids[1]], "b": ids[4:5], "c": ids[5:11]}
    requests = [request_of(name, history, search) for name, history in histories.items()]
    replies, recording, product = recommend(
        make_config(folder, {"main": file}, scheduler=TOGETHER),
        requests,
        Poison(bad_tokens, value),
    )
    assert recording.of("a")[0] is recording.of("bad")[0]
    for (name, history), reply in zip(histories.items(), replies, strict=True):
        (result,) = reply.results
        if name == "bad":
            assert result.status == "failed"
            assert result.reason == "the model gave NaN or +inf in round 0"
            assert (result.num_valid, result.num_items, len(result.scores)) == (0, 0, 0)
        else:
            assert result.status == "ok"
            oracle.check(result, recording.trace(name, product), history, search)


@pytest.mark.parametrize("bad_level", [0, 1])
def test_the_round_is_named(tmp_path: Path, bad_level: int) -> None:
    """A beam's own token is bad: the round that reads what it made of the beam is the one after its level."""
    token_of = contiguous_tokens([8, 8, 8], 2)
    catalog = random_catalog(4, 300, token_of)
    by_id = items_of(catalog)
    bad_code = 5
    folder = write_model(tmp_path / "model")
    file = write_catalog(tmp_path / "items.xgr", catalog)
    ids = [i for i, item in by_id.items() if item.servable and item.sid[bad_level] != bad_code]
    everything = Search(beam_width=500, num_results=10)
    spared = Search(
        beam_width=500,
        num_results=500,
        rules=Rules(
            exclude_item_ids=tuple(
                i for i, item in by_id.items() if item.sid[bad_level] == bad_code
            )
        ),
    )
    requests = [
        request_of("all", ids[:3], everything),
        request_of("spared", ids[:3], spared),
        request_of("mate", ids[3:8], spared),
    ]
    replies, recording, product = recommend(
        make_config(folder, {"main": file}, scheduler=TOGETHER),
        requests,
        Poison([token_of[bad_level][bad_code]], np.nan),
    )
    (failed,) = replies[0].results
    assert failed.status == "failed"
    assert failed.reason == f"the model gave NaN or +inf in round {bad_level + 1}"
    oracle = Oracle(folder, catalog)
    oracle.check(replies[1].results[0], recording.trace("spared", product), ids[:3], spared)
    oracle.check(replies[2].results[0], recording.trace("mate", product), ids[3:8], spared)


def test_only_a_normaliser_that_reads_the_bad_logit_fails(tmp_path: Path) -> None:
    """A NaN row of the head behind no code of the catalogue: `vocab` reads it, the others do not."""
    catalog = random_catalog(6, 200, contiguous_tokens([8, 8, 8], 2))
    folder = write_model(tmp_path / "model")
    oracle = Oracle(folder, catalog)
    file = write_catalog(tmp_path / "items.xgr", catalog)
    history = [catalog.items[0].item_id]
    requests = [
        request_of(n, history, Search(beam_width=9, num_results=99, normalization=n))
        for n in NORMALIZATIONS
    ]
    replies, recording, product = recommend(
        make_config(folder, {"main": file}), requests, Poison([VOCAB - 1], np.nan, "head"), 0.0
    )
    for request, reply in zip(requests, replies, strict=True):
        (result,) = reply.results
        if request.request_id == "vocab":
            assert result.reason == "the model gave NaN or +inf in round 0"
        else:
            trace = recording.trace(request.request_id, product)
            oracle.check(result, trace, history, request.searches[0])


def test_a_code_whose_logit_is_minus_infinity_is_dropped(tmp_path: Path) -> None:
    """-inf is no failure: the child does not exist, and the rest is normalised without it."""
    token_of = contiguous_tokens([8, 8, 8], 2)
    catalog = random_catalog(9, 300, token_of)
    folder = write_model(tmp_path / "model")
    file = write_catalog(tmp_path / "items.xgr", catalog)
    history = [item.item_id for item in catalog.items[:3]]
    search = Search(beam_width=500, num_results=2000, normalization="level")
    with make_engine(make_config(folder, {"main": file})) as engine:
        head: Any = engine.catalogs.pin("main").head
        original = head.level_logits

        def level_logits(ops: Any, hidden_NM: torch.Tensor, level: int) -> torch.Tensor:
            logits: torch.Tensor = original(ops, hidden_NM, level)
            if level == 1:
                logits[:, 3] = -torch.inf
            return logits

        head.level_logits = level_logits
        (reply,) = engine.recommend([request_of("one", history, search)])
        engine.catalogs.release(engine.catalogs.by_slot[0])
    (result,) = reply.results
    assert result.status == "ok"
    expected = {item.sid for item in catalog.items if item.servable and item.sid[1] != 3}
    assert set(map(tuple, result.sids.tolist())) == expected
    assert np.isfinite(result.scores).all()
