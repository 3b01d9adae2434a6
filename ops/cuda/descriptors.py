"""Tiles that the copy engine brings (TMA): who may use them, and the descriptor of a matrix.

A descriptor is made on the host and passed by value, so that a captured graph holds it.
"""

from typing import TYPE_CHECKING, Any

from xgr_runtime.hal.registry import OpSpec

if TYPE_CHECKING:
    import torch

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None

LEAST_CAPABILITY = 90
ALIGNMENT_BYTES = 16  # of the first element and of every row


def why_descriptors_refused(spec: OpSpec, *row_names: str) -> str | None:
    """Why rows of these sizes cannot come by descriptor, or None."""
    if TensorDescriptor is None:
        return "needs tensor descriptors made on the host, which Triton has from 3.4 on"
    capability = spec.capability.removeprefix("sm_")
    if capability.isdigit() and int(capability) < LEAST_CAPABILITY:
        return f"needs a GPU of capability sm_{LEAST_CAPABILITY} or later, got {spec.capability}"
    for name in row_names:
        num_bytes = spec.dims.get(name, ALIGNMENT_BYTES) * spec.dtype.itemsize
        if num_bytes % ALIGNMENT_BYTES:
            return f"{name} times the element size must be a multiple of {ALIGNMENT_BYTES} bytes, got {num_bytes}"
    return None


def descriptor(matrix: "torch.Tensor", tile_rows: int, tile_columns: int) -> Any:
    """Of a contiguous matrix that is read or written in such tiles; what lies outside it is read as zeros."""
    return TensorDescriptor.from_tensor(matrix, [tile_rows, tile_columns])
