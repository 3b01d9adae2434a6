"""Rung L4: the Triton kernels' meaning, interpreted on the CPU, in the set of versions this Python has.

    python tools/_ladder/l4_run.py --json FILE

The three sets: triton==3.9.0 with numpy 2.4 (the newest); triton==3.6.0 with numpy==2.3.5 (what torch 2.11 for CUDA brings; its
interpreter fails on numpy 2.4); triton-ascend==3.2.0 and pybind11 with numpy==1.26.4 (Huawei's; pybind11 is imported but not among
its requirements). Each beside torch 2.13.0. float32 and float16; bfloat16 has to be refused, as interpreters compute it wrongly.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run all checks; 0 where every one held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    # Triton looks once, when a kernel is decorated: hence before the first import of a kernel.
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    report = import_module("tools._ladder.l4_checks").run_checks()
    report.write(options.json)
    return 0 if report.is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
