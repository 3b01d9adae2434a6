"""Virtual environments that hold a wheel of the runtime and nothing of the checkout.

torch is too large to be installed for every trial, so libraries of the current environment are linked to. They lie in a
folder of their own, outside the new environment: pip counts them as installed but never replaces or removes them.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sysconfig
import venv
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# The runtime itself, and what setuptools keeps for editable installations.
NOT_LINKED = ("xgr_runtime", "xgr_ops", "__editable__", "distutils-precedence")


def entries_without(*names: str) -> list[Path]:
    """Everything in the current site-packages but the runtime and what begins with a name."""
    site = Path(sysconfig.get_path("purelib"))
    return [path for path in site.iterdir() if not path.name.startswith((*NOT_LINKED, *names))]


def entries_of(*names: str) -> list[Path]:
    """What distributions of the current environment, and those that they need, have in site-packages."""
    waiting, seen, entries = list(names), set(), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            if file.parts[0] != "..":
                entries.add(Path(str(distribution.locate_file(file.parts[0]))))
        for text in distribution.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return sorted(entries)


def make_environment(folder: Path, entries: Iterable[Path], install: Sequence[str]) -> Path:
    """An environment with links to `entries`, one of them pip, which installs the rest; returns its bin folder."""
    libraries = folder / "libraries"
    libraries.mkdir(parents=True)
    for path in entries:
        (libraries / path.name).symlink_to(path)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    site = run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder
    )
    (Path(site.stdout.strip()) / "libraries.pth").write_text(f"{libraries}\n", encoding="utf-8")
    run([str(python), "-m", "pip", "install", "--quiet", "--no-compile", *install], folder)
    return python.parent


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run in a folder with nothing of this process's Python paths. Raises RuntimeError with the output on failure."""
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def environment() -> dict[str, str]:
    """This process's environment without what would lead Python elsewhere or pytest to other tests."""
    foreign = ("PYTHON", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
