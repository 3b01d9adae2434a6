"""The environments of the rungs beside .venv, below one git-ignored folder, made once and kept while their stamp matches.

`npu` is a virtual environment that links to the libraries of .venv but those that triton-ascend and torch-npu cannot live with,
and has the runtime installed as .venv has; the others are folders of packages that go before .venv's on PYTHONPATH.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from tools._packaging import environments

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = Path(__file__).resolve().parent / "constraints-npu.txt"
NPU = "npu"
NOT_LINKED = ("numpy", "triton", "torch_npu")
NPU_PACKAGES = ("numpy", "torch-npu", "triton-ascend", "ascendnpu-ir", "pybind11")
# 3.9 is the newest; 3.6 is what torch 2.11 for CUDA brings. The interpreter of 3.6 fails with numpy 2.4.
OVERLAYS = {
    "triton-3.9": ("triton==3.9.0",),
    "triton-3.6": ("triton==3.6.0", 'numpy==2.3.5; python_version >= "3.11"'),
}
STAMP = "stamp"


@dataclass(frozen=True)
class Place:
    """Where a script of a rung runs: a Python, and what goes first on PYTHONPATH."""

    python: Path
    first: tuple[Path, ...] = ()

    def environment(self) -> dict[str, str]:
        """This process's environment with the checkout importable and none of its own Python paths."""
        path = os.pathsep.join(map(str, (*self.first, ROOT)))
        return {**environments.environment(), "PYTHONPATH": path}


MAIN = Place(Path(sys.executable))


class Environments:
    """The environments below a folder; each is made when it is first asked for. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()

    def place(self, name: str) -> Place:
        """Make the environment unless it is there. Raises RuntimeError with pip's output where it cannot be installed."""
        with self._lock:
            return self._npu() if name == NPU else self._overlay(name)

    def ready(self) -> list[Place]:
        """The overlays that have been made."""
        return [
            Place(MAIN.python, (self.folder / name,))
            for name in OVERLAYS
            if (self.folder / name / STAMP).is_file()
        ]

    def _npu(self) -> Place:
        folder = self.folder / NPU
        linked = sorted(environments.entries_without(*NOT_LINKED))
        pins = CONSTRAINTS.read_text(encoding="utf-8")
        stamp = "\n".join([sys.version, pins, *NPU_PACKAGES, *map(str, linked)])
        if _is_stale(folder, stamp):
            install = ["--constraint", str(CONSTRAINTS), *NPU_PACKAGES]
            commands = environments.make_environment(folder, linked, install)
            command = [str(commands / "python"), "-m", "pip", "install", "--quiet"]
            command += ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
            environments.run(command, folder)
            (folder / STAMP).write_text(stamp, encoding="utf-8")
        return Place(folder / "venv" / "bin" / "python")

    def _overlay(self, name: str) -> Place:
        folder = self.folder / name
        stamp = "\n".join([sys.version, *OVERLAYS[name]])
        if _is_stale(folder, stamp):
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            command += ["--no-compile", "--target", str(folder), *OVERLAYS[name]]
            environments.run(command, self.folder)
            (folder / STAMP).write_text(stamp, encoding="utf-8")
        return Place(MAIN.python, (folder,))


def _is_stale(folder: Path, stamp: str) -> bool:
    """Whether an environment has to be made anew; removes what is there then."""
    path = folder / STAMP
    if path.is_file() and path.read_text(encoding="utf-8") == stamp:
        return False
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return True
