"""The op benchmark: its counts by hand, a call for every op, a wrong provider without a figure, a tiny run of everything."""

from __future__ import annotations

import argparse
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tools import bench_engine, bench_ops
from tools._bench import op_attention, op_processes, op_search
from tools._bench.op_findings import findings
from tools._bench.op_timing import num_sets
from tools._bench.op_work import Place
from tools._bench.sid_catalog import draw_items
from xgr_runtime.hal.ops.norm import rms_norm
from xgr_runtime.hal.registry import all_ops, impl

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--tiny", "--dtype", "float32", "--runs", "2", "--commit", "abc"]


def test_what_a_call_has_to_do_at_least() -> None:
    works = {work.name: work for work in op_attention.works(Place(CPU, torch.bfloat16))}
    beam = works["beam_attention 8 x 512 x 1024"]
    assert beam.flops == 4 * 4096 * 16 * 128 * (1024 + 2)
    queries, history, own = 2 * 4096 * 2048, 2 * 8 * 1024 * 1024, 2 * 4096 * 2 * 1024
    assert beam.num_bytes == 2 * (queries + history + own)
    assert beam.is_compute_bound
    assert beam.floor_ms == pytest.approx(beam.flops / 779e9)
    prefill = works["prefill_attention 1 x 1024, 896 cached"]
    assert prefill.flops == 4 * 2048 * (1024**2 - 896**2) / 2
    merge = works["merge_attention_states 8 x 512"]
    assert not merge.is_compute_bound
    assert merge.floor_ms == pytest.approx(merge.num_bytes / 4.24e9)


def test_inputs_that_take_turns_exceed_the_cache() -> None:
    assert num_sets(64e6, is_tiny=False) == 3
    assert num_sets(1e9, is_tiny=False) == 1
    assert num_sets(10.0, is_tiny=False) == 24


def test_levels_are_those_of_the_items() -> None:
    items = draw_items(200, 16, seed=2)
    catalogue = op_search.Catalogue(Place(CPU, torch.float32), items)
    prefixes = sorted({tuple(sid) for sid in items.sids.tolist()})
    pairs = sorted({prefix[:2] for prefix in prefixes})
    last = catalogue.levels[2]
    assert last.offsets is not None
    assert last.codes is not None
    found = [
        (*pairs[node], int(code))
        for node in range(len(pairs))
        for code in last.codes[last.offsets[node] : last.offsets[node + 1]]
    ]
    assert found == prefixes
    nodes = catalogue.parents(2, 5, seed=1)
    assert len(np.unique(nodes)) == 5
    assert catalogue.num_children(2, nodes) == sum(pairs.index(p[:2]) in nodes for p in prefixes)
    first = catalogue.levels[0]
    assert first.child_node is not None
    assert torch.nonzero(first.child_node >= 0).flatten().tolist() == sorted({p[0] for p in pairs})


