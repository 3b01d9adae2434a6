"""Builds and installs the fake device "npu": one C++ file, compiled once per source and torch version.

g++ alone is needed: no ninja, no Python headers, no CANN. A process has either this or torch_npu, never both, because
torch knows one private device.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils import backend_registration

SOURCES = Path(__file__).resolve().parent / "csrc"
CACHE = Path(__file__).resolve().parents[2] / "build" / "fake-npu"
FLAGS = ("-std=c++20", "-O2", "-g0", "-fPIC", "-shared", "-DAT_PER_OPERATOR_HEADERS")


class BuildFailed(RuntimeError):
    """The compiler is absent or rejects the sources."""


def library() -> Path:
    """The built library; compiles it where the cache has none. Safe with other processes."""
    compiler = os.environ.get("CXX", "g++")
    key = hashlib.sha256(f"{compiler} {FLAGS} {torch.__version__} {sys.platform}".encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    target = CACHE / f"fake_npu-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    package = Path(torch.__file__).parent
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    command = [
        compiler,
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{package / 'include' / part}" for part in ("", "torch/csrc/api/include")),
        str(SOURCES / "backend.cpp"),
        "-o",
        str(unfinished),
        f"-L{package / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
    ]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise BuildFailed(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}")
        unfinished.replace(target)
    except OSError as error:
        raise BuildFailed(f"the fake device needs a C++ compiler: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def is_installed() -> bool:
    """Whether this process has the fake device."""
    return hasattr(getattr(torch, "npu", None), "IS_FAKE")


def install() -> None:
    """Make `torch.device("npu")` and `torch.npu` the fake ones, once per process."""
    if is_installed():
        return
    if hasattr(torch, "npu") or "torch_npu" in sys.modules:
        raise BuildFailed("torch_npu is loaded; the fake device cannot share a process with it")
    torch.ops.load_library(str(library()))  # type: ignore[no-untyped-call]
    # Not at the top: it asks the library that is loaded above.
    from tests.ascend import fake_npu  # noqa: PLC0415

    backend_registration.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", fake_npu)  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend()
