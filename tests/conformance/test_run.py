"""`xgr conformance` as a command: the report, the table, exit codes, and that nothing computed is lost."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance.providers import provided
from tests.conformance.test_parity_check import LostCpu
from xgr_runtime import __version__
from xgr_runtime.cli import main
from xgr_runtime.conformance import run as runs
from xgr_runtime.conformance.report import Report, ReportError, ReportFile
from xgr_runtime.conformance.vectors import load_vectors
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.discovery import DEVICE_CHOICES
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import all_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from xgr_runtime.hal.device import Device

OPS = "rms_norm,silu_mul"
KINDS = ", ".join(DEVICE_CHOICES)


@pytest.fixture
def parity_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the engines, which take seconds."""
    monkeypatch.setattr(runs, "all_parts", lambda device, report, _: runs.parity_parts(device, report))  # fmt: skip


@pytest.fixture
def references_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops of OPS have no CPU providers but those that a test gives them."""
    load_providers("cpu")
    for op in (all_ops()[name] for name in OPS.split(",")):
        monkeypatch.setattr(op, "impls", [i for i in op.impls if i.device_kind != "cpu"])


def conformance(
    capsys: pytest.CaptureFixture[str], *arguments: str, device: str = "cpu"
) -> tuple[int, str, str]:
    code = main(["conformance", "--device", device, *arguments])
    output = capsys.readouterr()
    return code, output.out, output.err


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.e2e
def test_a_whole_run(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    code, out, _ = conformance(capsys, "--json", str(target), "--ops", OPS, device=device.kind)
    report = read(target)
    assert (code, report["result"]) == (0, "passed"), out
    assert report["schema"] == 1
    assert report["xgr_version"] == __version__
    assert report["device"]["kind"] == device.kind
    assert report["environment"]["packages"]["torch"]
    assert (report["in_progress"], report["stopped"], report["never_ran"]) == ("", "", [])
    pairs = {(entry["op"], entry["dtype"]) for entry in report["parity"]}
    dtypes = ("float32", "float16", "bfloat16")
    assert pairs == {(op, dtype) for op in OPS.split(",") for dtype in dtypes}
    bound = sum(e["bound_by_default"] for e in report["parity"] if e["op"] == "silu_mul")
    assert bound == 12
    ran = {(e["check"], e["dtype"]) for e in report["engines"] if e["checked"]}
    assert ran == {(check, dtype) for check in ("searches", "decoder") for dtype in dtypes}
    assert all(e["failed"] == 0 for e in report["engines"])
    assert all(e["providers"].keys() == all_ops().keys() for e in report["engines"] if e["checked"])
    assert out.splitlines()[-1].startswith("result: passed (")
    assert sum(line.startswith(("rms_norm", "silu_mul")) for line in out.splitlines()) == len(
        report["parity"]
    )
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.usefixtures("parity_alone", "references_alone")
def test_a_wrong_provider_fails_the_run_and_the_rest_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.json"
    with provided("rms_norm", lambda reference: lambda **args: reference(**args) * 2):
        code, out, _ = conformance(capsys, "--json", str(target), "--ops", OPS)
    report = read(target)
    assert (code, report["result"]) == (1, "failed")
    results = {(e["op"], e["provider"]): e["result"] for e in report["parity"]}
    assert results == {
        ("rms_norm", "reference"): "passed",
        ("rms_norm", "temporary"): "failed",
        ("silu_mul", "reference"): "passed",
    }
    assert "Tensor-likes are not close" in out
    assert out.splitlines()[-1].startswith("result: failed (")


def test_a_wrong_vector_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = load_vectors()
    first = dataclasses.replace(vectors.vectors[0], item_ids=(1,))
    wrong = dataclasses.replace(vectors, vectors=(first,))

    def parts(device: Device, report: Report, folder: Path) -> Iterator[runs.Part]:
        yield next(runs.search_parts(device, report, wrong, folder))

    monkeypatch.setattr(runs, "all_parts", parts)
    code, out, _ = conformance(capsys, "--json", str(tmp_path / "r.json"))
    (entry,) = read(tmp_path / "r.json")["engines"]
    assert (code, entry["result"], entry["failed"]) == (1, "failed", 3)
    assert entry["failures"][0]["what"] == f"{first.name}, alone"
    assert entry["failures"][0]["first_difference"].startswith("items: expected [1], got [")
    assert entry["failures"][0]["first_difference"] in out


def lose(device: LostCpu) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(reference: Callable[..., Any]) -> Callable[..., Any]:
        def fatal(**args: Any) -> Any:
            device.is_lost = True
            raise RuntimeError("stream 3 was aborted")

        return fatal

    return make


@pytest.mark.usefixtures("references_alone")
def test_a_lost_device_ends_the_run_with_everything_before() -> None:
    device, saved, lines = LostCpu(), list[dict[str, Any]](), list[str]()
    report = runs.new_report(device, OPS.split(","), {}, allow_reference=False)
    with provided("rms_norm", lose(device)):
        parts = runs.parity_parts(device, report)
        runs.run(device, report, parts, save=lambda r: saved.append(r.to_dict()), say=lines.append)
    last = saved[-1]
    assert last["result"] == "failed"
    assert "device error 507018" in last["stopped"]
    assert last["in_progress"] == "rms_norm, temporary, float32"
    assert [(e["provider"], e["result"]) for e in last["parity"]] == [
        *[("reference", "passed")] * 3,
        ("temporary", "failed"),
    ]
    assert any("stopped early" in line for line in report.summary())


def test_an_interrupted_run_is_saved_and_incomplete() -> None:
    def parts(device: Device, report: Report) -> Iterator[runs.Part]:
        found = runs.parity_parts(device, report)
        yield next(found)
        raise KeyboardInterrupt

    device, saved = CpuDevice(), list[dict[str, Any]]()
    report = runs.new_report(device, ["rms_norm"], {}, allow_reference=False)
    with pytest.raises(KeyboardInterrupt):
        runs.run(device, report, parts(device, report), save=lambda r: saved.append(r.to_dict()))
    assert saved[-1]["result"] == "incomplete"
    assert [e["op"] for e in saved[-1]["parity"]] == ["rms_norm"]


@pytest.mark.usefixtures("references_alone")
def test_the_report_names_a_part_before_it_runs() -> None:
    device, named = CpuDevice(), list[tuple[str, int]]()
    report = runs.new_report(device, ["rms_norm"], {}, allow_reference=False)
    parts = runs.parity_parts(device, report)
    runs.run(device, report, parts, save=lambda r: named.append((r.in_progress, len(r.parity))))
    dtypes = ("float32", "float16", "bfloat16")
    assert named == [(f"rms_norm, reference, {d}", n) for n, d in enumerate(dtypes)] + [("", 3)]


@pytest.mark.usefixtures("parity_alone")
def test_a_file_that_cannot_be_written_later_is_told_behind_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, num_writes = ReportFile.write, 0

    def full(self: ReportFile, report: Report) -> None:
        nonlocal num_writes
        num_writes += 1
        if num_writes > 2:
            raise ReportError("no space left on device")
        write(self, report)

    monkeypatch.setattr(ReportFile, "write", full)
    code, out, err = conformance(capsys, "--json", str(tmp_path / "r.json"), "--ops", OPS)
    assert code == 2
    assert "result: passed (" in out
    assert err == "xgr: ReportError: no space left on device\n"
    assert read(tmp_path / "r.json")["result"] == "incomplete"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "cpu", "--ops", "rms_norm,softmax"], "ConfigError: unknown op softmax; known: add_rms_norm, "),
        (["--device", "tpu"], f"DeviceError: device must be one of {KINDS}, got 'tpu'"),
        (["--device", "cpu", "--json", "{folder}"], "ReportError: cannot write the report to {folder}: it is a directory"),
        (["--device", "cpu", "--json", "{folder}/no/r.json"], "ReportError: cannot write the report to {folder}/no/r.json: No such file"),
        (["--device", "cpu", "--json", os.devnull], "it is a character device"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_one_named_error(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path)
    assert main(["conformance", *(a.replace("{folder}", folder) for a in arguments)]) == 2
    output = capsys.readouterr()
    assert text.replace("{folder}", folder) in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.device("cpu")
def test_a_device_that_is_absent_is_a_named_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = conformance(capsys, device="npu")
    assert (code, out) == (2, "")
    assert err.startswith("xgr: DeviceError: device 'npu' was asked for but is not usable here: ")


@pytest.mark.device("cpu")
def test_a_run_that_cannot_start_leaves_no_earlier_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    file.write_text('{"result": "passed"}')
    assert main(["conformance", "--device", "npu", "--json", str(file)]) == 2
    report = json.loads(file.read_text())
    assert report["result"] == "not started"
    assert report["device"] == "npu"
    assert "not usable here" in report["stopped"]
    assert main(["conformance", "--device", "cpu", "--json", ""]) == 2
    assert "cannot write the report" in capsys.readouterr().err


def test_the_device_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["conformance"])
    assert stopped.value.code == 2
    assert "--device" in capsys.readouterr().err
