"""The whole engine, gRPC included, on the fake NPU with the providers that serve by default on a card.

No reference of an op is allowed. Answers are the CPU's; rounds are replays of graphs whose host numbers are those of their
capture unless they were told others.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.helpers.catalogs import random_catalog, scattered_tokens
from tests.helpers.engines import (
    Oracle,
    kept_by,
    loaded_catalog,
    make_config,
    make_engine,
    prompt_of,
    recommend_together,
    record_batches,
    request_of,
    started_patient,
    write_catalog,
)
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from tests.service.servers import running_in_thread
from tools.demo.movielens import load_sequences, without_last
from tools.demo.run import measure
from xgr_runtime import Engine, RecRequest, Rules, RuntimeConfig, Search
from xgr_runtime.config import BucketsConfig, CacheConfig, LimitsConfig, SchedulerConfig
from xgr_runtime.conformance.same_answer import Answer, assert_same_answer
from xgr_runtime.errors import DeviceError, OpUnavailable
from xgr_runtime.hal.ascend import npu
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.tolerances import TOLERANCES
from xgr_runtime.service.client import RecommendClient
from xgr_runtime.shipped import config_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.helpers.oracle import Catalog
    from xgr_runtime.types import RecResult

pytestmark = pytest.mark.fake_npu
T = TOLERANCES[torch.float32].same_answer
STOCK = {"torch_npu", "aten", "parts"}  # a fused op runs by its parts
POSSIBLE_LIMIT = 4  # possible sets are checked up to four times the width in 16 bits


def demo_config(*overrides: str) -> RuntimeConfig:
    """The demo on this run's device, without references of ops. Smaller limits: every bucket is captured, on a CPU."""
    limits = ("limits.max_beam_width=64", "scheduler.max_batch_rows=512")
    options = ("device=npu", "ops.allow_reference=false", *limits, *overrides)
    return RuntimeConfig.from_yaml(config_file("demo"), options)


def as_cli(request_id: str, result: RecResult) -> dict[str, Any]:
    """What `measure` reads of a line of `xgr client --json`."""
    found = result.results[0]
    items = [
        {"item_id": int(item), "sid": sid, "score": float(score)}
        for item, sid, score in zip(found.item_ids, found.sids.tolist(), found.scores, strict=True)
    ]
    return {"request_id": request_id, "results": [{"items": items}], "client_ms": 1.0}


def ask_all(target: str, histories: dict[int, list[int]]) -> dict[int, dict[str, Any]]:
    """Every user's list over gRPC, several requests at a time, so that batches mix lengths."""
    with RecommendClient(target, timeout_s=120) as client, ThreadPoolExecutor(8) as pool:

        def ask(user: int) -> dict[str, Any]:
            search = Search(rules=Rules(exclude_history=True))
            return as_cli(
                str(user), client.recommend(request_of(str(user), histories[user], search))
            )

        return dict(zip(histories, pool.map(ask, histories), strict=True))


@pytest.mark.e2e
def test_the_demo_over_grpc_has_the_metrics_of_the_cpu() -> None:
    """All 943 users: equal metrics, and every list the same but where two scores are nearer than the tolerance."""
    sequences = load_sequences()
    histories = without_last(sequences, 1)
    targets = [items[-1] for items in sequences.values()]
    reports, replies = [], []
    for device, config in (
        (None, demo_config()),
        (CpuDevice(), dataclasses.replace(demo_config(), device="cpu")),
    ):
        with Engine.from_config(config, device) as engine:
            assert engine.device.kind == config.device
            num_captures = engine.worker.graphs.num_captures
            with running_in_thread(engine, config) as target:
                replies.append(ask_all(target, histories))
            if config.device == "npu":
                stats = engine.stats()
                assert set().union(*stats.providers.values()) <= STOCK
                assert stats.num_reference_ops == 0
                graphs = engine.worker.graphs
                assert graphs.num_captures == num_captures == graphs.num_graphs > 3
                assert graphs.num_eager == 0
        report = measure(histories, targets, replies[-1])
        del report["latency_ms"]
        reports.append(report)
    assert reports[0] == reports[1]
    assert reports[0]["num_invalid_items"] == 0
    num_identical = 0
    for user in histories:
        (one,), (two,) = (reply[user]["results"] for reply in replies)
        scores = [[item["score"] for item in result["items"]] for result in (one, two)]
        np.testing.assert_allclose(scores[0], scores[1], atol=T)
        num_identical += [item["item_id"] for item in one["items"]] == [
            item["item_id"] for item in two["items"]
        ]
    assert num_identical >= 0.99 * len(histories)


def world(tmp_path: Path, dtype: torch.dtype) -> tuple[RuntimeConfig, Catalog]:
    """A model whose head dim fused attention takes, and a catalogue; pages as its 16-bit form needs them."""
    catalog = random_catalog(5, 300, scattered_tokens([9, 10, 11], 48, seed=4))
    shape = TinyShape(vocab_size=48, hidden_size=64)
    folder = write_tiny_model(tmp_path / "model", "qwen3", shape, dtype=dtype, logit_spread=1.5)
    file = write_catalog(tmp_path / "items.xgr", catalog)
    config = make_config(
        folder,
        {"main": file},
        limits=LimitsConfig(max_prompt_tokens=512, max_beam_width=64),
        cache=CacheConfig(page_size_tokens=128, prefix_cache_bytes=1 << 20),
        scheduler=SchedulerConfig(max_batch_tokens=1024, max_batch_rows=512),
    )
    name = str(dtype).removeprefix("torch.")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=name)), catalog  # type: ignore[arg-type]


