"""The engine benchmark: its floor against hand-counted numbers, its reference, its checks, and a tiny run of everything."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.helpers.strict_device import StrictDevice
from tools import bench_engine
from tools._bench import engine_matrix, engine_profile
from tools._bench.answer_check import Judges, Question, judge
from tools._bench.answer_scores import LevelScorer, foresee
from tools._bench.busy_share import busy_share
from tools._bench.drawn_model import EPS, ROPE_THETA, DrawnWeights, draw_decoder
from tools._bench.engine_memory import MIB, planned_bytes, takes_mib
from tools._bench.engine_profile import Interval, segments
from tools._bench.engine_rows import (
    LOAD_PROMPT_TOKENS,
    LOAD_ROW,
    MEMORY_PROMPT_TOKENS,
    MEMORY_ROW,
    ROWS,
    TINY_MEMORY_ROW,
    TINY_SHAPE,
    choose,
)
from tools._bench.engine_run import (
    EngineSizes,
    LastBatches,
    engine_config,
    medians_ms,
    stages_ms,
)
from tools._bench.floor import SHAPES, ModelShape, Work, floor_ms
from tools._bench.plain_decoder import PlainDecoder
from tools._bench.sid_catalog import Prefixes, draw_items, write_catalog
from tools._bench.unconstrained import select_top
from xgr_runtime import Engine
from xgr_runtime.config_check import check_config
from xgr_runtime.conformance import decoder_reference
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.ops.beam import BeamRows, LevelTrie
from xgr_runtime.xschedule.batch import BatchOutput
from xgr_runtime.xschedule.capacities import capacities_of
from xgr_runtime.xschedule.ladder import ladder_of
from xgr_runtime.xschedule.stage_times import StageTimes

if TYPE_CHECKING:
    from pathlib import Path

SMALL, LARGE = SHAPES["qwen3-0.6B"], SHAPES["qwen3-1.7B"]
CPU = torch.device("cpu")

# By hand, from the sizes of the models: layers x (M x (Q + 2 G) D + Q D x M + 3 M x F).
PARAMETERS = {"small": 28 * (1024 * 4096 + 2048 * 1024 + 3 * 1024 * 3072), "large": 28 * 50_331_648}


@pytest.mark.parametrize(
    ("shape", "work", "expected"),
    [
        (SMALL, Work(1024, 512), 2.8),
        (SMALL, Work(1024, 512, 8), 22.4),
        (LARGE, Work(1000, 256), 5.8),
        (LARGE, Work(1000, 256, 8), 46.3),
        (LARGE, Work(5000, 256), 24.4),
        (LARGE, Work(5000, 256, 8), 195.2),
    ],
)
def test_floor(shape: ModelShape, work: Work, expected: float) -> None:
    assert floor_ms(shape, work) == pytest.approx(expected, abs=0.05)


def test_floor_term_by_term() -> None:
    assert (SMALL.layer_parameters, LARGE.layer_parameters) == tuple(PARAMETERS.values())
    tokens, rows = 1000, 2 * 256
    linear = 2 * PARAMETERS["large"] * (tokens + rows)
    attention = 4 * 28 * 2048 * (tokens * tokens / 2 + tokens * rows)
    head = 2 * 513 * 2048 * 8192
    assert floor_ms(LARGE, Work(1000, 256)) == pytest.approx((linear + attention + head) / 779e9)
    # a hit of 992 of 1,024 tokens: 32 new ones, each of which attends to all before it
    pairs = 992 * 32 + 32 * 32 / 2 + 1024 * 256
    hit = 2 * PARAMETERS["large"] * (32 + 256) + 4 * 28 * 2048 * pairs + 2 * 257 * 2048 * 8192
    assert floor_ms(LARGE, Work(1024, 128, cached_tokens=992)) == pytest.approx(hit / 779e9)


@pytest.mark.parametrize(
    ("shape", "work", "expected"),
    [(SMALL, Work(1024, 512, 8), 1.162), (LARGE, Work(1000, 256, 8), 1.078)],
)
def test_ratio_of_the_floors_of_both_normalisations(
    shape: ModelShape, work: Work, expected: float
) -> None:
    ratio = floor_ms(shape, replace(work, is_vocab=True)) / floor_ms(shape, work)
    assert ratio == pytest.approx(expected, abs=5e-4)


def test_plain_decoder_is_the_float64_reference_of_the_conformance_run() -> None:
    shape = replace(TINY_SHAPE, num_codes=16)
    weights = DrawnWeights(CPU, torch.float32, 3)
    plain = PlainDecoder(shape, weights, CPU, torch.float64)
    sizes = decoder_reference.DecoderShape(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        eps=EPS,
        rope_theta=ROPE_THETA,
    )
    names = decoder_reference.random_weights(sizes, torch.float32)
    taken = {name: weights.take(name, tuple(w.shape)) for name, w in names.items()}
    taken["lm_head.weight"] = taken["model.embed_tokens.weight"]
    oracle = decoder_reference.PlainDecoder(sizes, taken)
    prompt, tokens = list(range(3, 40)), np.array([[40, 56], [41, 57], [47, 79]])
    logits, past = oracle.read(prompt)
    read = plain.read(prompt)
    np.testing.assert_allclose((read.hidden_M @ plain.head_VM.T).numpy(), logits, atol=1e-9)
    for length in (1, 2):
        found = plain.continue_from(read, torch.from_numpy(tokens[:, :length].copy()))
        wanted = oracle.continue_from(past, tokens[:, :length].tolist())
        np.testing.assert_allclose((found @ plain.head_VM.T).numpy(), wanted, atol=1e-9)


def test_prefixes_of_a_catalogue_are_those_of_its_items() -> None:
    items = draw_items(300, 8, seed=5)
    prefixes = Prefixes(items.sids, 8)
    rows = [tuple(sid) for sid in items.sids.tolist()]
    for level in range(3):
        wanted = sorted({sid[: level + 1] for sid in rows})
        assert [tuple(c) for c in prefixes.codes_of(prefixes.keys[level], level + 1)] == wanted
    parents = prefixes.keys[0]
    counts, children = prefixes.children(parents, 1)
    assert counts.sum() == len(children) == len(prefixes.keys[1])
    assert [tuple(c) for c in prefixes.codes_of(children, 2)] == sorted({s[:2] for s in rows})
    assert prefixes.fanouts()[0]["most"] == len(prefixes.keys[0])


def question_of_reference(t: float, width: int = 6) -> Question:
    """A right answer: the reference's own search, as a run would report it."""
    items = draw_items(200, TINY_SHAPE.num_codes, seed=6)
    prefixes = Prefixes(items.sids, TINY_SHAPE.num_codes)
    decoder = PlainDecoder(TINY_SHAPE, DrawnWeights(CPU, torch.float32, 4), CPU)
    read = decoder.read(list(range(1, 30)))
    first = TINY_SHAPE.text_vocabulary
    scorer = LevelScorer(decoder, read, prefixes, first, is_vocab=True)
    packed, codes, scores = np.zeros(1, np.int64), [], []
    own = np.zeros(1)
    for level in range(3):
        behind, children = scorer.children(packed, level)
        score = np.repeat(own, np.diff(behind.starts)) + behind.log_probs
        best = np.argsort(-score, kind="stable")[:width]
        packed, own = children[best], score[best]
        codes.append(prefixes.codes_of(packed, level + 1))
        scores.append(own.astype(np.float32))
        np.testing.assert_allclose(scorer.scores_of(codes[-1]), own, atol=1e-5)
    widths = (width,) * 3
    foreseen = foresee(scorer, 3, widths, t, [np.zeros(0, np.int64)] * 3)
    return Question("q", codes, scores, len(packed), widths, t, None, foreseen)


