"""NaN and +inf in one search of a mixed batch, through the service: its mates' answers keep every bit."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.helpers.catalogs import TAGS, contiguous_tokens, random_catalog
from tests.helpers.engines import (
    make_config,
    record_batches,
    request_of,
    same_bits,
    started_patient,
    write_catalog,
)
from tests.helpers.load import assert_at_rest
from tests.helpers.oracle import Catalog, Item
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from tests.service.servers import running
from xgr_runtime.config import SchedulerConfig
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.models.registry import load_model
from xgr_runtime.service.client import AsyncRecommendClient
from xgr_runtime.types import RecRequest, Rules, Search
from xgr_runtime.xschedule.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from xgr_runtime.types import Normalization, RecResult

pytestmark = pytest.mark.e2e
VOCAB = 64
BAD_CODE, BAD_ITEM = 0, 9999
BAD_TOKENS = [2, 10, 18]  # of code 0 at each level; no other item has it
NUM_MATES = 7
# A full batch is closed at once; its order is that of the deadlines, which are far away.
TOGETHER = SchedulerConfig(
    max_batch_histories=NUM_MATES + 1,
    max_batch_rows=2048,
    max_batch_tokens=512,
    patience_ms=3_600_000.0,
)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    made = random_catalog(3, 300, contiguous_tokens([8, 8, 8], 2))
    items = tuple(item for item in made.items if BAD_CODE not in item.sid)
    return Catalog((*items, Item(BAD_ITEM, (BAD_CODE,) * 3, key="key-9999")), made.token_of)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, catalog: Catalog) -> Iterator[Any]:
    """A started engine and its model."""
    folder = tmp_path_factory.mktemp("bad numbers")
    model_folder = write_tiny_model(folder / "model", "qwen3", TinyShape(vocab_size=VOCAB))
    file = write_catalog(folder / "items.xgr", catalog)
    config = make_config(model_folder, {"main": file}, scheduler=TOGETHER)
    model = load_model(config.model.path, torch.device("cpu"), torch.float32)
    with started_patient(Engine(config, CpuDevice(), model, "m1")) as engine:
        yield engine, model


def mixed_requests(
    catalog: Catalog, normalization: Normalization, is_bad_history: bool
) -> list[RecRequest]:
    """Mates of every width, length and rule, and in their middle one that alone meets the bad code."""
    rng = np.random.default_rng(5)
    ids = [item.item_id for item in catalog.items if item.item_id != BAD_ITEM]
    rules = [
        Rules(exclude_item_ids=(BAD_ITEM,)),
        Rules(exclude_item_ids=(BAD_ITEM, *ids[:40])),
        Rules(exclude_item_ids=(BAD_ITEM,), exclude_history=True),
        Rules(require=((TAGS[0], TAGS[1]),), exclude_item_ids=(BAD_ITEM,)),
        Rules(exclude_tags=(TAGS[2],), exclude_keys=("key-9999",)),
    ]
    requests = []
    for number in range(NUM_MATES):
        history = rng.choice(ids, int(rng.integers(0, 30))).tolist()
        widths = tuple(rng.integers(1, 200, 3).tolist())
        search = Search(
            beam_widths=widths,
            num_results=300,
            normalization=normalization,
            rules=rules[number % len(rules)],
            return_level_scores=bool(number % 2),
        )
        requests.append(request_of(f"mate-{number}", history, search))
    history = [ids[0], BAD_ITEM, *ids[1:20]] if is_bad_history else ids[:20]
    excluded = (BAD_ITEM,) if is_bad_history else ()
    # Wide enough that the bad item's first code is among its beams.
    search = Search(
        beam_widths=(20, 200, 40),
        normalization=normalization,
        rules=Rules(exclude_item_ids=excluded),
    )
    requests.insert(3, request_of("bad", history, search))
    return requests


def ask(engine: Engine, requests: list[RecRequest]) -> list[RecResult]:
    """Send all through the service at once; asserts that they met in one batch, in this order."""

    async def main() -> list[RecResult]:
        async with (
            running(engine, engine.config) as (_, target),
            AsyncRecommendClient(target, timeout_s=None) as client,
        ):
            due_s = time.monotonic() + 60  # of more than 100 s gRPC tells no single seconds
            timed = [
                RecRequest(**{**request.__dict__, "deadline_s": due_s + 5 * number})
                for number, request in enumerate(requests)
            ]
            return await asyncio.gather(*(client.recommend(request) for request in timed))

    submit = engine.worker.submit
    recording = record_batches(engine)
    replies = asyncio.run(main())
    engine.worker.submit = submit  # type: ignore[method-assign]
    ((batch, _),) = recording.batches
    assert batch.request_ids == tuple(request.request_id for request in requests)
    return replies


@contextmanager
def bad_history(engine: Engine, model: Any, value: float) -> Iterator[None]:
    """The embedding of the bad item's tokens holds `value`; no checkpoint that does is loaded, so in memory."""
    weight_VM: torch.Tensor = model._embedding_VM
    before = weight_VM[BAD_TOKENS, 0].clone()
    weight_VM[BAD_TOKENS, 0] = value
    yield
    weight_VM[BAD_TOKENS, 0] = before


@contextmanager
def bad_logit(engine: Engine, model: Any, value: float) -> Iterator[None]:
    """The logit of the bad code in round 1 is `value` for every beam of every search."""
    head: Any = engine.catalogs.by_slot[0].head
    original = head.level_logits

    def level_logits(ops: Any, hidden_NM: torch.Tensor, level: int) -> torch.Tensor:
        logits: torch.Tensor = original(ops, hidden_NM, level)
        if level == 1:
            logits[:, BAD_CODE] = value
        return logits

    head.level_logits = level_logits
    yield
    head.level_logits = original


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("poison", "normalization", "num_round"),
    [(bad_history, "vocab", 0), (bad_history, "valid", 0), (bad_logit, "valid", 1)],
)
def test_mates_keep_every_bit(
    served: Any,
    catalog: Catalog,
    poison: Callable[[Engine, Any, float], AbstractContextManager[None]],
    normalization: Normalization,
    num_round: int,
    value: float,
) -> None:
    engine, model = served
    is_history = poison is bad_history
    requests = mixed_requests(catalog, normalization, is_history)
    engine.reset_prefix_cache()
    clean = ask(engine, requests)
    assert {reply.results[0].status for reply in clean} == {"ok"}
    engine.reset_prefix_cache()
    with poison(engine, model, value):
        poisoned = ask(engine, requests)
    for request, before, after in zip(requests, clean, poisoned, strict=True):
        if request.request_id == "bad":
            (result,) = after.results
            assert result.status == "failed"
            assert result.reason == f"the model gave NaN or +inf in round {num_round}"
            assert (result.num_items, len(result.item_ids)) == (0, 0)
        else:
            assert same_bits(before, after), request.request_id
    # What the failed history left in its pages is not found again, what its mates left is; all numbers are good now.
    again = ask(engine, requests)
    for request, before, after in zip(requests, clean, again, strict=True):
        assert before.results[0].item_ids.tolist() == after.results[0].item_ids.tolist()
        if request.request_id == "bad":
            assert after.num_cached_tokens == 0
    assert any(reply.num_cached_tokens for reply in again)
    assert_at_rest(engine)
