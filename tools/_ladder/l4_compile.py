"""Rung L4: every kernel that the providers for CUDA start compiles for sm_90, on a machine without a GPU.

    python tools/_ladder/l4_compile.py --json FILE [--every-size]

Interpreted kernels say what a kernel computes, not that a compiler takes it: whether one of its passes fails depends on tile
sizes, warps and what is known of addresses. So the launchers are called with all conformance cases, and with rounds of the search
of many sizes, and what they would start goes through the compiler of the Triton that is installed. ptxas is not asked.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run all checks; 0 where every kernel compiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--every-size", action="store_true", help="many more rounds of the search: minutes"
    )
    options = parser.parse_args(arguments)
    # Triton looks once, when a kernel is decorated: hence before the first import of a kernel.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    report = import_module("tools._ladder.l4_compile_checks").run_checks(options.every_size)
    report.write(options.json)
    return 0 if report.is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
