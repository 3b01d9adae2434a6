"""Triton's kernels among those that are compiled at their first start.

Triton asks a hook before it compiles (`knobs.runtime.jit_cache_hook`), and starts nothing where the hook says that it has
taken care of it; `JITFunction.preload` compiles later what the hook was told. Both are public in Triton 3.6. Where they are
missing, kernels are compiled one after the other, each at its first start, as ever.

Beside the kernel itself Triton builds a launcher with the C compiler for every signature, and the driver loads the kernel;
neither is allowed while a graph is captured, so `make_ready` does both.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from xgr_runtime.hal.device import Kernel
from xgr_runtime.hal.kernels import is_noting, note, noting

_HOOK_LOCK = threading.Lock()  # Triton has one hook for all devices


@dataclass(frozen=True)
class TritonKernel:
    """A function for the types, constants and options of one start. data: the same as Triton serialises it."""

    name: str
    key: str
    function: Any = field(repr=False)  # Triton hashes one by its source, so equal means the same
    data: str = field(compare=False, repr=False)
    device: torch.device = field(compare=False)

    def make_ready(self) -> None:
        """Compile it or find it in Triton's cache on disk, build its launcher, load it. Raises what its start would."""
        with torch.cuda.device(self.device):
            compiled = self.function.preload(self.data)
            compiled[1, 1, 1]  # what would start it; asked for, it is loaded


def why_not_found() -> str | None:
    """Why this Triton cannot say which kernels it is about to compile, or None; where there is no Triton, none of it are missing."""
    try:
        import triton  # noqa: PLC0415 - a device may be without
    except ImportError:
        return None
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    if not hasattr(runtime, "jit_cache_hook") or not hasattr(triton.JITFunction, "preload"):
        return f"Triton {triton.__version__} does not say beforehand what it compiles"
    return None


@contextmanager
def missing_kernels(device: torch.device) -> Iterator[dict[Kernel, None]]:
    """Inside, this thread starts no kernel of Triton that is still to be compiled, but notes it; one that is compiled starts.

    Only where `why_not_found` knows no reason. Other threads compile and start as ever.
    """
    try:
        from triton import knobs  # noqa: PLC0415 - a device may be without
    except ImportError:
        with noting() as found:
            yield found
        return
    before: Any = None

    def hook(**told: Any) -> bool | None:
        if before is not None and before(**told):
            return True
        if not is_noting() or told["is_manual_warmup"]:
            return None
        function, compiled = told["fn"].jit_function, told["compile"]
        data = compiled["specialization_data"]
        return note(TritonKernel(told["fn"].name, told["key"], function, data, device))

    with _HOOK_LOCK:
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = hook
        try:
            with noting() as found:
                yield found
        finally:
            knobs.runtime.jit_cache_hook = before
