"""`xgr doctor` as a command: versions, devices, one row per op and device, and a reason for every refusal."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.helpers.product import ReferenceCpu
from xgr_runtime import doctor
from xgr_runtime.cli import main
from xgr_runtime.doctor import NOT_FOUND, NOT_INSTALLED, PACKAGES
from xgr_runtime.errors import DeviceError
from xgr_runtime.hal import ascend_probe, providers
from xgr_runtime.hal.discovery import DEVICE_KINDS, DeviceKind, open_device
from xgr_runtime.hal.registry import PARTS, REFERENCE, Impl, OpSpec, all_ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xgr_runtime.hal.device import Device

ROOT = Path(__file__).resolve().parents[1]
KINDS = tuple(DEVICE_KINDS)


def usable_devices() -> dict[str, Device]:
    devices = {}
    for kind in KINDS:
        try:
            devices[kind] = open_device(kind).device
        except DeviceError:
            continue
    return devices


def doctor_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["doctor", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def rows_of(report: Any, kind: str) -> dict[str, Any]:
    rows = [row for row in report["ops"] if row["device"] == kind]
    by_name = {row["op"]: row for row in rows}
    assert len(by_name) == len(rows), "one row per op and device"
    return by_name


def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "xgr_runtime.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_prints_the_same_as_a_table_and_as_json() -> None:
    """Both read from outside: every fact of the JSON object stands in the table."""
    with ThreadPoolExecutor(2) as pool:
        as_json, as_table = pool.map(run, (["doctor", "--json"], ["doctor"]))
    assert (as_json.returncode, as_json.stderr) == (0, "")
    assert (as_table.returncode, as_table.stderr) == (0, "")
    report, lines = json.loads(as_json.stdout), as_table.stdout.splitlines()
    words = [tuple(line.split()) for line in lines]
    assert lines[0] == f"python {report['python']} on {report['platform']}"
    for name, version in report["packages"].items():
        assert (name, *version.split()) in words
    for name, version in report["libraries"].items():
        assert (*name.split(), *version.split()) in words
    for device in report["devices"]:
        said = f"{device['name']} {device['capability']}" if device["is_usable"] else "not usable:"
        (line,) = (line for line in lines if line.split()[0] == device["kind"])
        assert line.split()[1:][: len(said.split())] == said.split()
        assert device["reason"] in line
    for row in report["ops"]:
        assert (row["op"], row["device"], row["dtype"], row["provider"] or "NONE") in words
    pairs = [(row["op"], row["device"]) for row in report["ops"]]
    rows = [line for line in lines if tuple(line.split()[:2]) in pairs]
    assert len({line.index(f" {line.split()[1]} ") for line in rows}) == 1, "a column of devices"
    num_rows = 3 + sum(len(report[part]) for part in ("packages", "libraries", "devices", "ops"))
    assert len(lines) == num_rows + sum(len(row["refusals"]) for row in report["ops"])


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    report = doctor_json(capsys)
    assert report["python"] == platform.python_version()
    assert tuple(report["packages"]) == PACKAGES
    installed: dict[str, importlib.metadata.Distribution] = {}
    for dist in importlib.metadata.distributions():
        installed.setdefault(dist.metadata["Name"].lower(), dist)  # the first on the path counts
    for name, version in report["packages"].items():
        if name == "torch":
            continue
        expected = installed[name].version if name in installed else NOT_INSTALLED
        assert version == expected
    assert report["packages"]["torch"] == torch.__version__


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    report, usable = doctor_json(capsys), usable_devices()
    assert [device["kind"] for device in report["devices"]] == list(KINDS)
    for device in report["devices"]:
        assert device["is_usable"] == (device["kind"] in usable)
        if device["is_usable"]:
            assert (device["name"], device["reason"]) == (usable[device["kind"]].name, "")
        else:
            assert device["reason"] == DEVICE_KINDS[device["kind"]].why_absent()
    assert {row["device"] for row in report["ops"]} == set(usable)
    assert "cpu" in usable


def test_ops_are_those_of_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    """The provider is the first of the device's that accepts; on the CPU the parts or the reference are always left."""
    rows, ops = rows_of(doctor_json(capsys), "cpu"), all_ops()
    assert set(rows) == set(ops)
    for name, row in rows.items():
        spec = OpSpec("cpu", torch.float32)
        own = [
            impl.provider
            for impl in ops[name].impls
            if impl.device_kind == "cpu" and impl.accepts(spec) is None
        ]
        assert row["dtype"] == "float32"
        fallback = REFERENCE if ops[name].run_by_parts is None else PARTS
        assert row["provider"] == (own[0] if own else fallback)
    assert {"select_beams", "shared_attention"} <= {
        name for name, row in rows.items() if row["provider"] != REFERENCE
    }


def test_a_provider_that_refuses_is_named_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    op = all_ops()["silu_mul"]

    def refuse(spec: OpSpec) -> str | None:
        return f"takes no {spec.dtype} on Tuesdays"

    picky = Impl("picky", "cpu", op.reference, refuse)
    elsewhere = Impl("elsewhere", "npu", op.reference, lambda spec: None)
    monkeypatch.setattr(op, "impls", [picky, elsewhere])
    row = rows_of(doctor_json(capsys), "cpu")["silu_mul"]
    expected = ["picky: takes no torch.float32 on Tuesdays", "elsewhere: is for npu, not cpu"]
    assert row["refusals"] == expected
    assert row["provider"] == REFERENCE
    assert main(["doctor"]) == 0
    table = capsys.readouterr().out.splitlines()
    place = next(i for i, line in enumerate(table) if line.split()[:2] == ["silu_mul", "cpu"])
    assert [line.strip() for line in table[place + 1 : place + 3]] == [
        f"refused: {reason}" for reason in expected
    ]


