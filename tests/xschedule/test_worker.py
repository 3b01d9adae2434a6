"""A batch of several groups, made by hand: each search answers as it does alone, whatever shares its batch."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.helpers.catalogs import TAGS, random_catalog, scattered_tokens
from tests.helpers.engines import loaded_catalog, make_config, make_engine, write_catalog
from tests.helpers.strict_device import StrictDevice
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from xgr_runtime.config import CacheConfig, LimitsConfig, SchedulerConfig
from xgr_runtime.errors import EngineClosed
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.types import RecRequest
from xgr_runtime.xbeam.rules import TagExpression, build_rule_set, clear_exclusions
from xgr_runtime.xschedule.batch import Batch, RuleRow, SearchGroup, pack_histories
from xgr_runtime.xschedule.results import beam_levels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from xgr_runtime import Engine, RuntimeConfig
    from xgr_runtime.hal.device import Device
    from xgr_runtime.types import Normalization
    from xgr_runtime.xschedule.batch import BatchOutput, GroupOutput

VOCAB = 64
PAGE = 4
PROMPTS = ([1, 9, 33, 2, 60, 17, 5], [1, 40, 3])
PAGES = ([5, 2], [7])
ATOL = 2e-5
# "deep" has four levels (two reorders of the beams' own KV), "flat" has two.
CODES = {"deep": [8, 9, 7, 8], "flat": [20, 30]}


@dataclass(frozen=True)
class Wanted:
    """One search. tags: an item needs one of them. num_excluded: as many items are excluded."""

    history: int
    widths: tuple[int, ...]
    tags: tuple[str, ...] = ()
    num_excluded: int = 0


Groups = list[tuple[str, "Normalization", list[Wanted]]]
DEEP = [Wanted(0, (9, 40, 12, 25), TAGS[:1], 150), Wanted(1, (3, 9, 27, 50), num_excluded=90)]
OTHER = [Wanted(0, (5, 30, 8, 20), num_excluded=200), Wanted(1, (8, 2, 33, 14), TAGS[1:2])]
FLAT = [Wanted(0, (20, 64), TAGS[2:3]), Wanted(1, (7, 31), num_excluded=60)]
SEVERAL = [Wanted(0, (6, 20)), Wanted(0, (13, 9), TAGS[:1], 30), Wanted(1, (4, 40))]
CASES: dict[str, Groups] = {
    "two catalogues": [("deep", "vocab", DEEP), ("flat", "valid", FLAT)],
    "two normalisations": [("deep", "vocab", DEEP), ("deep", "level", OTHER)],
    "several searches, and none": [
        ("flat", "level", SEVERAL),
        ("deep", "valid", DEEP[1:]),
        ("flat", "vocab", FLAT[:1]),
    ],
}
PLAIN: Groups = [
    (name, normalization, [replace(w, num_excluded=0) for w in wanted])
    for name, normalization, wanted in [*CASES["two normalisations"], *CASES["two catalogues"]]
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RuntimeConfig:
    folder = tmp_path_factory.mktemp("worker")
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
        allow_reference=True,
    )


def make_group(
    engine: Engine, name: str, normalization: Normalization, wanted: list[Wanted]
) -> SearchGroup:
    """Every group writes its tags to rows 1, 2, ... and takes scratch rows 0, 1, ...: groups of one slot meet there."""
    pinned = engine.catalogs.pin(name)
    engine.catalogs.release(pinned)
    rules: list[RuleRow] = []
    loads: list[tuple[int, TagExpression]] = []
    num_scratch = 0
    for search in wanted:
        expression = TagExpression.canonical((search.tags,) if search.tags else (), ())
        row = 0
        if search.tags:
            row = len(loads) + 1
            loads.append((row, expression))
        scratch, edges = None, tuple(np.zeros(0, np.int32) for _ in search.widths)
        if search.num_excluded:
            rule_set = build_rule_set(pinned.catalog, expression)
            positions = np.arange(search.num_excluded)
            edges = clear_exclusions(pinned.catalog, rule_set, positions).edges
            scratch, num_scratch = num_scratch, num_scratch + 1
        rules.append(RuleRow(row, scratch, edges))
    return SearchGroup(
        slot_index=pinned.slot_index,
        catalog_version=pinned.version,
        normalization=normalization,
        history_of_S=np.asarray([search.history for search in wanted], dtype=np.int32),
        widths_SL=np.asarray([search.widths for search in wanted], dtype=np.int32),
        rules=tuple(rules),
        rule_loads=tuple(loads),
    )


def make_batch(engine: Engine, groups: Groups, histories: tuple[int, ...] = (0, 1)) -> Batch:
    prompts = [np.asarray(PROMPTS[i], dtype=np.int64) for i in histories]
    return Batch(
        batch_id=1,
        kind="full",
        request_ids=tuple(map(str, histories)),
        histories=pack_histories(prompts, [PAGES[i] for i in histories], PAGE),
        groups=tuple(make_group(engine, *group) for group in groups),
    )


def assert_same_bits(one: GroupOutput, two: GroupOutput, group: SearchGroup) -> None:
    """Every row of every level, the status of every search, and the counters."""
    assert one.status_S.tolist() == two.status_S.tolist() == [0] * group.num_searches
    assert (one.num_live_rows, one.num_rows_skipped) == (two.num_live_rows, two.num_rows_skipped)
    for level in range(group.num_levels):
        rows = slice(0, int(group.row_starts(level)[-1]))
        for name in ("scores_LN", "nodes_LN", "parents_LN"):
            left, right = (getattr(output, name)[level][rows].tobytes() for output in (one, two))
            assert left == right, (name, level)


def assert_same_beams(
    got: tuple[SearchGroup, GroupOutput, int], alone: tuple[SearchGroup, GroupOutput, int]
) -> None:
    """The same rows in other places of other buckets: sums may be ordered differently, close scores may swap."""
    for (nodes, scores), (lone_nodes, lone_scores) in zip(
        beam_levels(*got), beam_levels(*alone), strict=True
    ):
        assert len(scores) == len(lone_scores) > 0
        np.testing.assert_allclose(scores, lone_scores, rtol=0, atol=ATOL)
        gaps = np.concatenate([[np.inf], -np.diff(lone_scores), [np.inf]])
        is_clear = np.minimum(gaps[1:], gaps[:-1]) > 2 * ATOL
        is_clear[-1] = False  # what was cut off behind it may be as close
        assert nodes[is_clear].tolist() == lone_nodes[is_clear].tolist()
        assert is_clear.sum() >= 0.8 * len(nodes) - 1


def run_and_check(engine: Engine, groups: Groups) -> BatchOutput:
    """All groups together, each group alone, each search alone."""
    batch = make_batch(engine, groups)
    output = engine.worker.run(pickle.loads(pickle.dumps(batch)))
    assert len(output.groups) == len(batch.groups)
    for number, (name, normalization, wanted) in enumerate(groups):
        group, got = batch.groups[number], output.groups[number]
        by_itself = engine.worker.run(make_batch(engine, [groups[number]]))
        assert_same_bits(got, by_itself.groups[0], group)
        for index, search in enumerate(wanted):
            lone: Groups = [(name, normalization, [replace(search, history=0)])]
            lone_batch = make_batch(engine, lone, (search.history,))
            lone_output = engine.worker.run(lone_batch)
            alone = (lone_batch.groups[0], lone_output.groups[0], 0)
            assert_same_beams((group, got, index), alone)
    return output


def make_hit(engine: Engine, groups: Groups) -> Batch:
    """The batch of `make_batch` behind it: all but the last token of each history cached, its first pages read, the last
    copied into a page that nobody has."""
    batch = make_batch(engine, groups)
    prompts = [np.asarray(prompt, dtype=np.int64) for prompt in PROMPTS]
    pages = [[*owned[:-1], 10 + h] for h, owned in enumerate(PAGES)]
    sources = [owned[-1] for owned in PAGES]
    cached = [len(prompt) - 1 for prompt in PROMPTS]
    return replace(batch, histories=pack_histories(prompts, pages, PAGE, cached, sources))


DEVICES: dict[str, Callable[[], Device]] = {
    "cpu": CpuDevice,
    "strict": StrictDevice,
    "strict, graph per round": lambda: StrictDevice(is_graph_per_round=True),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_each_search_of_each_group_answers_as_alone(
    config: RuntimeConfig, case: str, device: str
) -> None:
    with closing(make_engine(config, DEVICES[device]())) as engine:
        first = run_and_check(engine, CASES[case])
        batch = make_batch(engine, CASES[case])
        again = engine.worker.run(batch)
    for group, one, two in zip(batch.groups, first.groups, again.groups, strict=True):
        assert_same_bits(one, two, group)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_that_are_copied_are_as_good_as_computed(config: RuntimeConfig, device: str) -> None:
    with closing(make_engine(config, DEVICES[device]())) as engine:
        for groups in (CASES["two normalisations"], CASES["two catalogues"]):
            batch, hit = make_batch(engine, groups), make_hit(engine, groups)
            engine.runner.kv.shared.all_pages.fill_(np.nan)
            computed = engine.worker.run(batch)
            copied = engine.worker.run(hit)
            assert hit.histories.num_scheduled_tokens == len(PROMPTS)
            for group, one, two in zip(batch.groups, computed.groups, copied.groups, strict=True):
                for index in range(group.num_searches):
                    assert_same_beams((group, two, index), (group, one, index))


def test_exclusions_and_tags_reach_their_own_group(config: RuntimeConfig) -> None:
    """Two groups of one slot share rule rows and scratch rows, one after the other."""
    groups = CASES["two normalisations"]
    with closing(make_engine(config)) as engine:
        batch = make_batch(engine, groups)
        output = engine.worker.run(batch)
        catalog = loaded_catalog(engine, "deep")
    for group, got, (_, _, wanted) in zip(batch.groups, output.groups, groups, strict=True):
        for index, search in enumerate(wanted):
            expression = TagExpression.canonical((search.tags,) if search.tags else (), ())
            is_alive = build_rule_set(catalog, expression).item_alive.copy()
            is_alive[: search.num_excluded] = False
            nodes, _ = beam_levels(group, got, index)[-1]
            starts = catalog.sid_item_offsets
            allowed = [bool(is_alive[starts[n] : starts[n + 1]].any()) for n in nodes]
            assert allowed, "the rules leave something to find"
            assert all(allowed)


def test_one_prefill_then_group_by_group(config: RuntimeConfig) -> None:
    """The segments and their order; the prefill's graph serves whatever widths and catalogues follow."""
    device = StrictDevice()
    first, second = CASES["two catalogues"], CASES["two normalisations"]
    with closing(make_engine(config, device)) as engine:
        engine.worker.run(make_batch(engine, first))
        assert engine.worker.graphs.num_captures == 3
        engine.worker.run(make_batch(engine, second))
        assert engine.worker.graphs.num_captures == 4, "one more normalisation"
        device.segment_names.clear()
        engine.worker.run(make_batch(engine, first))
        assert engine.worker.graphs.num_captures == 4
    assert device.segment_names == [
        "inputs", "inputs", "prefill", "inputs", "rounds[0:4]", "inputs", "inputs", "rounds[0:2]"
    ]  # fmt: skip