def mixed_requests(catalog: Catalog, name: str, lengths: Sequence[int]) -> list[RecRequest]:
    ids = [item.item_id for item in catalog.items]
    widths = [(5, 9, 20), (20, 20, 20), (1, 1, 1)]
    return [
        request_of(
            f"{name}-{i}", ids[i : i + length], Search(beam_widths=widths[i % 3], num_results=64)
        )
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_replays_are_told_the_lengths_of_their_batch(tmp_path: Path, dtype: torch.dtype) -> None:
    """Batches of one bucket and other lengths replay the graphs of the first one; a stale length is a wrong answer."""
    config, catalog = world(tmp_path, dtype)
    oracle = Oracle(tmp_path / "model", catalog)
    t = TOLERANCES[dtype].same_answer
    with started_patient(make_engine(config)) as engine:
        recording, num_captures = record_batches(engine), []
        for turn, lengths in enumerate(([20, 34], [34, 20], [27, 33], [33, 22])):
            requests = mixed_requests(catalog, f"turn {turn}", lengths)
            replies = recommend_together(engine, requests)
            assert len(recording.batches) == turn + 1, "they are one batch"
            for request, reply in zip(requests, replies, strict=True):
                assert request.history_item_ids is not None
                trace = recording.trace(request.request_id, loaded_catalog(engine))
                possible_limit = None if dtype == torch.float32 else POSSIBLE_LIMIT
                check(oracle, reply, Answer.from_trace(trace), request, t, possible_limit)
            num_captures.append(engine.worker.graphs.num_captures)
            engine.reset_prefix_cache()
        assert num_captures[0] == num_captures[-1] > 0
        fused = engine.stats().providers["shared_attention"]
        assert fused == (("aten",) if dtype == torch.float32 else ("torch_npu",))


def check(
    oracle: Oracle,
    reply: RecResult,
    answer: Answer,
    request: RecRequest,
    t: float,
    possible_limit: int | None,
) -> None:
    assert request.history_item_ids is not None
    history = request.history_item_ids.tolist()
    (search,), (result,) = request.searches, reply.results
    reference = oracle.reference(
        prompt_of(oracle.catalog, history),
        kept_by(oracle.catalog, search.rules, history),
        result.normalization,
    )
    assert_same_answer(answer, reference, t, result.beam_widths, possible_limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graphs_give_bit_for_bit_what_single_ops_give(tmp_path: Path, dtype: torch.dtype) -> None:
    """At sizes whose buckets are the same with and without graphs."""
    config, catalog = world(tmp_path, dtype)
    ids = [item.item_id for item in catalog.items]
    buckets = BucketsConfig(at_start=False, rows=(24,), history_tokens=(56, 72))
    search = Search(beam_width=20, num_results=64)
    answers = []
    for graphs in (True, False):
        with make_engine(dataclasses.replace(config, graphs=graphs, buckets=buckets)) as engine:
            replies = []
            for turn, length in enumerate((17, 23, 17)):
                (reply,) = engine.recommend([request_of(str(turn), ids[:length], search)])
                replies.append(reply.results[0])
            answers.append(replies)
            assert bool(engine.worker.graphs.num_captures) == graphs
    for one, two in zip(*answers, strict=True):
        assert one.item_ids.tolist() == two.item_ids.tolist()
        assert one.scores.tobytes() == two.scores.tobytes()


def test_catalogues_load_beside_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load copies, allocates and waits on another thread; under a capture the device would raise."""
    config, catalog = world(tmp_path, torch.float32)
    rows = tuple(range(8, 64, 8))
    config = dataclasses.replace(config, buckets=BucketsConfig(at_start=False, rows=rows))
    # another token table: its rows of the head are gathered anew by every load
    other = random_catalog(6, 300, scattered_tokens([9, 10, 11], 48, seed=9))
    file = write_catalog(tmp_path / "other.xgr", other)
    errors: list[BaseException] = []
    stop = threading.Event()
    with make_engine(config) as engine:
        step = engine.runner._model.step

        def slow_step(*args: Any) -> torch.Tensor:
            time.sleep(0.02)
            return step(*args)

        monkeypatch.setattr(engine.runner._model, "step", slow_step)

        def load() -> None:
            try:
                while not stop.is_set():
                    version = engine.load_catalog("other", str(file))
                    engine.retire_catalog("other", version)
            except BaseException as error:
                errors.append(error)
                raise

        loader = threading.Thread(target=load)
        loader.start()
        before = engine.worker.graphs.num_captures
        for width in range(8, 64, 8):
            requests = mixed_requests(catalog, f"width {width}", [9])
            wide = dataclasses.replace(requests[0], searches=(Search(beam_width=width),))
            engine.recommend([wide])
        stop.set()
        loader.join()
        assert engine.worker.graphs.num_captures > before + 6
    assert not errors


def test_a_device_without_room_names_what_to_lower(tmp_path: Path) -> None:
    config, _ = world(tmp_path, torch.float32)
    before = npu().mem_get_info()[1]
    torch.ops.xgr_fake_npu.set_limit(npu().memory_reserved() + (1 << 20))
    try:
        with pytest.raises(DeviceError, match=r"has no room for .*; lower "):
            make_engine(dataclasses.replace(config, cache=CacheConfig(prefix_cache_bytes=1 << 24)))
    finally:
        torch.ops.xgr_fake_npu.set_limit(before)


def test_an_op_that_the_soc_does_not_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = world(tmp_path, torch.bfloat16)
    monkeypatch.setattr(npu(), "get_device_name", lambda index=0: "Ascend310P3")
    with pytest.raises(
        OpUnavailable, match=r"op 'shared_attention' has no provider on npu[^$]*Ascend310P3"
    ):
        make_engine(config)
