"""The error that a user can act on behind what torch raises on a device. One line per kind of device that has any."""

from collections.abc import Callable

import torch

from xgr_runtime.errors import DeviceError, XgrError
from xgr_runtime.hal.ascend_errors import explain_npu_error, first_line


def explain_cuda_error(error: BaseException) -> XgrError | None:
    """Out of memory, which torch names itself; None for anything else."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    return DeviceError(
        f"the GPU is out of memory ({first_line(str(error))}); lower scheduler.max_batch_rows, scheduler.max_batch_tokens, "
        "cache.num_pages or cache.prefix_cache_bytes"
    )


EXPLAINERS: dict[str, Callable[[BaseException], XgrError | None]] = {
    "npu": explain_npu_error,
    "cuda": explain_cuda_error,
}


def explain_error(kind: str, error: BaseException) -> XgrError | None:
    """What `error` means on a device of that kind (torch's device type); None where it says nothing special."""
    explain = EXPLAINERS.get(kind)
    return None if explain is None else explain(error)
