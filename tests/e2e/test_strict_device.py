"""The whole engine on the strict device: no host read, no data-dependent shape, no changed address, the CPU's answers."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.catalogs import TAGS, contiguous_tokens, random_catalog, scattered_tokens
from tests.helpers.engines import (
    Oracle,
    Recording,
    loaded_catalog,
    make_config,
    make_engine,
    record_batches,
    request_of,
    same_bits,
    started_patient,
    write_catalog,
)
from tests.helpers.strict_device import RuleBroken, StrictDevice
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from xgr_runtime.config import BucketsConfig, LimitsConfig, OpsConfig, SchedulerConfig
from xgr_runtime.errors import OpUnavailable
from xgr_runtime.types import NORMALIZATIONS, RecRequest, Rules, Search

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from xgr_runtime import Engine, RuntimeConfig
    from xgr_runtime.types import Normalization

pytestmark = pytest.mark.e2e
VOCAB = 64
SMALL = LimitsConfig(max_prompt_tokens=48, max_beam_width=64, max_num_results=2048)
# Two requests fill a batch, so nothing depends on how fast this machine is.
PAIRS = SchedulerConfig(max_batch_histories=2, max_batch_tokens=96, max_batch_rows=128)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Four levels: two reorders of the beams' own KV, which a segment run twice would spoil."""
    folder = tmp_path_factory.mktemp("model")
    tokens = scattered_tokens([8, 9, 7, 8], VOCAB, seed=3, share_absent=0.1)
    catalog = random_catalog(5, 500, tokens, skew=0.4)
    return Oracle(write_tiny_model(folder, "qwen3", TinyShape(vocab_size=VOCAB)), catalog)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> RuntimeConfig:
    file = write_catalog(tmp_path_factory.mktemp("catalog") / "items.xgr", oracle.catalog)
    return make_config(
        oracle.folder, {"main": file}, limits=SMALL, scheduler=PAIRS, allow_reference=True
    )


def started(config: RuntimeConfig, device: StrictDevice) -> AbstractContextManager[Engine]:
    return started_patient(make_engine(config, device))


def pair(oracle: Oracle, tag: str, normalization: Normalization, seed: int) -> list[RecRequest]:
    """Two requests of one bucket, whatever the seed: same lengths and widths, other items, rules and exclusions."""
    rng = np.random.default_rng(seed)
    ids = [item.item_id for item in oracle.catalog.items]
    rules = [
        Rules(exclude_tags=TAGS[seed % 4 : seed % 4 + 1], exclude_history=True),
        Rules(exclude_item_ids=tuple(rng.choice(ids, 40, replace=False).tolist())),
    ]
    return [
        request_of(
            f"{tag} {normalization} {seed} {i}",
            rng.choice(ids, 6 - i, replace=False).tolist(),
            Search(
                beam_widths=((9, 40, 12, 25), (3, 9, 27, 60))[i],
                num_results=500,
                normalization=normalization,
                rules=rules[i],
            ),
        )
        for i in range(2)
    ]


def run_and_check(
    engine: Engine, recording: Recording, oracle: Oracle, requests: list[RecRequest]
) -> None:
    for request, reply in zip(requests, engine.recommend(requests), strict=True):
        assert request.history_item_ids is not None
        history = request.history_item_ids.tolist()
        trace = recording.trace(request.request_id, loaded_catalog(engine))
        oracle.check(reply.results[0], trace, history, request.searches[0])


@pytest.mark.parametrize("is_graph_per_round", [False, True])
def test_the_engine_runs_under_the_rules(
    oracle: Oracle, config: RuntimeConfig, is_graph_per_round: bool
) -> None:
    device = StrictDevice(is_graph_per_round=is_graph_per_round)
    with started(config, device) as engine:
        recording = record_batches(engine)
        for normalization in NORMALIZATIONS:
            before = engine.worker.graphs.num_captures
            engine.reset_prefix_cache()
            run_and_check(engine, recording, oracle, pair(oracle, "first", normalization, 0))
            captured = engine.worker.graphs.num_captures
            # The prefill belongs to all normalisations: the first pair captures it.
            num_rounds = 4 if is_graph_per_round else 1
            num_prefills = normalization == NORMALIZATIONS[0] and device.is_prefill_captured
            assert captured - before == num_rounds + num_prefills
            for seed in range(1, 3):
                requests = pair(oracle, "replay", normalization, seed)
                run_and_check(engine, recording, oracle, requests)
            assert engine.worker.graphs.num_captures == captured
        # Users who return: their cached tokens are copied, by the prefill where it is captured.
        for turn in range(3):
            run_and_check(engine, recording, oracle, pair(oracle, f"again {turn}", "vocab", 2))
            assert engine.worker.graphs.num_captures == captured
        replays = {graph.num_replays for graph in device.graphs}
        assert max(replays) >= 4
        expected = {"inputs", "prefill", "rounds[0:4]"}
        if is_graph_per_round:
            expected = {*expected, "copies", *(f"rounds[{i}:{i + 1}]" for i in range(4))} - {
                "rounds[0:4]"
            }
        assert set(device.segment_names) == expected


