"""What starters of kernels in CUDA C++ ask of NVIDIA's driver: five of its functions, called as C.

The bindings that torch brings for Python have them too, but hold a tensor map wherever Python puts an object, while the driver
wants it on a multiple of its size.

The driver is looked for at the first call: modules that name it load on machines without.
"""

import ctypes
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from xgr_runtime.errors import DeviceError

LIBRARY = "libcuda.so.1"
MAP_BYTES = 128  # of a tensor map, and what its address is a multiple of
TILE_INPUTS = 64  # of a tile: 128 bytes of 16-bit inputs, the width of its swizzling
MOST_MAPS = 1024  # kept; weights of a large model are some hundreds

# cuda.h: values of its enumerations
_MAX_SHARED_BYTES = 8
_EARLY_START = 6
_BFLOAT16, _NOT_INTERLEAVED, _SWIZZLE_128, _FROM_L2_128, _ZEROS_OUTSIDE = 9, 0, 3, 2, 0


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, of those whose value is one number."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(LIBRARY)


def call(name: str, *args: Any) -> None:
    """Call one of the driver's functions. Raises DeviceError with its name and what it answered."""
    library = _library()
    code = getattr(library, name)(*args)
    if code == 0:
        return
    text = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(text))
    error = (text.value or b"").decode() or f"error {code}"
    raise DeviceError(f"{name} of {LIBRARY} failed: {error}")


@dataclass(frozen=True)
class Function:
    """A kernel that is loaded. shared_bytes: of a program, beside what it declares itself."""

    handle: int
    shared_bytes: int
    module: int = field(repr=False)

    def start(
        self, num_programs: int, num_threads: int, args: tuple[Any, ...], stream: int
    ) -> None:
        """On a stream (its address), before the kernel in front of it there has ended. args: of ctypes, those of the kernel."""
        early = _Attribute(id=_EARLY_START, value=1)
        config = _Config(
            (num_programs, 1, 1), (num_threads, 1, 1), self.shared_bytes, stream, ctypes.pointer(early), 1
        )  # fmt: skip
        addresses = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        call(
            "cuLaunchKernelEx", ctypes.byref(config), ctypes.c_void_p(self.handle), addresses, None
        )


def load(cubin: bytes, name: str, shared_bytes: int, device_index: int) -> Function:
    """A kernel of a compiled module, for one device, which stays this thread's if it was before or if there was none."""
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    if context.value is None:  # a thread that has not used the device yet
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device_index))
        call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin))
    call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    call("cuFuncSetAttribute", function, _MAX_SHARED_BYTES, ctypes.c_int(shared_bytes))
    return Function(function.value or 0, shared_bytes, module.value or 0)


@lru_cache(maxsize=MOST_MAPS)
def tensor_map(address: int, num_rows: int, num_columns: int, tile_rows: int) -> Any:
    """Of a contiguous bf16 matrix that comes in tiles of so many rows and 64 columns, zeros outside of it: an argument of a kernel.

    It says nothing but these numbers, so it is right whatever lies there. num_columns is a multiple of 8.
    """
    memory = ctypes.create_string_buffer(2 * MAP_BYTES)
    offset = -ctypes.addressof(memory) % MAP_BYTES
    result = (ctypes.c_char * MAP_BYTES).from_buffer(memory, offset)
    call(
        "cuTensorMapEncodeTiled",
        ctypes.byref(result),
        _BFLOAT16,
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(num_columns, num_rows),
        (ctypes.c_uint64 * 1)(2 * num_columns),
        (ctypes.c_uint32 * 2)(TILE_INPUTS, tile_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        _NOT_INTERLEAVED,
        _SWIZZLE_128,
        _FROM_L2_128,
        _ZEROS_OUTSIDE,
    )
    return result