def test_a_module_that_cannot_be_loaded_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every op of the JSON object holds it; the table says it once, after the last op."""
    modules = (*providers.PROVIDER_MODULES["cpu"], "no_such_package.kernels")
    monkeypatch.setitem(providers.PROVIDER_MODULES, "cpu", modules)
    op = all_ops()["silu_mul"]
    monkeypatch.setattr(op, "impls", [Impl("picky", "cpu", op.reference, lambda spec: "is shut")])
    providers.load_providers.cache_clear()
    expected = "no_such_package.kernels: could not be imported: No module named 'no_such_package'"
    try:
        report = doctor_json(capsys, "--device", "cpu")
        assert main(["doctor", "--device", "cpu"]) == 0
    finally:
        providers.load_providers.cache_clear()
    assert {row["refusals"][0] for row in report["ops"]} == {expected}
    others = [reason for row in report["ops"] for reason in row["refusals"][1:]]
    # providers of other kinds are there too where other tests have loaded them
    assert [reason for reason in others if not reason.endswith(", not cpu")] == ["picky: is shut"]
    table = capsys.readouterr().out.splitlines()
    assert [line for line in table if "no_such_package" in line] == table[-1:]
    assert table[-1] == f"  cpu    {expected}"
    said = [line.strip() for line in table if line.startswith("      refused: ")]
    assert said == [f"refused: {reason}" for reason in others]


def test_an_accelerator_without_providers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No op is bound and each says how to accept the reference; with --allow-reference all are. A fused op names the parts
    that it lacks; one of plain torch functions lacks none."""
    monkeypatch.setattr(
        doctor, "DEVICE_KINDS", {"reference": DeviceKind(lambda: None, ReferenceCpu)}
    )
    rows = rows_of(doctor_json(capsys), "reference")
    assert set(rows) == set(all_ops())
    plain = {"head_logits", "linear"}
    assert {rows.pop(name)["provider"] for name in plain} == {PARTS}
    for name, row in rows.items():
        assert row["provider"] == ""
        *others, last = row["refusals"]
        assert last == (
            "reference: is not allowed on reference; set ops.allow_reference: true to accept it"
        )
        parts = [part.name for part in all_ops()[name].parts if part.name not in plain]
        if parts:
            assert others.pop() == f"parts: no provider of {', '.join(parts)}"
        assert len(others) == len(all_ops()[name].impls)
        assert all(re.fullmatch(r"[\w-]+: is for \w+, not reference", reason) for reason in others)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.count(" NONE\n") == len(rows)
    allowed = rows_of(doctor_json(capsys, "--allow-reference"), "reference")
    for name, row in allowed.items():
        assert row["provider"] == (REFERENCE if all_ops()[name].run_by_parts is None else PARTS)


def test_a_device_that_is_named_must_be_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is printed whole; then one line and exit code 2, as for `xgr serve --device`."""
    absent = DeviceKind(lambda: "the card is at the cleaner's", ReferenceCpu)
    monkeypatch.setattr(doctor, "DEVICE_KINDS", {**DEVICE_KINDS, "npu": absent})
    assert main(["doctor", "--device", "npu"]) == 2
    out, err = capsys.readouterr()
    assert out.endswith("\ndevices\n  npu    not usable: the card is at the cleaner's\n")
    assert (
        err == "xgr: DeviceError: device 'npu' is not usable here: the card is at the cleaner's\n"
    )
    assert main(["doctor"]) == 0


def test_one_device_in_one_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    report = doctor_json(capsys, "--device", "cpu", "--dtype", "bfloat16")
    assert [device["kind"] for device in report["devices"]] == ["cpu"]
    assert {(row["device"], row["dtype"]) for row in report["ops"]} == {("cpu", "bfloat16")}


def test_a_kind_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "tpu"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"xgr: DeviceError: device must be one of {', '.join(KINDS)}, got 'tpu'\n")  # fmt: skip


def test_versions_of_a_vendors_libraries_are_asked_of_the_kinds_that_are_examined(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"driver": "7.1", "compiler": ""}
    card = DeviceKind(lambda: "it is away", ReferenceCpu, lambda: found)
    cpu = DEVICE_KINDS["cpu"]
    monkeypatch.setattr(doctor, "DEVICE_KINDS", {"card": card, "cpu": cpu})
    expected = {"driver": "7.1", "compiler": NOT_FOUND}
    assert doctor_json(capsys)["libraries"] == expected
    assert doctor_json(capsys, "--device", "cpu")["libraries"] == {}
    assert main(["doctor", "--device", "card"]) == 2
    assert f"  {'compiler':<14} {NOT_FOUND}\n" in capsys.readouterr().out


@pytest.mark.parametrize("is_torch_npu_installed", [False, True])
def test_versions_of_cann_and_driver(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    is_torch_npu_installed: bool,
) -> None:
    """As CANN's installer leaves them; the folder is what its set_env.sh exports. Without any sign of an NPU: nothing."""
    monkeypatch.setattr(
        ascend_probe, "_npu_version", lambda: "2.13.0" if is_torch_npu_installed else ""
    )
    monkeypatch.setattr(ascend_probe, "ASCEND_FOLDER", tmp_path / "driver's")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    absent = {"CANN": NOT_FOUND, "Ascend driver": NOT_FOUND} if is_torch_npu_installed else {}
    assert doctor_json(capsys)["libraries"] == absent
    info = tmp_path / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir()
    info.write_text("package_name=Ascend-cann-toolkit\nversion=9.1.0\ninnerversion=V100R001\n")
    assert doctor_json(capsys)["libraries"] == {"CANN": "9.1.0", "Ascend driver": NOT_FOUND}
    assert doctor_json(capsys, "--device", "cpu")["libraries"] == {}
