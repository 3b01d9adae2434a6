"""Stub libraries of which single functions fail: real torch_npu then raises its own errors, in its own words.

Made from the stubs (`stubs.py`): each function that may fail is compiled under another name and called by one of its own name,
which first looks for XGR_FAULT_<function> in the environment and returns that code if it is there.
"""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

from tools._ladder import stubs

if TYPE_CHECKING:
    from pathlib import Path

# library, source that the stubs leave, functions that may fail
FAULTS = {
    "libascendcl.so": (
        "stubs.c",
        (
            *(
                "aclrtMallocAlign32",
                "aclrtMalloc",
                "aclrtMallocHost",
                "aclrtCreateStreamWithConfig",
            ),
            *("aclrtSynchronizeStreamWithTimeout", "aclrtSynchronizeDevice", "aclmdlRICaptureEnd"),
        ),
    ),
    "libopapi.so": ("kernels.c", ("aclnnAddGetWorkspaceSize", "aclnnRmsNormGetWorkspaceSize")),
}
# Looked up for SoCs before Atlas A2 only.
OLDER_SOC = ("aclrtSetStreamOverflowSwitch", "aclrtGetStreamOverflowSwitch")
NUM_ARGUMENTS = (
    12  # more than any of these functions has; each fits a register or a slot of the stack
)
COMPILE = ("gcc", "-fPIC", "-w", "-O0", "-std=gnu11")


def build(folder: Path, torch_npu: Path) -> None:
    """Write the stub libraries into `folder`, with functions that may fail. Raises CalledProcessError where gcc fails."""
    stubs.build(folder, torch_npu)
    for library, (source, functions) in FAULTS.items():
        _rebuild(folder, library, source, functions)


def _rebuild(folder: Path, library: str, source: str, functions: tuple[str, ...]) -> None:
    text = (folder / source).read_text(encoding="utf-8")
    absent = [name for name in functions if not re.search(rf"\b{name}\(", text)]
    if absent:
        raise RuntimeError(f"{source} of the stubs has no {', '.join(absent)}")
    wrappers, renamed = folder / f"faults-{source}", folder / f"renamed-{source}.o"
    added = [name for name in OLDER_SOC if library == "libascendcl.so" and f" {name}(" not in text]
    wrappers.write_text(_wrappers_of(functions, added), encoding="utf-8")
    macros = [f"-D{name}=xgr_real_{name}" for name in functions]
    subprocess.run([*COMPILE, "-c", *macros, "-o", str(renamed), str(folder / source)], check=True)
    on_first = [] if library == "libascendcl.so" else [f"-L{folder}", "-lascendcl"]
    inputs = [str(renamed), str(wrappers), *on_first]
    command = [*COMPILE, "-shared", f"-Wl,-soname,{library}", "-o", str(folder / library)]
    subprocess.run([*command, *inputs], check=True)


def _wrappers_of(functions: tuple[str, ...], added: list[str]) -> str:
    parameters = ", ".join(f"void *a{i}" for i in range(NUM_ARGUMENTS))
    arguments = ", ".join(f"a{i}" for i in range(NUM_ARGUMENTS))
    lines = ["#include <stdlib.h>", *(f"int {name}() {{ return 0; }}" for name in added)]
    for name in functions:
        lines.append(f"int xgr_real_{name}();")
        lines.append(
            f'int {name}({parameters}) {{ const char *code = getenv("XGR_FAULT_{name}"); '
            f"return code ? atoi(code) : xgr_real_{name}({arguments}); }}"
        )
    return "\n".join(lines) + "\n"