def test_a_right_answer_is_right_in_a_process_of_its_own() -> None:
    question = question_of_reference(1e-4)
    judges = Judges(1)
    verdict = judges.ask(question).result()
    judges.close()
    assert verdict == judge(question)
    assert (verdict.violation, verdict.num_swapped) == ("", 0)
    assert verdict.stats is not None
    assert verdict.stats.is_identical
    assert verdict.stats.possible_checked


@pytest.mark.parametrize("damage", ["score", "order", "dropped", "invalid"])
def test_a_wrong_answer_is_a_violation(damage: str) -> None:
    question = question_of_reference(1e-4)
    codes, scores = [c.copy() for c in question.codes], [s.copy() for s in question.own_scores]
    if damage == "score":
        scores[2][0] += 0.01
    elif damage == "order":
        codes[2][[0, 1]] = codes[2][[1, 0]]
    elif damage == "dropped":
        codes[2], scores[2] = codes[2][1:], scores[2][1:]
    else:
        codes[2][5, 2] = (codes[2][5, 2] + 1) % TINY_SHAPE.num_codes
    wrong = replace(question, codes=codes, own_scores=scores, num_valid=len(codes[2]))
    assert judge(wrong).violation


def test_unconstrained_selection_is_the_exact_top() -> None:
    searches, rows, codes, width = 2, 5, 192, 40
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(searches * rows, codes, generator=generator)
    lse = logits.logsumexp(1)

    def beams(count: int) -> BeamRows:
        start = torch.arange(0, searches * count + 1, count, dtype=torch.int32)
        search = torch.arange(searches, dtype=torch.int32).repeat_interleave(count)
        scores = torch.randn(searches * count, generator=generator)
        nodes, parents, codes = torch.zeros(3, searches * count, dtype=torch.int32)
        return BeamRows(scores, nodes, parents, codes, start, search)

    parents, children = beams(rows), beams(width)
    trie = LevelTrie(codes, codes, True, None, None, None, torch.zeros(1, 1, dtype=torch.bool))
    counters = torch.zeros(2, dtype=torch.int64)
    select_top(
        logits, lse, parents, torch.zeros(searches, dtype=torch.int32), trie, children, counters
    )
    scores = logits + (parents.scores_N - lse)[:, None]
    wanted = scores.view(searches, -1).sort(1, descending=True).values[:, :width]
    assert torch.equal(children.scores_N.view(searches, width), wanted)
    assert torch.equal(
        scores[children.parents_N.long(), children.codes_N.long()], children.scores_N
    )


