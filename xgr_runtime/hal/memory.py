"""Memory of a device, or of the host beside it, asked for by name: where there is no room, the error says what it was for.

Whoever runs out of memory needs to know which option to lower, and torch cannot tell. Nor has it one error for it: each
device's allocator raises its own, and the host's raise MemoryError. So every buffer of the runtime is allocated here.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from xgr_runtime.errors import DeviceError, DeviceLost, OpUnavailable, XgrError
from xgr_runtime.hal.device import Device
from xgr_runtime.hal.explain import explain_error


def allocate(
    shape: Sequence[int], dtype: torch.dtype, place: torch.device, *, what: str, lower: str
) -> torch.Tensor:
    """Zeroed memory on a device.

    Args:
        shape: of the tensor.
        dtype: of its elements.
        place: the device.
        what: what the memory is for, as the error names it.
        lower: the options that its size follows.

    Raises DeviceError when there is no room for it.
    """
    with room_for(what, lower, place, math.prod(shape) * dtype.itemsize):
        return torch.zeros(tuple(shape), dtype=dtype, device=place)


def allocate_pinned(
    device: Device, shape: Sequence[int], dtype: torch.dtype, *, what: str, lower: str
) -> torch.Tensor:
    """Zeroed host memory that copies to and from the device without staging; otherwise as `allocate`."""
    num_bytes = math.prod(shape) * dtype.itemsize
    with room_for(what, lower, "the host", num_bytes, kind=device.kind):
        return device.pinned_empty(shape, dtype).zero_()


@contextmanager
def room_for(
    what: str, lower: str, place: object, num_bytes: int | None = None, *, kind: str = ""
) -> Iterator[None]:
    """Around nothing but an allocation: torch's errors become DeviceError. Errors of the runtime pass.

    num_bytes: None where it is not known before. kind: of the device behind the memory, where the place is no device.
    """
    try:
        yield
    except XgrError:
        raise
    except (MemoryError, RuntimeError) as error:
        if _is_failed_kernel(error):
            raise
        # An NPU has no class of its own for what is no lack of memory.
        named = explain_error(place.type if isinstance(place, torch.device) else kind, error)
        if isinstance(named, DeviceLost | OpUnavailable):
            raise named from error
        size = "" if num_bytes is None else f"{num_bytes} bytes of "
        raise DeviceError(f"{place} has no room for {size}{what}; lower {lower}") from error


def _is_failed_kernel(error: BaseException) -> bool:
    """An earlier kernel's fault comes up at whatever call is next, which may be an allocation."""
    return isinstance(error, torch.AcceleratorError) and "out of memory" not in str(error)
