"""All graphs exist when an engine has started, none is captured in service, and a replay is what its ops give one by one."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import threading
import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.helpers.catalogs import TAGS, random_catalog, scattered_tokens
from tests.helpers.engines import make_config, make_engine, write_catalog
from tests.helpers.strict_device import StrictDevice
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from tests.helpers.versions import Versions, ask, assert_is_version
from tests.xschedule.test_worker import (
    CODES,
    PAGE,
    Wanted,
    assert_same_bits,
    make_group,
)
from xgr_runtime.config import BucketsConfig, CacheConfig, LimitsConfig, SchedulerConfig
from xgr_runtime.errors import DeviceError
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.types import RecRequest, Search
from xgr_runtime.xschedule import progress
from xgr_runtime.xschedule.batch import Batch, pack_histories
from xgr_runtime.xschedule.buckets import host_lengths_of
from xgr_runtime.xschedule.ladder import Ladder
from xgr_runtime.xschedule.model_runner import Target
from xgr_runtime.xschedule.results import beam_levels

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from xgr_runtime import Engine, RuntimeConfig
    from xgr_runtime.types import Normalization

VOCAB = 64
NUM_PAGES_EACH = 8
DEVICES = {"one graph": False, "a graph per round": True}
ATOL = 1e-4  # of scores of about -30, summed in another order


def strict(name: str) -> StrictDevice:
    return StrictDevice(is_graph_per_round=DEVICES[name])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RuntimeConfig:
    """Two catalogues, of four levels and of two."""
    folder = tmp_path_factory.mktemp("warm-up")
    files = {}
    for seed, (name, codes) in enumerate(CODES.items()):
        catalog = random_catalog(seed, 600, scattered_tokens(codes, VOCAB, seed, 0.1), skew=0.3)
        files[name] = write_catalog(folder / f"{name}.xgr", catalog)
    return make_config(
        write_tiny_model(folder / "model", "qwen3", TinyShape(vocab_size=VOCAB)),
        files,
        limits=LimitsConfig(max_prompt_tokens=32, max_beam_width=64),
        scheduler=SchedulerConfig(
            max_batch_histories=4, max_batch_tokens=64, max_batch_rows=128, max_wait_ms=0.0
        ),
        cache=CacheConfig(page_size_tokens=PAGE),
        buckets=BucketsConfig(rows=(32,), tokens=(16,), normalizations=("vocab", "level")),
        allow_reference=True,
    )


@pytest.fixture(scope="module")
def flat_config(config: RuntimeConfig) -> RuntimeConfig:
    """The catalogue of two levels alone: far fewer graphs."""
    return replace(config, catalogs={"flat": config.catalogs["flat"]})


@pytest.fixture(scope="module", params=DEVICES)
def engine(request: pytest.FixtureRequest, config: RuntimeConfig) -> Iterator[Engine]:
    with make_engine(config, StrictDevice(is_graph_per_round=DEVICES[request.param])) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(config: RuntimeConfig) -> Iterator[Engine]:
    """Nothing captured, close buckets, other kernels."""
    with make_engine(config, CpuDevice()) as engine:
        yield engine


def mixed_batch(engine: Engine, seed: int) -> Batch:
    """One to four histories, a third of the tokens cached, one to three groups of other catalogues and normalisations."""
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, 5))
    lengths = rng.integers(1, 17, number)
    prompts = [rng.integers(1, VOCAB, length).astype(np.int64) for length in lengths]
    pages = [
        [1 + NUM_PAGES_EACH * h + p for p in range(-(-n // PAGE))] for h, n in enumerate(lengths)
    ]
    groups = []
    for _ in range(rng.integers(1, 4)):
        name = str(rng.choice([*CODES]))
        normalization: Normalization = rng.choice(["vocab", "level"])
        wanted = []
        for history in np.flatnonzero(rng.random(number) < 0.8).tolist() or [0]:
            widths = tuple(rng.integers(1, 33, len(CODES[name])).tolist())
            tags = TAGS[:1] if rng.random() < 0.4 else ()
            wanted.append(Wanted(history, widths, tags, int(rng.integers(0, 100))))
        groups.append(make_group(engine, name, normalization, wanted))
    return Batch(1, "full", ("",) * number, pack_histories(prompts, pages, PAGE), tuple(groups))


@contextmanager
def op_by_op(engine: Engine) -> Iterator[None]:
    """The same buckets and addresses, nothing replayed."""
    engine.worker.graphs.is_capturing = False
    try:
        yield
    finally:
        engine.worker.graphs.is_capturing = True


def ladder_of(engine: Engine) -> Ladder:
    assert isinstance(engine.runner.sizes, Ladder)
    return engine.runner.sizes


def keys_of(engine: Engine, batch: Batch) -> list[Any]:
    """Of the segments that the engine would run for a batch in its smallest buckets."""
    sizes, (group,) = engine.runner.sizes.of(batch), batch.groups
    loaded = engine.catalogs.by_slot[group.slot_index]
    target = Target(loaded.slot, loaded.head, loaded.slot_index, group.normalization)
    lengths = host_lengths_of(batch.histories, sizes.prefill.shared)
    is_copying = batch.histories.has_copies
    groups = [(sizes.groups[0], target)]
    plan = engine.runner.plan(sizes.prefill, groups, lengths, is_copying=is_copying)
    return [segment.key for segment in (*plan.before_rounds, *plan.groups[0])]


def test_a_started_engine_has_every_graph_of_its_list(engine: Engine) -> None:
    graphs, ladder = engine.worker.graphs, ladder_of(engine)
    expected = len(list(ladder.prefills()))
    for codes in CODES.values():
        num_parts = len(codes) if engine.device.is_graph_per_round else 1
        expected += 2 * num_parts * len(list(ladder.rounds(len(codes))))
    assert graphs.num_graphs == graphs.num_captures == expected
    assert expected < 64
    assert graphs.num_eager == 0


def test_each_bucket_is_captured_by_a_batch_that_it_is_the_smallest_for(
    config: RuntimeConfig,
) -> None:
    config = replace(
        config, buckets=replace(config.buckets, history_tokens=(12,), histories=(1, 2))
    )
    engine = make_engine(config, StrictDevice())
    ladder = ladder_of(engine)
    loaded = [engine.catalogs.pin(name) for name in CODES]
    missing = engine.warm_up.missing(loaded)
    keys = {key for one in missing for key in one.keys}
    num_rounds = sum(2 * len(list(ladder.rounds(len(codes)))) for codes in CODES.values())
    assert len(missing) == len(keys) == len(list(ladder.prefills())) + num_rounds
    order = [(one.is_last_resort, one.size) for one in missing]
    assert order == sorted(order, reverse=True)
    assert sum(one.is_last_resort for one in missing) == 1 + 2 * len(CODES)
    for one in missing:
        batch = one.make_batch()
        assert (batch.histories.page_table_HP == 0).all()
        assert set(one.keys) <= set(keys_of(engine, batch))
    for pinned in loaded:
        engine.catalogs.release(pinned)
    engine.close()


def test_nothing_is_captured_in_service_and_a_replay_is_right_to_the_bit(
    engine: Engine, plain: Engine
) -> None:
    """A mix of lengths, widths, rules, catalogues and normalisations; and what close buckets on the CPU give, nearly."""
    graphs = engine.worker.graphs
    num_captures, buckets = graphs.num_captures, set()
    for seed in range(5):
        batch = mixed_batch(engine, seed)
        buckets.add(engine.runner.sizes.of(batch))
        replayed = engine.worker.run(batch)
        with op_by_op(engine):
            eager = engine.worker.run(batch)
        close = plain.worker.run(mixed_batch(plain, seed))
        for group, one, two, three in zip(
            batch.groups, replayed.groups, eager.groups, close.groups, strict=True
        ):
            assert_same_bits(one, two, group)
            for index in range(group.num_searches):
                levels = (beam_levels(group, output, index) for output in (one, three))
                for (_, scores), (_, expected) in zip(*levels, strict=True):
                    np.testing.assert_allclose(scores, expected, rtol=0, atol=ATOL)
    assert len(buckets) >= 4
    assert (graphs.num_captures, graphs.num_eager) == (num_captures, 0)


def test_what_no_graph_was_captured_for_runs_op_by_op_and_is_counted(
    engine: Engine, plain: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = np.asarray([1, 9, 33], dtype=np.int64)
    search = Search(catalog="flat", beam_width=8, normalization="valid")
    request = RecRequest("", prompt_token_ids=prompt, searches=(search,))
    graphs = engine.worker.graphs
    num_captures = graphs.num_captures
    plain.reset_prefix_cache()  # batches made by hand have written any page
    engine.reset_prefix_cache()
    replies = [engine.recommend([request])[0].results[0] for _ in range(2)]
    num_parts = 2 if engine.device.is_graph_per_round else 1
    assert (graphs.num_captures, graphs.num_eager) == (num_captures, 2 * num_parts)
    expected = plain.recommend([request])[0].results[0]
    for reply in replies:
        assert reply.item_ids.tolist() == expected.item_ids.tolist()
        np.testing.assert_allclose(reply.scores, expected.scores, atol=ATOL)
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "op by op" in warnings[0]
    assert "buckets.normalizations would have to list valid" in warnings[0]


def version_config(folder: Path, versions: Versions) -> RuntimeConfig:
    return make_config(
        folder,
        {"main": versions.path(1)},  # type: ignore[dict-item]
        limits=LimitsConfig(max_prompt_tokens=16, max_beam_width=600),
        scheduler=SchedulerConfig(
            max_batch_histories=1, max_batch_rows=600, max_batch_tokens=16, max_wait_ms=0.0
        ),
        cache=CacheConfig(prefix_cache=False),
        buckets=BucketsConfig(rows=(64,), normalizations=()),
        allow_reference=True,
    )


@pytest.mark.parametrize("kind", DEVICES)
def test_a_swap_within_head_room_captures_nothing(
    versions_model: Path, versions: Versions, kind: str
) -> None:
    """The second slot is captured while its first version is loaded; from then on versions take turns in the two."""
    config = version_config(versions_model, versions)
    with make_engine(config, strict(kind)) as engine:
        graphs = engine.worker.graphs
        before = graphs.num_captures
        assert_is_version(ask(engine), 1, versions)
        assert engine.load_catalog("main", versions.path(2)) == "v2"
        after_load = graphs.num_captures
        assert after_load > before
        engine.activate_catalog("main", "v2")
        for number in (3, 4, 5):
            assert_is_version(ask(engine), number - 1, versions)
            replays = sum(graph.num_replays for graph in engine.device.graphs)  # type: ignore[attr-defined]
            engine.load_catalog("main", versions.path(number))
            engine.activate_catalog("main", f"v{number}")
            result = ask(engine)
            assert_is_version(result, number, versions)
            assert sum(graph.num_replays for graph in engine.device.graphs) > replays  # type: ignore[attr-defined]
            engine.activate_catalog("main", f"v{number - 1}")
            assert_is_version(ask(engine), number - 1, versions)
            engine.activate_catalog("main", f"v{number}")
            assert ask(engine).scores.tobytes() == result.scores.tobytes()
        assert (graphs.num_captures, graphs.num_eager) == (after_load, 0)


def test_a_version_that_outgrows_its_slot_is_captured_before_it_is_there_to_activate(
    versions_model: Path, versions: Versions
) -> None:
    """Beside requests, which never wait for more than one capture and never run op by op."""
    config = version_config(versions_model, versions)
    with make_engine(config, StrictDevice()) as engine:
        engine.activate_catalog("main", engine.load_catalog("main", versions.path(2)))
        graphs = engine.worker.graphs
        num_graphs, slot = graphs.num_graphs, weakref.ref(engine.catalogs.pin("main", "v1"))
        engine.catalogs.release(slot())  # type: ignore[arg-type]
        old = weakref.ref(slot().slot)  # type: ignore[union-attr]
        stop, errors = threading.Event(), list[BaseException]()

        def keep_asking() -> None:
            try:
                while not stop.is_set():
                    assert_is_version(ask(engine), 2, versions)
            except BaseException as error:  # noqa: BLE001 - handed to the test's thread
                errors.append(error)

        thread = threading.Thread(target=keep_asking)
        thread.start()
        num_captures = graphs.num_captures
        version = engine.load_catalog("main", versions.path(9, 400))
        stop.set()
        thread.join()
        assert not errors
        captured = graphs.num_captures - num_captures
        assert captured > 0
        engine.activate_catalog("main", version)
        assert_is_version(ask(engine), 9, versions)
        assert graphs.num_captures == num_captures + captured
        assert graphs.num_eager == 0
        assert graphs.num_graphs == num_graphs, "those of the slot that is gone are gone"
        engine.device.graphs = [g for g in engine.device.graphs if g in kept(engine)]  # type: ignore[attr-defined]
        gc.collect()
        assert old() is None, "no graph keeps a slot that is gone"


def kept(engine: Engine) -> list[Any]:
    return [captured.graph for captured in engine.worker.graphs._graphs.values()]


def test_graphs_of_idle_versions_make_room_and_are_captured_anew_before_a_roll_back(
    versions_model: Path, versions: Versions
) -> None:
    """Room for the prefill's graph and those of two slots, where three versions are loaded."""
    config = version_config(versions_model, versions)
    config = replace(config, cache=replace(config.cache, catalog_slots=3))
    device = StrictDevice()
    device.max_graphs = 5
    with make_engine(config, device) as engine:
        graphs = engine.worker.graphs
        num_captures = graphs.num_captures
        assert num_captures == 3
        for number, expected in ((2, 5), (3, 7), (1, 9), (3, 9), (2, 11)):
            if number > len(engine.catalogs.by_slot):
                engine.load_catalog("main", versions.path(number))
            engine.activate_catalog("main", f"v{number}")
            assert graphs.num_captures == expected
            assert_is_version(ask(engine), number, versions)
            assert (graphs.num_graphs, graphs.num_eager) == (5, 0)
            assert graphs.num_captures == expected


