"""The head on NVIDIA GPUs. N rows, V rows of the head, M hidden size."""

from typing import TYPE_CHECKING, Any

from ..triton.head import HeadTiles, check_head, in_runs
from .descriptors import descriptor
from .head_kernels import head_logsumexp_by_descriptor_kernel

if TYPE_CHECKING:
    import torch


def launch_head_logsumexp_by_descriptor(
    hidden_NM: "torch.Tensor", weight_VM: "torch.Tensor", scale: float, tiles: HeadTiles
) -> "torch.Tensor":
    """See `xgr_runtime.hal.ops.head.head_logsumexp`; raises ValueError for dtypes or strides that it cannot take."""
    check_head(head_logsumexp_by_descriptor_kernel, hidden_NM, weight_VM)

    def launch(grid: tuple[int], *states_and_sizes: Any) -> None:
        head_logsumexp_by_descriptor_kernel[grid](
            descriptor(hidden_NM, tiles.rows, tiles.size),
            descriptor(weight_VM, tiles.vocab, tiles.size),
            *states_and_sizes,
            M=hidden_NM.shape[1],
            HAS_SCALE=scale != 1.0,
            TILE_N=tiles.rows,
            TILE_V=tiles.vocab,
            TILE_M=tiles.size,
            **tiles.options,
        )

    return in_runs(launch, hidden_NM, weight_VM.shape[0], scale, tiles)