def test_busy_share_is_the_union_of_the_intervals() -> None:
    starts = np.array([0, 500_000_000, 100_000_000, 900_000_000])
    ends = np.array([200_000_000, 800_000_000, 300_000_000, 1_000_000_000])
    found = busy_share(starts, ends)
    assert (found.share, found.seconds, found.num_intervals) == (0.7, 1.0, 4)
    assert found.longest_gap_us == 200_000.0


def test_rows_are_those_of_the_table() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) == 13
    assert [row.name for row in choose(ROWS, ["1.7B-*-b8"])] == [
        "1.7B-w256-h1000-b8",
        "1.7B-w256-h5000-b8",
    ]
    with pytest.raises(SystemExit, match="no row is named 'x'"):
        choose(ROWS, ["x"])


def test_tiny_run_of_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--tiny", "--dtype", "float32", "--runs", "2", "--warmup", "1"]
    assert bench_engine.main([*arguments, "--commit", "abc", "--json", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert json.loads(out.read_text()) == report
    assert report["failures"] == []
    assert {check["violations"] for check in report["reference_checks"]} == {0}
    assert len(report["rows"]) == 12
    for row in report["rows"]:
        assert row["commit"] == "abc"
        assert row["violations"] == 0
        assert row["checked_requests"] >= 1
        assert math.isfinite(row["median_ms"])
        assert 0 < row["device_ms"] <= row["p80_ms"]
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert sum(row["stages_ms"][name] for name in ("prefill", "round_0", "round_1")) > 0
        assert row["cached_tokens"] == (36 if "hit" in row["row"] else 0)
    assert report["memory"]["violations"] == report["load"]["violations"] == 0


def test_a_wrong_engine_has_no_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reference draws other weights than the engine: every answer is wrong, and no row is printed."""

    class Other(DrawnWeights):
        def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            return super().take(name, shape) * (1.01 if name.endswith("o_proj.weight") else 1.0)

    plain = PlainDecoder

    def other(shape: ModelShape, weights: DrawnWeights, place: torch.device) -> PlainDecoder:
        return plain(shape, Other(place, weights.dtype, weights.seed), place)

    monkeypatch.setattr("tools._bench.engine_matrix.PlainDecoder", other)
    out = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--tiny", "--dtype", "float32", "--runs", "1", "--part", "rows"]
    arguments += ["--rows", "tiny-w16-h40-b1", "--commit", "abc", "--out", str(out)]
    assert bench_engine.main(arguments) == 1
    assert not out.exists()
    report = json.loads(out.with_name("report.json.partial").read_text())
    assert report["rows"] == []
    assert any("answers are wrong" in failure["reason"] for failure in report["failures"])


def test_segments_of_a_profile() -> None:
    """Two batches of two graphs each, whose kernels leave every second nanosecond free, and a copy before each."""
    work, moment = [], 0
    for batch in range(2):
        work.append(Interval("copy", moment, moment + 5_000_000, 100 + batch))
        moment += 6_000_000
        for graph, count in enumerate((30, 40)):
            for number in range(count):
                name = "large" if number % 2 else "small"
                length = 2_000_000 if number % 2 else 1_000_000
                work.append(Interval(name, moment, moment + length, 10 * batch + graph))
                moment += length + 1_000_000
    prefill, rounds, rest = segments(work, 2)
    assert [part["segment"] for part in (prefill, rounds)] == ["prefill", "rounds"]
    assert (prefill["kernels"], rounds["kernels"], rest["kernels"]) == (30, 40, 1)
    assert (prefill["span_ms"], rounds["span_ms"], rest["span_ms"]) == (74.0, 99.0, 5.0)
    assert prefill["gaps_ms"] == pytest.approx(29, abs=0.01)
    assert prefill["top"][0] == {"kernel": "large", "ms": 30.0, "calls": 15.0}


def test_a_tiny_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed once something has been traced."""
    order: list[tuple[str, str]] = []

    def noted(module: Any, name: str, place: int) -> None:
        fn = getattr(module, name)

        def call(*args: Any) -> Any:
            order.append((name, args[place].name))
            return fn(*args)

        monkeypatch.setattr(module, name, call)

    noted(engine_matrix, "time_row", 4)
    noted(engine_profile, "profile_row", 4)
    out = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--tiny", "--dtype", "float32", "--runs", "1", "--warmup", "1"]
    arguments += ["--commit", "abc", "--out", str(out)]
    rows = ["--rows", "tiny-w16-h40-b2", "--profile", "tiny-w8-h40-b1-hit"]
    assert bench_engine.main([*arguments, *rows]) == 0
    assert {fn for fn, _ in order[:2]} == {"time_row"}
    assert order[2:] == [("profile_row", "tiny-w8-h40-b1-hit")]
    report = json.loads(out.read_text())
    assert {row["row"] for row in report["rows"]} == {"tiny-w16-h40-b2", "tiny-w8-h40-b1-hit"}
    level, vocab = report["profiles"]
    assert (level["row"], vocab["row"]) == ("tiny-w8-h40-b1-hit",) * 2
    assert (level["normalization"], vocab["normalization"]) == ("level", "vocab")
    assert level["stages_ms"]["prefill"] > 0


def test_times_of_a_batch_that_another_one_overtook() -> None:
    """What is unknown is left out, and medians are those of the runs that know."""
    known = StageTimes(1e-3, 2e-3, ((1e-3, 2e-3),), ((1e-4, math.nan),), 1e-4, 7e-3, (3e-3,))
    overtaken = replace(known, rounds_s=((None, None),), selects_s=((None, None),), span_s=9e-3)
    runs = [stages_ms(BatchOutput((), times)) for times in (known, overtaken)]
    assert runs[0]["device"] == runs[1]["device"] == pytest.approx(5.0)
    assert "round_1_select" not in runs[0]
    assert set(runs[0]) - set(runs[1]) == {"round_0", "round_1", "round_0_select"}
    assert medians_ms(runs) | {"span": 8.0, "round_1": 2.0, "rounds": 3.0} == medians_ms(runs)


def test_batches_that_were_split_are_no_figure_and_do_not_stay() -> None:
    last = LastBatches([(None, None), (None, None)])  # type: ignore[list-item]
    with pytest.raises(SystemExit, match="ran in 2 batches"):
        last.take()
    assert last.pairs == []


def test_memory_of_the_measured_engines_is_within_reach(tmp_path: Path) -> None:
    """Their buffers counted by hand: 14 MiB a page of 128 tokens, 224 KiB a beam's two tokens."""
    catalog = write_catalog(draw_items(50, 8192, 1), tmp_path / "items.xgr", SMALL.text_vocabulary)
    found = []
    for row, tokens in ((MEMORY_ROW, MEMORY_PROMPT_TOKENS), (LOAD_ROW, LOAD_PROMPT_TOKENS)):
        sizes = EngineSizes(tokens, row.width)
        config = engine_config(
            row, sizes, "cuda", "bfloat16", catalog, allow_reference=False, captures_all=True
        )
        check_config(config)
        found.append(planned_bytes(SMALL, config, torch.bfloat16))
    one, load = found
    assert one["weights"] == load["weights"] == pytest.approx(2 * 620.8e6, rel=1e-3)
    assert one["head_rows"] == 3 * 8192 * 1024 * 2
    assert one["pages"] == (1 + 2 * (24 + 1)) * 14 * MIB
    assert load["pages"] == (1 + 2 * (64 + 8)) * 14 * MIB
    assert one["beams"] == (513 + 64) * 224 * 1024
    assert 0 < load["beams"] - 4097 * 224 * 1024 <= 64 * MIB
    # the widest activations once in the graphs' pool and once outside of it
    prefill = 2 * 8192 * (3 * 1024 + 2 * 4096 + 3 * 3072)
    rounds = 4096 * (4 * 8192 + 2 * (3 * 1024 + 2 * 4096 + 3 * 3072))
    slot = 1.25 * 1_231_051 * (8 + 16 + 4 + 4)
    assert sum(one.values()) - one["weights"] + slot + 2 * prefill < 2 * 2**30
    assert sum(load.values()) + slot + 2 * (prefill + rounds) < 10.6e9


def test_planned_memory_is_what_an_engine_allocates(tmp_path: Path) -> None:
    row, dtype = TINY_MEMORY_ROW, torch.float32
    catalog = write_catalog(draw_items(20_000, 64, 1), tmp_path / "items.xgr", 32)
    config = engine_config(row, EngineSizes(64, 8), "cpu", "float32", catalog, allow_reference=True)
    weights = DrawnWeights(CPU, dtype, 3)
    planned = planned_bytes(TINY_SHAPE, config, dtype)
    with Engine(config, CpuDevice(), draw_decoder(TINY_SHAPE, weights), "drawn") as engine:
        kv, found = engine.runner.kv, takes_mib(TINY_SHAPE, engine, dtype, 100.0)
    assert (planned["pages"], planned["beams"]) == (kv.shared.num_bytes, kv.unshared.num_bytes)
    assert found["catalogue"] > 0
    assert sum(found.values()) == pytest.approx(100.0, abs=0.5)


def test_a_selection_that_misses_some_is_no_baseline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without a catalogue too: scores of all kept beams are right, and half of the codes are never looked at."""

    @functools.wraps(select_top)
    def half(logits_NC: torch.Tensor, *rest: object) -> None:
        logits_NC[:, ::2] = -torch.inf
        select_top(logits_NC, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("tools._bench.unconstrained.select_top", half)
    out = tmp_path / "report.json"
    arguments = ["--device", "cpu", "--tiny", "--dtype", "float32", "--runs", "1", "--part", "rows"]
    arguments += ["--rows", "tiny-w16-h40-b2-unconstrained", "--commit", "abc", "--out", str(out)]
    assert bench_engine.main(arguments) == 1
    report = json.loads(out.with_name("report.json.partial").read_text())
    assert report["rows"] == []
    assert any("answers are wrong" in failure["reason"] for failure in report["failures"])


def test_every_row_has_an_engine_with_a_bucket_of_its_own_size(tmp_path: Path) -> None:
    """On an H200 no row pads its new tokens or its beams, but the few behind a hit, which are padded to 32."""
    catalog = write_catalog(draw_items(50, 8192, 1), tmp_path / "items.xgr", SMALL.text_vocabulary)
    device = StrictDevice()
    for row in ROWS:
        sizes = EngineSizes(bench_engine.MAX_PROMPT_TOKENS, bench_engine.MAX_WIDTH)
        config = engine_config(row, sizes, "cuda", "bfloat16", catalog, allow_reference=False)
        check_config(config)
        rung = ladder_of(config, capacities_of(config), device).rungs[-1]
        needed = row.requests * (row.history - row.hit_tokens)
        smallest = min(size for size in rung.tokens if size >= needed)
        assert smallest == (32 if row.hit_tokens else needed), row.name
        assert row.requests * row.width in [rows for rows, _ in rung.rows], row.name
