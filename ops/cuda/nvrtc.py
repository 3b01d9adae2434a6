"""NVIDIA's compiler at run time, which torch brings: CUDA C++ that includes nothing, to machine code kept on disk beside Triton's.

A file's name is made of the source, the compiler's version and its options: whoever starts with it there compiles nothing.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triton import knobs

from xgr_runtime.errors import DeviceError

from .cpp_kernel import kept

try:
    from cuda.bindings import nvrtc

    nvrtc.nvrtcVersion()  # it looks for the library now
except (ImportError, RuntimeError) as error:
    raise ImportError(
        f"kernels in CUDA C++ need cuda-bindings and NVRTC, as torch for CUDA brings them: {error}"
    ) from error

OPTIONS = ("--gpu-architecture=sm_90a", "-std=c++17", "--diag-suppress=177")
FOLDER = "xgr"  # in Triton's


def compiled(name: str, source: str) -> bytes:
    """The machine code of a source, from disk where it is there. Raises DeviceError with the compiler's log."""
    told = "\n".join((compiler_version(), *OPTIONS, source))
    key = hashlib.sha256(told.encode()).hexdigest()
    file = Path(knobs.cache.dir) / FOLDER / f"{name}-{key}.cubin"
    return kept(file, lambda: compile_source(name, source))


def compiler_version() -> str:
    """NVRTC's, such as "13.0"."""
    return ".".join(map(str, _checked("nvrtcVersion", nvrtc.nvrtcVersion())))


def compile_source(name: str, source: str) -> bytes:
    """Machine code for the architecture of OPTIONS. Raises DeviceError with the compiler's log."""
    (program,) = _checked(
        "nvrtcCreateProgram",
        nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, None, None),
    )
    try:
        options = [option.encode() for option in OPTIONS]
        result = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            (size,) = _checked("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(program))
            log = bytes(size)
            _checked("nvrtcGetProgramLog", nvrtc.nvrtcGetProgramLog(program, log))
            raise DeviceError(f"{name}: {result[0].name}\n{log.rstrip(bytes(1)).decode()}")
        (size,) = _checked("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program))
        cubin = bytes(size)
        _checked("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(name: str, result: Sequence[Any]) -> tuple[Any, ...]:
    """What NVRTC's function returned beside its code. Raises DeviceError for a code that is not success."""
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceError(f"{name} failed: {result[0].name}")
    return tuple(result[1:])