class LateDevice(CpuDevice):
    """Does what it was asked when somebody waits, as an accelerator may: whatever the host overwrites before is lost."""

    kind = "late"
    is_capturing_supported = True
    is_prefill_captured = True
    max_graphs = 256

    def __init__(self) -> None:
        super().__init__()
        self._work: list[Callable[[], object]] = []
        self.num_waits = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._work.append(lambda: target.copy_(source))

    def capture(self, name: str, fn: Callable[[], None]) -> LateGraph:
        return LateGraph(self._work, fn)

    def record_event(self) -> LateDevice:  # type: ignore[override]
        return self

    def is_done(self) -> bool:
        return not self._work

    def wait(self) -> None:
        self.num_waits += 1
        self.synchronize()

    def synchronize(self) -> None:
        for do in self._work:
            do()
        self._work.clear()


@dataclass
class LateGraph:
    """Replays when the device gets to it."""

    work: list[Callable[[], object]]
    fn: Callable[[], None]

    def replay(self, kv_lens: Sequence[int] = ()) -> None:
        self.work.append(self.fn)


def test_the_host_waits_once_and_overwrites_nothing_before(config: RuntimeConfig) -> None:
    """Four groups, without exclusions (rows are copied by plain tensor operations, which this device cannot delay)."""
    device = LateDevice()
    with closing(make_engine(config, device)) as engine:
        device.synchronize()
        batch = make_batch(engine, PLAIN)
        before = device.num_waits  # loads of catalogues wait too
        output = engine.worker.run(batch)
        assert device.num_waits == before + 1
        for number, group in enumerate(batch.groups):
            by_itself = engine.worker.run(make_batch(engine, PLAIN[number : number + 1]))
            assert_same_bits(output.groups[number], by_itself.groups[0], group)


