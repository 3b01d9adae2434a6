"""Rung L0: without torch_npu the package imports, says why there is no NPU, and its extra is one that pip accepts.

Run in an environment without torch_npu, as `l0_checks.py --json FILE`. Each check is a function that raises AssertionError.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[2]
VENDOR = "torch_npu"
XGR = (sys.executable, "-m", "xgr_runtime.cli")
HOST_PARTS = ("xgr_runtime", "xgr_runtime.cli", "xgr_runtime.doctor", "xgr_runtime.service.server")


def torch_npu_is_absent() -> None:
    assert importlib.util.find_spec(VENDOR) is None, "torch_npu is installed: this is not rung L0"


def package_imports() -> None:
    for name in HOST_PARTS:
        importlib.import_module(name)
    assert VENDOR not in sys.modules


def provider_modules_import() -> None:
    from xgr_runtime.hal.providers import PROVIDER_MODULES  # noqa: PLC0415

    modules = PROVIDER_MODULES.get("npu", ())
    assert modules, "no module provides ops for the NPU"
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Kernels in Triton need Triton, which is no requirement of the package.
            if error.name != "triton":
                raise
    assert VENDOR not in sys.modules


def doctor_says_why() -> None:
    done = _run([*XGR, "doctor", "--json"])
    report = json.loads(done.stdout)
    (npu,) = [device for device in report["devices"] if device["kind"] == "npu"]
    assert not npu["is_usable"], npu
    assert VENDOR in npu["reason"] or "torch-npu" in npu["reason"], npu["reason"]
    assert report["packages"]["torch-npu"] == "not installed", report["packages"]


def serve_refuses_by_name() -> None:
    done = _run([*XGR, "serve", "--config", "demo", "--device", "npu"])
    assert done.returncode == 2, f"exit code {done.returncode}: {done.stderr}"
    assert "'npu' was asked for but is not usable here" in done.stderr, done.stderr
    assert VENDOR in done.stderr or "torch-npu" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def pip_accepts_the_extra() -> None:
    """Nothing is installed: pip resolves the extra beside the torch that is here, and names what it would install."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-build-isolation"]
    command += ["--quiet", "--report", "-", "-e", ".[ascend]"]
    command += ["--constraint", str(ROOT / "constraints.txt")]
    done = _run(command)
    assert done.returncode == 0, done.stderr
    wanted = [entry["metadata"]["name"] for entry in json.loads(done.stdout)["install"]]
    assert "torch-npu" in [name.replace("_", "-") for name in wanted], wanted


CHECKS = (
    torch_npu_is_absent,
    package_imports,
    provider_modules_import,
    doctor_says_why,
    serve_refuses_by_name,
    pip_accepts_the_extra,
)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    failures = [text for check in CHECKS if (text := failure_of(check))]
    report = {
        "rung": "L0",
        "checked": "the package without torch_npu",
        "counts": {"checks": len(CHECKS) - len(failures)},
        "result": "failed" if failures else "passed",
        "failures": failures,
        "providers": [],
    }
    args.json.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 1 if failures else 0


def failure_of(check: Callable[[], None]) -> str:
    """ "" where a check holds, else its name and what it found; the traceback goes to standard error."""
    try:
        check()
    except (AssertionError, ImportError, OSError, ValueError, KeyError) as error:
        traceback.print_exc()
        return f"{check.__name__}: {error}"
    print(f"{check.__name__}: holds", flush=True)
    return ""


if __name__ == "__main__":
    sys.exit(main())
