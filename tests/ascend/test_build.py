"""The fake NPU's library is built once, however many processes want it, and a failing compiler is named."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from tests.ascend import backend
from tests.conftest import install_fake_npu

if TYPE_CHECKING:
    from pathlib import Path

SLOW_COMPILER = """#!/bin/sh
echo run >> "$LOG"
sleep 0.3
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(backend, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_one_build_for_all(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("LOG", str(log))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(backend.library())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert found[0].read_text() == "library\n"
    assert log.read_text() == "run\n"
    assert sorted(path.name for path in cache.iterdir()) == sorted([found[0].name, "lock"])


def test_another_source_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    sources = tmp_path / "csrc"
    sources.mkdir()
    monkeypatch.setattr(backend, "SOURCES", sources)
    monkeypatch.setattr(backend, "_compile", lambda compiler, target: target.touch())
    names = set()
    for text in ("one", "two", "one"):
        (sources / "backend.cpp").write_text(text)
        names.add(backend.library())
    assert len(names) == 2


@pytest.mark.parametrize(
    ("compiler", "words"),
    [("false", "false .* ended with 1"), ("no-such-compiler", "needs a C.. compiler: ")],
)
def test_a_build_that_fails(
    cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, words: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(backend.BuildFailed, match=words):
        backend.library()
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_the_option_is_for_an_npu() -> None:
    with pytest.raises(pytest.UsageError, match="needs --device npu, got cpu"):
        install_fake_npu("cpu")


def test_never_beside_torch_npu() -> None:
    code = (
        "import sys; sys.modules['torch_npu'] = None\n"
        "from tests.ascend import backend\n"
        "try: backend.install()\n"
        "except backend.BuildFailed as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert run.stdout == ("torch_npu is loaded; the fake device cannot share a process with it\n")
