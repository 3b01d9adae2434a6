"""Serve and ask at both ends of the protobuf and gRPC versions that pyproject.toml allows, with warnings as errors.

For each end an environment of its own, in which pip resolves the wheel's requirements (it refuses versions that do not fit
together); only torch and numpy are those of the current environment. Needs the network.

  newest      what constraints.txt pins
  protobuf 5  the last protobuf 5 with the last gRPC libraries that take it
  lowest      the lowest version of every requirement, as declared
"""

import argparse
import importlib.metadata
import sys
import tempfile
import time
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools._packaging import distributions, environments  # noqa: E402
from tools._packaging.service import free_port, serving  # noqa: E402

GIVEN = ("torch", "numpy")
GRPC = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status")
PROTOBUF_5 = ["protobuf>=5.29,<6", *(f"{name}==1.71.2" for name in GRPC)]
EXERCISE = ROOT / "tools" / "_packaging" / "exercise.py"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--end", choices=["newest", "protobuf-5", "lowest"], help="one end alone")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="xgr-range-") as name:
        folder = Path(name)
        wheel = distributions.build_wheel(folder)
        ends = {
            "newest": newest(),
            "protobuf-5": PROTOBUF_5,
            "lowest": lowest(distributions.requirements(wheel)),
        }
        failed = [
            end
            for end in ends
            if args.end in (None, end) and not holds(folder, wheel, end, ends[end])
        ]
    print(f"failed: {', '.join(failed)}" if failed else "every end serves")
    return 1 if failed else 0


def newest() -> list[str]:
    """The pins of constraints.txt, without those of the libraries that are given."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [str(pin) for pin in pins if pin.name not in GIVEN]


def lowest(requirements: list[Requirement]) -> list[str]:
    """Every requirement at the lowest version that it names; grpcio-status is the tests' own and goes with grpcio."""
    pins = {}
    for requirement in requirements:
        (version,) = [s.version for s in requirement.specifier if s.operator == ">="]
        pins[requirement.name] = version
    pins["grpcio-status"] = pins["grpcio"]
    return [f"{name}=={version}" for name, version in pins.items() if name not in GIVEN]


def holds(folder: Path, wheel: Path, end: str, pins: list[str]) -> bool:
    """Whether the wheel installs, serves and answers under the pins; prints what was seen."""
    start_s = time.monotonic()
    print(f"== {end}", flush=True)
    pins = [*pins, *(f"{name}=={importlib.metadata.version(name)}" for name in GIVEN)]
    constraints = folder / f"{end}.txt"
    constraints.write_text("\n".join(pins) + "\n", encoding="utf-8")
    install = ["--constraint", str(constraints), str(wheel), "grpcio-status"]
    try:
        entries = environments.entries_of(*GIVEN, "pip")
        commands = environments.make_environment(folder / end, entries, install)
        port = free_port()
        setting = f"service.metrics_port={port}"
        with serving(commands, folder / end, ["-W", "error"], [setting]) as target:
            metrics = f"http://127.0.0.1:{port}/metrics"
            command = [str(commands / "python"), "-W", "error", str(EXERCISE), target, metrics]
            print(environments.run(command, folder / end).stdout, end="")
    except RuntimeError as error:
        print(error)
        return False
    print(f"in {time.monotonic() - start_s:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
