"""Every kernel of the list is compiled before the first capture, once, and a start shows how far that is."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.engines import make_engine
from tests.helpers.strict_device import StrictDevice
from tests.helpers.versions import Versions, ask, assert_is_version
from tests.xschedule.running import TIMEOUT_S
from tests.xschedule.test_warm_up import version_config
from xgr_runtime.xschedule import kernel_search, progress

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from xgr_runtime.hal.device import Kernel


@dataclass(frozen=True)
class Counted:
    name: str
    device: CompilingDevice = field(compare=False, repr=False)

    def make_ready(self) -> None:
        self.device.is_asked_to_compile.set()
        assert self.device.may_compile.wait(TIMEOUT_S)
        if self.name == self.device.broken:
            raise RuntimeError(f"{self.name} needs more registers than there are")
        with self.device.lock:
            self.device.events.append(("compiled", self.name))


class CompilingDevice(StrictDevice):
    """Every segment needs a kernel of its own and one that all share. `events` tells what happened in which order."""

    is_compiling = True

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self.may_compile = threading.Event()
        self.may_compile.set()
        self.is_asked_to_compile = threading.Event()
        self.broken = ""
        self.search_error: Exception | None = None

    def missing_kernels(self, name: str, fn: Callable[[], object]) -> list[Kernel]:
        if self.search_error is not None:
            raise self.search_error
        self.events.append(("searched", name))
        number = sum(what == "searched" for what, _ in self.events)
        compiled = {name for what, name in self.events if what == "compiled"}
        kernels = [Counted("shared", self), Counted(f"of segment {number}", self)]
        return [kernel for kernel in kernels if kernel.name not in compiled]

    def capture(self, name: str, fn: Callable[[], object]) -> Any:
        self.events.append(("captured", name))
        return super().capture(name, fn)


def of_kind(device: CompilingDevice, what: str) -> list[str]:
    return [name for kind, name in device.events if kind == what]


def test_all_kernels_are_compiled_once_before_the_first_capture(
    versions_model: Path,
    versions: Versions,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_search, "STEP_S", 0.001)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    device = CompilingDevice()
    caplog.set_level(logging.INFO, "xgr_runtime")
    with make_engine(version_config(versions_model, versions), device) as engine:
        kinds = [kind for kind, _ in device.events]
        num_graphs = engine.worker.graphs.num_graphs
        assert kinds == sorted(kinds, key=["searched", "compiled", "captured"].index)
        # the normalisations that get no graphs are searched too
        assert kinds.count("searched") > num_graphs == kinds.count("captured")
        compiled = of_kind(device, "compiled")
        assert sorted(compiled) == sorted(
            ["shared", *(f"of segment {i + 1}" for i in range(kinds.count("searched")))]
        )
        assert_is_version(ask(engine), 1, versions)
        num_events = len(device.events)
        engine.load_catalog("main", versions.path(2))
        later = device.events[num_events:]
        assert [kind for kind, _ in later if kind == "compiled"]
        assert ("compiled", "shared") not in later, "nothing is compiled twice"
    lines = caplog.messages
    assert any(line.startswith("finding kernels: ") for line in lines)
    assert any(f"of {len(compiled)}," in line for line in lines if "compiling kernels" in line)
    (summary, _) = [line for line in lines if "kernels are compiled:" in line]
    assert summary.startswith(f"{len(compiled)} kernels are compiled: ")


def test_a_kernel_that_fails_ends_the_start_by_its_name(
    versions_model: Path, versions: Versions, caplog: pytest.LogCaptureFixture
) -> None:
    device = CompilingDevice()
    device.broken = "of segment 2"
    engine = make_engine(version_config(versions_model, versions), device)
    with pytest.raises(RuntimeError, match="of segment 2 needs more registers"):
        engine.start()
    assert "kernel of segment 2 failed to compile" in caplog.messages
    assert not of_kind(device, "captured")


def test_what_cannot_be_searched_is_captured_all_the_same(
    versions_model: Path, versions: Versions, caplog: pytest.LogCaptureFixture
) -> None:
    device = CompilingDevice()
    device.search_error = RuntimeError("no room for a graph")
    with make_engine(version_config(versions_model, versions), device) as engine:
        assert_is_version(ask(engine), 1, versions)
        assert engine.worker.graphs.num_graphs == len(of_kind(device, "captured")) > 0
    (warning,) = [line for line in caplog.messages if "one after the other" in line]
    assert "no room for a graph" in warning


def test_a_load_whose_kernels_failed_finds_them_again(
    versions_model: Path, versions: Versions, caplog: pytest.LogCaptureFixture
) -> None:
    """When the version is activated, which makes up for the captures; else those would compile them one by one."""
    device = CompilingDevice()
    with make_engine(version_config(versions_model, versions), device) as engine:
        number = len(of_kind(device, "searched"))
        device.broken = f"of segment {number + 1}"
        engine.load_catalog("main", versions.path(2))
        assert "catalogue main: version v2 lacks graphs" in caplog.messages
        failed = of_kind(device, "searched")[number:]
        device.broken = ""
        num_events = len(device.events)
        engine.activate_catalog("main", "v2")
        again = device.events[num_events:]
        assert_is_version(ask(engine), 2, versions)
    kinds = [kind for kind, _ in again]
    assert [name for kind, name in again if kind == "searched"] == failed
    assert kinds == sorted(kinds, key=["searched", "compiled", "captured"].index)


def test_batches_run_while_kernels_of_a_load_are_compiled(
    versions_model: Path, versions: Versions
) -> None:
    device = CompilingDevice()
    with make_engine(version_config(versions_model, versions), device) as engine:
        device.may_compile.clear()
        device.is_asked_to_compile.clear()
        load = threading.Thread(target=engine.load_catalog, args=("main", versions.path(2)))
        load.start()
        assert device.is_asked_to_compile.wait(TIMEOUT_S)
        for _ in range(3):
            assert_is_version(ask(engine), 1, versions)
        assert load.is_alive()
        device.may_compile.set()
        load.join(TIMEOUT_S)
        assert not load.is_alive()
        engine.activate_catalog("main", "v2")
        assert_is_version(ask(engine), 2, versions)