def test_a_batch_that_raises_leaves_nothing_behind_that_the_next_one_overwrites(
    config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice()
    with closing(make_engine(config, device)) as engine:
        device.synchronize()
        batch = make_batch(engine, PLAIN[:1])
        expected = engine.worker.run(batch)

        def broken(entry: int, number: int) -> None:
            raise RuntimeError("the device lost its mind")

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner.state, "copy_to_host", broken)
            with pytest.raises(RuntimeError, match="lost its mind"):
                engine.worker.run(make_batch(engine, PLAIN[1:2], histories=(1, 0)))
        assert device.is_done()
        again = engine.worker.run(batch)
        assert_same_bits(again.groups[0], expected.groups[0], batch.groups[0])


class LostDevice(CpuDevice):
    """Fails whatever it is asked once it is lost, as a GPU after an illegal access."""

    kind = "lost"

    def __init__(self) -> None:
        super().__init__()
        self.is_lost = False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.synchronize()
        super().copy(target, source)

    def synchronize(self) -> None:
        if self.is_lost:
            raise RuntimeError("an illegal memory access was encountered")


def test_a_lost_device_ends_the_engine(config: RuntimeConfig) -> None:
    """Every later batch would fail as well, and a service would stay healthy for ever."""
    device = LostDevice()
    with make_engine(config, device) as engine:
        prompt = RecRequest(prompt_token_ids=np.asarray(PROMPTS[0], dtype=np.int64))
        assert engine.recommend([prompt])[0].results[0].num_items > 0
        device.is_lost = True
        with pytest.raises(EngineClosed, match="failed for good: an illegal memory access"):
            engine.recommend([prompt])
        with pytest.raises(EngineClosed, match="the engine stopped"):
            engine.recommend([prompt])
        asyncio.run(asyncio.wait_for(engine.wait_stopped(), 60.0))
