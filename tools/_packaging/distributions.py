"""Distributions of this checkout, built from a copy of what git has, so that the working tree stays clean."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from tools._packaging.environments import run

ROOT = Path(__file__).resolve().parents[2]


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


def build_wheel(folder: Path) -> Path:
    """Build the wheel of the checkout in an existing folder."""
    sources, out = folder / "sources", folder / "wheel"
    out.mkdir()
    copy_sources(sources)
    return build(sources, "wheel", out)


def unpack_sdist(sdist: Path, folder: Path) -> Path:
    """Unpack; returns the source tree."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


def requirements(wheel: Path) -> list[Requirement]:
    """`project.dependencies` of pyproject.toml as a wheel has them; those of the extras are left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    found = [Requirement(text) for text in metadata.get_all("Requires-Dist", ())]
    return [r for r in found if "extra ==" not in str(r.marker)]
