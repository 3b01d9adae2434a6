"""Memory with guard bands: what an op allocates or is given lies inside a larger block, and every byte that nobody may write
is known.

Each block is filled before use, floats with a NaN that no arithmetic gives (all bits set), whole numbers with a value
that is no index. So a band that was written to shows, an element of a result that was never written shows, and what was
read outside of a tensor is NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BAND_BYTES = 4096  # a multiple of every alignment that kernels ask for
FLOAT_BYTE, OTHER_BYTE = 0xFF, 0xB3
_UNFILLED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}


def filling_byte(dtype: torch.dtype) -> int:
    """What every byte of fresh memory of that dtype is."""
    return FLOAT_BYTE if dtype.is_floating_point else OTHER_BYTE


class GuardBands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside it, memory that torch allocates without a value has bands round it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # all bytes of a block, where the tensor starts and ends in it, and what fresh bytes are
        self._blocks: list[tuple[torch.Tensor, int, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.name().split(".")[0] not in _UNFILLED or output.layout != torch.strided:
            return output
        return self._banded(output)

    def _banded(self, like: torch.Tensor) -> torch.Tensor:
        """Fresh memory of the tensor's shape, strides and dtype."""
        used = _extent(like.shape, like.stride()) * like.element_size()
        padded = -(-used // BAND_BYTES) * BAND_BYTES
        size, filling = padded + 2 * BAND_BYTES, filling_byte(like.dtype)
        block = torch.full((size,), filling, dtype=torch.uint8, device=like.device)
        self._blocks.append((block, BAND_BYTES, BAND_BYTES + used, filling))
        typed = block.view(like.dtype)
        first = BAND_BYTES // like.element_size()
        return typed.as_strided(like.shape, like.stride(), first)

    def written_bands(self) -> list[str]:
        """Which bands were written to since their memory was allocated: "block 3 of 128 bytes: 2 bytes behind"."""
        found = []
        for number, (block, start, end, filling) in enumerate(self._blocks):
            for where, band in (("before", block[:start]), ("behind", block[end:])):
                count = int((band != filling).sum())
                if count:
                    found.append(f"block {number} of {end - start} bytes: {count} bytes {where}")
        return found


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def num_unwritten(tensor: torch.Tensor) -> int:
    """Elements that are what fresh memory holds."""
    if not tensor.numel():
        return 0
    as_bytes = tensor.contiguous().view(-1, 1).view(torch.uint8)
    return int((as_bytes == filling_byte(tensor.dtype)).all(1).sum())


def same_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, every NaN of it made one that fresh memory does not hold; what shares elements is left as it is."""
    if tensor.dtype.is_floating_point and 0 not in tensor.stride():
        tensor.masked_fill_(tensor.isnan(), torch.nan)
    return tensor