def test_a_tiny_run_measures_every_op(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    assert bench_ops.main([*TINY, "--json", "--out", str(out)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == report
    assert report["failures"] == []
    assert {row["op"] for row in report["rows"] if row["is_bound"]} == set(all_ops())
    for row in report["rows"]:
        assert 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        assert 0 <= row["error_of_tolerance"] <= 1
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["median_ms"], abs=1e-3)
    (reorder,) = report["findings"]["reorder_or_ancestors"]
    assert {"reorder_ms", "gather_ms", "ancestors_ms"} <= set(reorder)
    missing = [peer["row"] for peer in report["peers_not_run"]]
    assert all("cuDNN" in name or "FlashInfer" in name for name in missing)


def test_an_op_that_is_asked_alone_has_the_calls_that_it_has_among_all() -> None:
    """Each op's checks have a process of their own, which draws what that op needs and no more."""
    place, names = Place(CPU, torch.float32, is_tiny=True), list(all_ops())
    of_all = [work.name for work in bench_ops.all_works(place, 300, names)]
    alone = [w.name for name in names for w in bench_ops.all_works(place, 300, [name])]
    assert sorted(alone) == sorted(of_all)


def test_a_wrong_provider_has_no_figure(tmp_path: Path) -> None:
    @impl(rms_norm, provider="wrong", device="cpu")
    def wrong(x_NM: torch.Tensor, weight_M: torch.Tensor, eps: float) -> torch.Tensor:
        found = rms_norm.reference(x_NM, weight_M, eps)
        found[-1, -1] += 0.1
        return found

    out = tmp_path / "ops.json"
    out.write_text("good results of before")
    try:
        code = bench_ops.main([*TINY, "--op", "rms_norm", "--cases", "--out", str(out)])
    finally:
        rms_norm.impls[:] = [i for i in rms_norm.impls if i.provider != "wrong"]
    assert out.read_text() == "good results of before"
    report = json.loads(out.with_name("ops.json.partial").read_text())
    assert code == 1
    shown = {row["provider"] for row in report["rows"]}
    assert "torch" in shown
    assert "wrong" not in shown
    assert {entry["provider"] for entry in report["parity"] if entry["failed"]} == {"wrong"}
    assert any("tiny, 5 rows wrong" in failure["row"] for failure in report["failures"])


def test_a_name_of_no_op_is_an_error_and_the_file_stays(tmp_path: Path) -> None:
    out = tmp_path / "ops.json"
    out.write_text("good results of before")
    with pytest.raises(SystemExit, match=r"no op is named 'beam_atention'; ops: .*beam_attention"):
        bench_ops.main([*TINY, "--op", "rms_norm", "--op", "beam_atention", "--out", str(out)])
    assert [path.name for path in tmp_path.iterdir()] == ["ops.json"]
    assert out.read_text() == "good results of before"


def test_only_some_of_the_checks_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_ops.main([*TINY, "--op", "rms_norm", "--only", "torch"])
    assert ended.value.code == 2
    assert "--only needs --check" in capsys.readouterr().err


def answer_of(
    monkeypatch: pytest.MonkeyPatch, only: str, output: bytes, code: int | None
) -> dict[str, Any]:
    """What becomes of a process that printed that; code None: it had not ended in time."""

    def run(command: list[str], **options: object) -> object:
        assert command[command.index("--only") + 1] == only
        if code is None:
            raise subprocess.TimeoutExpired(command, 1, output=output)
        return subprocess.CompletedProcess(command, code, output)

    monkeypatch.setattr(subprocess, "run", run)
    args = argparse.Namespace(device="cpu", dtype="float32", items=1)
    return op_processes.ask_checks(bench_ops.__file__, args, "rms_norm", only, 1.0)


def test_checks_of_a_process_that_had_no_time_for_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The line of the checks came, that of the cases was cut; or all came, and the process had not ended."""
    cut = answer_of(monkeypatch, "", b'{"checks": [1]}\n{"checks": [1], "par', None)
    assert (cut["checks"], "lost" in cut) == ([1], False)
    assert [entry["row"] for entry in cut["late"]] == ["rms_norm: conformance cases"]
    assert answer_of(monkeypatch, "", b"", None).keys() == {"late"}
    whole = b'{"checks": [1]}\n{"checks": [1], "parity": [2]}\n'
    assert answer_of(monkeypatch, "", whole, None) == {"checks": [1], "parity": [2]}
    late = answer_of(monkeypatch, "triton", b"", None)
    assert [entry["row"] for entry in late["late"]] == ["rms_norm by triton: conformance cases"]


def test_checks_of_a_process_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    died = answer_of(monkeypatch, "", b'{"checks": [1]}\n', -11)
    assert died["checks"] == [1]
    assert "with -11" in died["lost"][0]["reason"]
    assert answer_of(monkeypatch, "calls", b"", 1)["lost"][0]["row"] == "rms_norm"
    assert "lost" not in answer_of(monkeypatch, "calls", b'{"checks": [1]}\n', 0)
    assert "lost" not in answer_of(monkeypatch, "triton", b'{"parity": [1]}\n', 0)


def test_the_processes_of_the_checks_do_everything_once() -> None:
    names = ["rms_norm", "beam_attention", "linear"]
    tasks = op_processes.check_tasks(names, "cpu")
    assert tasks[0][0] == "beam_attention"
    assert tasks[-2:] == [("rms_norm", ""), ("linear", "")]
    assert {what for name, what in tasks if name == "beam_attention"} == {"parts", "calls"}
    assert len(set(tasks)) == len(tasks)


def test_checks_of_real_processes() -> None:
    """Of a provider's cases; of one that is not there nothing."""
    args = argparse.Namespace(device="cpu", dtype="float32", items=1000)
    asked = (("rms_norm", "wrong name"), ("beam_attention", "parts"))
    with ThreadPoolExecutor(2) as pool:
        nothing, found = pool.map(
            lambda it: op_processes.ask_checks(bench_ops.__file__, args, it[0], it[1], 60.0), asked
        )
    assert nothing == {"parity": []}
    assert [(e["op"], e["provider"], e["failed"]) for e in found["parity"]] == [
        ("beam_attention", "parts", 0)
    ]


def test_no_device_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for tool in (bench_ops, bench_engine):
        assert tool.main(["--device", "cuda", "--commit", "abc"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_what_a_run_says_of_stages() -> None:
    def row(provider: str, median_ms: float, *, is_bound: bool) -> dict[str, object]:
        names = {"op": "beam_attention", "label": "x", "provider": provider}
        return {**names, "median_ms": median_ms, "is_bound": is_bound}

    rows = [row("triton", 1.0, is_bound=True), row("parts", 2.5, is_bound=False)]
    assert findings(rows)["staged_or_fused"] == [
        {"op": "beam_attention", "label": "x", "fused_ms": 1.0, "parts_ms": 2.5}
    ]
