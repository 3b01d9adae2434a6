"""Is there an aarch64 wheel of everything the runtime needs? Asks the package index through pip; needs the network.

Ascend hosts are usually aarch64, and building grpcio or numpy there takes a compiler and an hour. The dependencies are read from
pyproject.toml; each is downloaded as a wheel alone, for every supported Python and the glibc of the distributions in use, and a
missing one fails the run. torch and torch-npu are left out: their vendors' instructions say how they are installed there.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools._packaging import distributions  # noqa: E402

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# All are asked at once, as pip on a host of glibc 2.28 or newer does: one wheel that fits any of them is enough.
PLATFORMS = tuple(
    f"{name}_aarch64"
    for name in ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
)
VENDORS = ("torch", "torch-npu")
AT_ONCE = 4
NOT_NEEDED = "not needed"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="REQUIREMENT",
        help="a dependency beside those of pyproject.toml; may be repeated",
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="xgr-wheels-") as folder:
        declared = distributions.requirements(distributions.build_wheel(Path(folder)))
    requirements = [r for r in declared if r.name not in VENDORS]
    requirements += [Requirement(text) for text in args.also]
    pairs = list(itertools.product(requirements, PYTHONS))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda pair: wheel_for(*pair), pairs))
    found = {(r.name, python): answer for (r, python), answer in zip(pairs, answers, strict=True)}
    print_table([r.name for r in requirements], found)
    missing = [pair for pair, answer in found.items() if brief(answer) == "MISSING"]
    for name, python in missing:
        print(f"no wheel of {name} for Python {python}: {found[name, python]}")
    print(f"{len(found) - len(missing)} of {len(found)} found on {', '.join(PLATFORMS)}")
    return 1 if missing else 0


def wheel_for(requirement: Requirement, python: str) -> str:
    """The file name of the wheel that pip finds, or pip's last line when it finds none."""
    host = {"python_version": python, "platform_machine": "aarch64", "sys_platform": "linux"}
    if requirement.marker and not requirement.marker.evaluate(host):
        return NOT_NEEDED
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    with tempfile.TemporaryDirectory(prefix="xgr-wheels-") as folder:
        target = [f"--dest={folder}", f"{requirement.name}{requirement.specifier}"]
        done = subprocess.run([*command, *target], capture_output=True, text=True, check=False)
        files = [path.name for path in Path(folder).iterdir()]
    lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
    return files[0] if done.returncode == 0 and len(files) == 1 else lines[-1]


def print_table(names: Sequence[str], found: dict[tuple[str, str], str]) -> None:
    """A row per dependency: for each Python the version and the platform of its wheel."""
    rows = [("aarch64 wheels", [f"Python {python}" for python in PYTHONS])]
    rows += [(name, [brief(found[name, python]) for python in PYTHONS]) for name in names]
    for name, cells in rows:
        print(f"{name:<26}{''.join(f'{cell:<30}' for cell in cells)}".rstrip())


def brief(answer: str) -> str:
    """Version and first platform of a wheel's file name: name-version[-build]-python-abi-platform.whl."""
    if answer == NOT_NEEDED:
        return answer
    if not answer.endswith(".whl"):
        return "MISSING"
    parts = answer.removesuffix(".whl").split("-")
    return f"{parts[1]} {parts[-1].split('.')[0]}"


if __name__ == "__main__":
    sys.exit(main())