def fail_at(engine: Engine, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device refuses a capture after that many."""
    capture, count = engine.device.capture, 0

    def limited(name: str, fn: Any) -> Any:
        nonlocal count
        count += 1
        if count > number:
            raise DeviceError("no room for a graph")
        return capture(name, fn)

    monkeypatch.setattr(engine.device, "capture", limited)


def test_a_capture_that_fails_at_the_start_ends_the_start(
    flat_config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(flat_config, StrictDevice())
    fail_at(engine, 3, monkeypatch)
    with pytest.raises(DeviceError, match="no room for a graph"):
        engine.start()


def test_a_capture_that_fails_in_service_leaves_a_version_that_runs(
    versions_model: Path,
    versions: Versions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with make_engine(version_config(versions_model, versions), StrictDevice()) as engine:
        fail_at(engine, 0, monkeypatch)
        engine.activate_catalog("main", engine.load_catalog("main", versions.path(2)))
        assert "catalogue main: version v2 lacks graphs" in caplog.messages
        assert_is_version(ask(engine), 2, versions)
        assert engine.worker.graphs.num_eager > 0


class Terminal:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_progress_is_a_bar_on_a_terminal(
    flat_config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(progress, "REDRAW_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 0.0))
    engine = make_engine(flat_config, StrictDevice())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        engine.start()
    engine.close()
    lines = terminal.text.split("\r")[1:]
    total = engine.worker.graphs.num_captures
    assert lines[0].startswith(f"capturing graphs [{'.' * 30}] 0/{total}, 0 s, 128 rows")
    assert len(lines) == total + 1
    assert [f"] {i}/{total}," in line for i, line in enumerate(lines[:-1])] == [True] * total
    assert lines[-1] == "\x1b[K", "the bar is taken away"


def test_progress_is_a_line_now_and_then_elsewhere(
    flat_config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = itertools.count()  # one whenever somebody asks
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    monkeypatch.setattr(progress, "LINE_EVERY_S", 4.0)
    with (
        caplog.at_level(logging.INFO, "xgr_runtime"),
        make_engine(flat_config, StrictDevice()) as engine,
    ):
        total = engine.worker.graphs.num_graphs
    lines = [text for text in caplog.messages if text.startswith("capturing graphs")]
    assert 1 <= len(lines) < total
    assert f"of {total}," in lines[0]
    (last,) = [text for text in caplog.messages if "are captured" in text]
    assert f"{total} in all" in last


def one_at_a_time(engine: Engine, numbers: range, width: int) -> None:
    prompt = np.asarray([1, 9, 33], dtype=np.int64)
    for _ in numbers:
        search = Search(beam_width=width)
        engine.recommend([RecRequest("", prompt_token_ids=prompt, searches=(search,))])


def test_what_the_device_has_no_room_for_is_padded_to_what_was_captured(
    versions_model: Path, versions: Versions
) -> None:
    """Room for one graph of rounds less than the list has: the smallest rows have none."""
    config = version_config(versions_model, versions)
    with make_engine(config, StrictDevice()) as engine:
        num_graphs, expected = engine.worker.graphs.num_graphs, ask(engine)
    engine = make_engine(config, StrictDevice())
    engine.worker.graphs.max_graphs = num_graphs - 1
    with engine:
        graphs = engine.worker.graphs
        assert graphs.num_graphs == num_graphs - 1
        one_at_a_time(engine, range(2), 8)
        assert_is_version(ask(engine), 1, versions)
        assert ask(engine).item_ids.tolist() == expected.item_ids.tolist()
        assert (graphs.num_eager, graphs.num_captures) == (0, num_graphs - 1)


def test_captures_that_failed_in_service_are_tried_again_when_a_version_is_activated(
    versions_model: Path, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(version_config(versions_model, versions), StrictDevice()) as engine:
        graphs = engine.worker.graphs
        with monkeypatch.context() as patch:
            fail_at(engine, 1, patch)
            version = engine.load_catalog("main", versions.path(2))
        assert graphs.num_graphs == 4, "one of two"
        engine.activate_catalog("main", version)
        assert graphs.num_graphs == 5
        assert_is_version(ask(engine), 2, versions)
        assert (graphs.num_eager, graphs.dropped_slots) == (0, set())


def test_a_version_loaded_before_the_start_has_its_graphs_too(
    versions_model: Path, versions: Versions
) -> None:
    engine = make_engine(version_config(versions_model, versions), StrictDevice())
    version = engine.load_catalog("main", versions.path(2))
    with engine:
        num_captures = engine.worker.graphs.num_captures
        engine.activate_catalog("main", version)
        assert_is_version(ask(engine), 2, versions)
        graphs = engine.worker.graphs
        assert (graphs.num_captures, graphs.num_eager) == (num_captures, 0)


def test_a_slot_that_is_being_activated_makes_no_room_for_others(
    versions_model: Path, versions: Versions
) -> None:
    config = version_config(versions_model, versions)
    config = replace(config, cache=replace(config.cache, catalog_slots=3))
    device = StrictDevice()
    device.max_graphs = 5
    with make_engine(config, device) as engine:
        engine.load_catalog("main", versions.path(2))
        loaded = engine.catalogs.pin("main", "v2")
        with engine.warm_up.keeping(loaded.slot_index) as has_gaps:
            assert not has_gaps
            engine.load_catalog("main", versions.path(3))
            assert loaded.slot_index not in engine.worker.graphs.dropped_slots
        engine.catalogs.release(loaded)
        engine.catalogs.retire("main", "v3")
        engine.load_catalog("main", versions.path(4))
        with engine.warm_up.keeping(loaded.slot_index) as has_gaps:
            assert has_gaps, "nobody kept it this time"


def test_normalisations_without_graphs_have_run_when_an_engine_has_started(
    config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the smallest and in the largest bucket of each catalogue; what is listed is captured instead."""
    engine = make_engine(config, StrictDevice())
    run, seen = engine.worker.run, list[tuple[int, int]]()

    def recorded(batch: Batch) -> Any:
        (group,) = batch.groups
        if group.normalization == "valid":
            seen.append((group.slot_index, int(group.widths_SL[:, 0].sum())))
        return run(batch)

    monkeypatch.setattr(engine.warm_up, "_run", recorded)
    with engine:
        assert engine.worker.graphs.num_eager == 0
    assert sorted(seen) == [(0, 32), (0, 128), (1, 32), (1, 128)]


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize(("tokens", "rows"), [(64, 4), (32, 64)])
def test_more_histories_than_a_batch_has_room_for_are_no_obstacle(
    flat_config: RuntimeConfig, kind: str, tokens: int, rows: int
) -> None:
    scheduler = replace(
        flat_config.scheduler, max_batch_histories=64, max_batch_tokens=tokens, max_batch_rows=rows
    )
    width = min(rows, 4)
    config = replace(
        flat_config,
        limits=LimitsConfig(max_prompt_tokens=32, max_beam_width=width),
        search=replace(flat_config.search, beam_width=width),
        scheduler=scheduler,
        buckets=BucketsConfig(histories=(40,), normalizations=()),
    )
    with make_engine(config, strict(kind)) as engine:
        prompt = np.asarray([1, 9], dtype=np.int64)
        search = Search(catalog="flat", beam_width=1)
        requests = [RecRequest("", prompt_token_ids=prompt, searches=(search,)) for _ in range(70)]
        assert all(result.results[0].status == "ok" for result in engine.recommend(requests))
        assert engine.worker.graphs.num_eager == 0
