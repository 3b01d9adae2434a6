"""What a launcher needs to know of a device, and what it refuses whatever the device is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

# Statistics of a tile's row take a vector line of their own, so that short rows fill the chip no less than these.
LEAST_ROW_ELEMENTS = 64

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTERPRETED_BF16 = (
    "interpreted Triton adds and multiplies torch.bfloat16 wrongly without an error (1.5 + 1.5 is inf); "
    "use torch.float32 or torch.float16, or compile (TRITON_INTERPRET unset)"
)


@dataclass(frozen=True)
class LaunchRules:
    """How a device wants kernels started.

    num_programs: programs that run at once; no grid is larger.
    max_tile_elements: fp32 elements of one tile, a power of two; a kernel holds about six tiles on the chip.
    options: compiler options of every launch, by the compiler's own names.
    early: by the names of kernels, those that are started instead, as they may come before the kernel in front has ended and
        let the next one come likewise; early_options: of a launch that does.
    """

    num_programs: int
    max_tile_elements: int
    options: Mapping[str, Any] = field(default_factory=dict)
    early: Mapping[str, Any] = field(default_factory=dict)
    early_options: Mapping[str, Any] = field(default_factory=dict)

    def grid(self, num_items: int) -> tuple[int]:
        """Programs for `num_items` items that are looped over."""
        return (max(1, min(self.num_programs, num_items)),)

    @property
    def behind(self) -> dict[str, Any]:
        """Options of a kernel right behind another one: it may start early."""
        return {**self.options, **self.early_options}

    def kernel(self, kernel: Any) -> Any:
        """What is started for `kernel`."""
        return self.early.get(kernel.__name__, kernel)


def next_power_of_two(size: int) -> int:
    """The least power of two that is not below `size`, which is at least 1."""
    return 1 << (size - 1).bit_length()


def row_elements(size: int) -> int:
    """What a row of `size` counts for in a tile."""
    return max(LEAST_ROW_ELEMENTS, next_power_of_two(size))


def why_dtype_refused(kernel: object, dtype: torch.dtype) -> str | None:
    """Why `kernel` cannot work on `dtype`, or None."""
    if dtype not in DTYPES:
        return f"takes {', '.join(str(known) for known in DTYPES)}, got {dtype}"
    if dtype == torch.bfloat16 and isinstance(kernel, InterpretedFunction):
        return INTERPRETED_BF16
    return None


def check_dtype(kernel: object, dtype: torch.dtype) -> None:
    """Raises ValueError with the reason where `why_dtype_refused` has one."""
    reason = why_dtype_refused(kernel, dtype)
    if reason is not None:
        raise ValueError(reason)


def check_rows_dense(name: str, rows: torch.Tensor, num_inner_dims: int) -> None:
    """Raises ValueError where the last `num_inner_dims` dims of `rows` are not one contiguous run."""
    expected = 1
    for size, stride in zip(
        reversed(rows.shape[-num_inner_dims:]),
        reversed(rows.stride()[-num_inner_dims:]),
        strict=True,
    ):
        if size != 1 and stride != expected:
            raise ValueError(
                f"{name}: the last {num_inner_dims} dims must be contiguous, got shape "
                f"{tuple(rows.shape)} with strides {rows.stride()}"
            )
        expected *= size