@pytest.mark.parametrize("is_graph_per_round", [False, True])
def test_replay_equals_capture_bit_by_bit(
    oracle: Oracle, config: RuntimeConfig, is_graph_per_round: bool
) -> None:
    device = StrictDevice(is_graph_per_round=is_graph_per_round)
    with started(config, device) as engine:
        recording = record_batches(engine)
        outputs = []
        for run in range(3):
            engine.reset_prefix_cache()
            engine.recommend(pair(oracle, f"run {run}", "vocab", 7))
            group, output, _ = recording.of(f"run {run} vocab 7 0")
            starts = group.row_starts(3)
            rows = slice(0, int(starts[-1]))
            outputs.append(
                [output.scores_LN[-1][rows].tobytes(), output.nodes_LN[-1][rows].tobytes()]
            )
            first = recording.batches[0][1].groups[0]
            assert output.num_live_rows == first.num_live_rows
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_changed_address_is_noticed(oracle: Oracle, config: RuntimeConfig) -> None:
    """The check behind the two tests above: a level's array that moves makes the replay fail."""
    device = StrictDevice()
    with started(config, device) as engine:
        engine.recommend(pair(oracle, "before", "vocab", 1))
        engine.runner.state.codes_LN = engine.runner.state.codes_LN.clone()
        with pytest.raises(RuleBroken, match="changed input address"):
            engine.recommend(pair(oracle, "after", "vocab", 2))


def test_another_version_in_the_same_slot(
    tmp_path: Path, oracle: Oracle, config: RuntimeConfig
) -> None:
    """Slots are filled again with other items and then with other tokens: graphs never see the version before."""
    device = StrictDevice()
    with started(config, device) as engine:
        recording = record_batches(engine)
        run_and_check(engine, recording, oracle, pair(oracle, "v1", "vocab", 0))
        tables = [oracle.catalog.token_of, oracle.catalog.token_of]
        tables += [contiguous_tokens([8, 9, 7, 8], first) for first in (3, 11, 30)]
        for number, token_of in enumerate(tables, 2):
            mapped = scattered_tokens([8, 9, 7, 8], VOCAB, seed=3, share_absent=0.1)
            other = random_catalog(number, 450, mapped, skew=0.4)
            other = type(other)(other.items, token_of)
            path = write_catalog(tmp_path / f"{number}.xgr", other)
            slots = set(engine.catalogs.by_slot)
            engine.activate_catalog("main", engine.load_catalog("main", str(path)))
            assert len(slots | set(engine.catalogs.by_slot)) <= 2
            judge = Oracle(oracle.folder, other)
            for seed in range(2):
                run_and_check(engine, recording, judge, pair(judge, f"v{number}", "vocab", seed))


def test_loading_beside_a_running_segment(
    tmp_path: Path, oracle: Oracle, config: RuntimeConfig
) -> None:
    """A load's copies are another thread's business; they break no rule of the batch that runs meanwhile."""
    device = StrictDevice()
    with started(config, device) as engine:
        recording = record_batches(engine)
        errors: list[BaseException] = []

        def load() -> None:
            try:
                for number in range(6):
                    other = random_catalog(50 + number, 400, oracle.catalog.token_of, skew=0.4)
                    path = write_catalog(tmp_path / f"{number}.xgr", other)
                    version = engine.load_catalog("main", str(path))
                    engine.retire_catalog("main", version)
            except BaseException as error:  # noqa: BLE001 - handed to the test's thread
                errors.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        for seed in range(6):
            run_and_check(engine, recording, oracle, pair(oracle, "beside", "vocab", seed))
        thread.join()
        assert not errors


def test_without_the_reference_nothing_is_bound(config: RuntimeConfig) -> None:
    """Found when the engine is built, for the largest batch, and not in the first one under traffic."""
    with pytest.raises(OpUnavailable, match="allow_reference"):
        make_engine(replace(config, ops=OpsConfig()), StrictDevice())


class EagerStrictDevice(StrictDevice):
    """The same rules inside segments, and the same ops, with nothing captured."""

    is_capturing_supported = False


def test_replay_equals_eager_bit_by_bit(oracle: Oracle, config: RuntimeConfig) -> None:
    """Sizes of the ladder are multiples of eight here, so that every op has the shapes of an eager batch."""
    config = replace(
        config,
        buckets=BucketsConfig(
            at_start=False, tokens=(8, 16, 24, 32), rows=(8, 16, 24, 32), history_tokens=(16,)
        ),
    )
    ids = [item.item_id for item in oracle.catalog.items]
    search = Search(
        beam_width=12,
        num_results=100,
        rules=Rules(exclude_tags=TAGS[:1], exclude_history=True),
        return_level_scores=True,
    )
    devices = (
        EagerStrictDevice(),
        StrictDevice(),
        StrictDevice(is_graph_per_round=True),
    )
    answers = []
    for device in devices:
        with started(config, device) as engine:
            for turn in range(4):
                requests = [request_of(f"{turn} {i}", ids[i : i + 3], search) for i in (0, 5)]
                answers.append(engine.recommend(requests))
                if turn == 0:
                    engine.reset_prefix_cache()
        assert bool(device.graphs) == device.is_capturing_supported
    for number, replies in enumerate(answers):
        is_hit = number % 4 >= 2
        for one, two in zip(answers[2 if is_hit else 0], replies, strict=True):
            assert same_bits(one, two)
            assert two.num_cached_tokens == (two.num_prompt_tokens - 1 if is_hit else 0)
