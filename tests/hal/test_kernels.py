"""Kernels are noted instead of started by the thread that looks for them, and compiled side by side, each once."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import pytest

from xgr_runtime.hal import kernels
from xgr_runtime.hal.kernels import Compilation, is_noting, note, noting

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Named:
    """Counts how often it was made ready; `gate` holds it up, `error` is what it raises."""

    name: str
    times: list[str] = field(default_factory=list, compare=False)
    gate: threading.Event | None = field(default=None, compare=False)
    error: Exception | None = field(default=None, compare=False)

    def make_ready(self) -> None:
        if self.gate is not None:
            assert self.gate.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        self.times.append(self.name)


def test_only_the_thread_that_looks_notes_kernels() -> None:
    kernel, elsewhere = Named("a"), list[bool]()
    assert not note(kernel)
    with noting() as found:
        thread = threading.Thread(target=lambda: elsewhere.append(is_noting() or note(Named("b"))))
        thread.start()
        thread.join()
        assert is_noting()
        assert note(kernel)
        with noting() as inner:
            assert note(Named("c"))
        assert note(Named("a")), "an equal one is the same"
    assert not is_noting()
    assert elsewhere == [False]
    assert [kernel.name for kernel in found] == ["a"]
    assert [kernel.name for kernel in inner] == ["c"]


def test_all_are_compiled_once_and_counted() -> None:
    named = [Named(str(number)) for number in range(20)]
    compilation = Compilation(named)
    while not compilation.wait(0.01):
        pass
    assert [kernel.times for kernel in named] == [[kernel.name] for kernel in named]
    assert compilation.num_done == 20
    assert compilation.first_open is None
    assert set(compilation.seconds) == set(named)


def test_waiting_ends_in_time_and_names_what_is_open() -> None:
    gate = threading.Event()
    slow = Named("slow", gate=gate)
    compilation = Compilation([Named("first"), slow])
    end_s = time.monotonic() + TIMEOUT_S
    while compilation.num_done == 0:
        assert not compilation.wait(0.01)
        assert time.monotonic() < end_s
    assert not compilation.wait(0.05)
    assert compilation.first_open == slow
    gate.set()
    assert compilation.wait(TIMEOUT_S)


def test_kernels_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first waits for the second."""
    monkeypatch.setattr(kernels, "num_processors", lambda: 2)
    gate = threading.Event()

    class Opener(Named):
        def make_ready(self) -> None:
            gate.set()

    assert Compilation([Named("waits", gate=gate), Opener("opens")]).wait(TIMEOUT_S)


def test_the_error_of_a_kernel_is_raised_and_no_more_are_begun() -> None:
    gate = threading.Event()
    broken = Named("broken", error=ValueError("no such instruction"))
    rest = [Named(str(number), gate=gate) for number in range(100)]
    compilation = Compilation([broken, *rest])
    with pytest.raises(ValueError, match="no such instruction"):
        compilation.wait(TIMEOUT_S)
    assert compilation.failed == broken
    gate.set()
    compilation._pool.shutdown()
    assert sum(map(len, (kernel.times for kernel in rest))) < 100
