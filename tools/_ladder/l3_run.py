"""Rung L3: every call of torch_npu against its schemas, its shape rules and its C++, recorded by running the engine.

`Worker.run` runs over batches of every kind of segment and class of bucket, twice: over fake tensors on npu:0, and over stand-ins
of CANN's libraries (see l3_passes.py). Nothing is computed, and nothing is said about a device: what CANN does with a call
is seen on a card alone.

`python tools/_ladder/l3_run.py --json FILE` under a Python with torch-npu 2.13.0 and no CANN; it builds the stand-ins and starts
itself again with them. Exit code 0 whether it passed or not, other than 0 where it could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUBS = "XGR_L3_STUBS"
CHECKED = "calls of torch_npu made by Worker.run: vendor schema, shape rule, C++ down to CANN's border, graph capture and update"


def run_again(arguments: list[str], soc: str) -> int:
    """This script in a process that finds the stand-ins of that chip; its exit code."""
    from tools._ladder import stubs  # noqa: PLC0415 - the parent needs no torch

    with tempfile.TemporaryDirectory(prefix="xgr-l3-") as name:
        folder = Path(name) / "stubs"
        stubs.build(folder, stubs.torch_npu_folder())
        environment = stubs.environment(folder, dict(os.environ), soc=soc)
        environment |= {STUBS: str(folder), "PYTHONPATH": os.pathsep.join([str(ROOT), *_path()])}
        command = [sys.executable, str(Path(__file__)), *arguments]
        return subprocess.run(command, env=environment, cwd=name, check=False).returncode


def _path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def offer_providers() -> None:
    """Make xgr_ops importable where the project is not installed: it is the folder ops of this checkout."""
    if find_spec("xgr_ops") is not None:
        return
    folder = ROOT / "ops"
    spec = spec_from_file_location("xgr_ops", folder / "__init__.py", submodule_search_locations=[str(folder)])  # fmt: skip
    assert spec is not None
    assert spec.loader is not None
    sys.modules["xgr_ops"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["xgr_ops"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="where the result goes; else to the output")
    parser.add_argument("--allow-reference", action="store_true", help="while ops lack providers")
    parser.add_argument(
        "--soc", default="Ascend910B2", help="the chip that the stand-ins claim to be"
    )
    options = parser.parse_args()
    if STUBS not in os.environ:
        arguments = ["--allow-reference"] * options.allow_reference
        arguments += ["--json", str(options.json.resolve())] if options.json else []
        return run_again(arguments, options.soc)
    offer_providers()
    from tools._ladder.l3_checks import run_checks  # noqa: PLC0415 - needs torch_npu over the stand-ins

    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="xgr-l3-world-") as name:
        report = run_checks(Path(name), ROOT, allow_reference=options.allow_reference)
    seconds = time.perf_counter() - start_s
    result = {"checked": CHECKED, **report, "seconds": round(seconds, 1)}
    text = json.dumps(result, indent=2) + "\n"
    if options.json:
        options.json.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
