"""Distributions of this checkout, and environments that hold one and nothing else of the checkout.

Built from a copy of what git has, so that the working tree stays clean. The environments link to the libraries that are
installed already (torch is too large to install anew for a test) but not to the checkout's editable installation.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_path("purelib"))
NOT_LINKED = ("xgr_runtime", "xgr_ops", "__editable__", "_virtualenv", "distutils-precedence")


def tracked_files() -> list[str]:
    """Every file that git has or would take, by its path from the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return sorted(name for name in done.stdout.split("\0") if name and (ROOT / name).is_file())


def copy_sources(folder: Path) -> None:
    """A copy of the checkout without its tests."""
    for name in tracked_files():
        if not name.startswith("tests/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def build(sources: Path, kind: str, out: Path) -> Path:
    """Build the "wheel" or "sdist" of a source tree with the setuptools that is installed; warnings are errors."""
    code = f"from setuptools import build_meta as b; print(b.build_{kind}({str(out)!r}))"
    done = run([sys.executable, "-W", "error", "-c", code], sources)
    return out / done.stdout.splitlines()[-1]


def unpack_sdist(sdist: Path, folder: Path) -> Path:
    """Unpack; returns the source tree."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


def make_environment(folder: Path, wheel: Path, without: Sequence[str] = ()) -> Path:
    """A virtual environment with the wheel and links to the installed libraries but `without`; returns its bin folder."""
    libraries = folder / "libraries"
    libraries.mkdir(parents=True)
    for path in SITE.iterdir():
        if not path.name.startswith((*NOT_LINKED, *without)):
            (libraries / path.name).symlink_to(path)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    site = run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder
    )
    (Path(site.stdout.strip()) / "libraries.pth").write_text(f"{libraries}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    run([*pip, "--quiet", "--no-deps", "--no-compile", str(wheel)], folder)
    return python.parent


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in a folder with nothing of this process's Python paths; the exit code must be 0."""
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def environment() -> dict[str, str]:
    """This process's environment without what would lead Python elsewhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
