"""Kernels in CUDA C++: compiled once, kept on disk, loaded once a device and started as C.

What CUDA C++ says and neither Triton nor Gluon does is clusters of programs.
"""

import ctypes
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from xgr_runtime.hal.kernels import note

from .driver import Function, load


class CppKernel:
    """One kernel on one device. num_threads: of a program; shared_bytes: its memory on the chip; compiled: gives its machine code.

    Threads may make it ready and start it beside each other.
    """

    def __init__(
        self,
        name: str,
        compiled: Callable[[], bytes],
        num_threads: int,
        shared_bytes: int,
        device_index: int,
    ) -> None:
        self.name = name
        self._compiled, self._device_index = compiled, device_index
        self._num_threads, self._shared_bytes = num_threads, shared_bytes
        self._lock = threading.Lock()
        self._function: Function | None = None

    def make_ready(self) -> None:
        """Compile it or find it on disk, and load it. Raises DeviceError with what the compiler or the driver says."""
        with self._lock, torch.cuda.device(self._device_index):
            if self._function is None:
                place = (self._shared_bytes, self._device_index)
                self._function = load(self._compiled(), self.name, *place)

    def start(self, num_programs: int, *args: Any) -> None:
        """On torch's current stream, before the kernel in front has ended. args: of ctypes, as the kernel takes them.

        Where kernels are looked for it is noted instead, unless it is ready.
        """
        if self._function is None:
            if note(self):
                return
            self.make_ready()
        assert self._function is not None
        stream = torch.cuda.current_stream(self._device_index).cuda_stream
        self._function.start(num_programs, self._num_threads, args, stream)


def kept(file: Path, make: Callable[[], bytes]) -> bytes:
    """What a file holds; where there is none, it is made and written first."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        pass
    content = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    # Under another name until it is whole: processes that start beside each other read and write the same file.
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, suffix=".part")
    with os.fdopen(descriptor, "wb") as part:
        part.write(content)
    os.replace(temporary, file)
    return content


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """The argument of a kernel for a tensor's memory."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
