"""The head on NVIDIA GPUs. N rows, V rows of the head, M hidden size, C codes of a level.

The level's logits are one library product whose sums leave in fp32. Their normaliser over the vocabulary is one kernel for
16-bit rows: tiles brought by the copy engine where the GPU has one, by address elsewhere. For fp32, which the tensor cores do
not take, it is the library's products, tile by tile: four times as fast as a kernel of tiles (512 rows, 176,512 x 1,024 on one
H200: 4.7 and 16.9 ms). TF32 is never used here, and torch leaves it off unless told otherwise.
"""

from typing import TYPE_CHECKING, Any

import torch

from xgr_runtime.hal.ops.head import head_logits, head_logsumexp
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.head import HeadTiles, check_head, in_runs, launch_head_logsumexp
from ..triton.head_kernels import head_logsumexp_kernel
from ..triton.launch import DTYPES, why_dtype_refused
from .descriptors import descriptor, why_descriptors_refused
from .head_kernels import head_logsumexp_by_descriptor_kernel
from .hopper import NUM_CORES

if TYPE_CHECKING:
    from collections.abc import Mapping

HALF = (torch.float16, torch.bfloat16)


def _tiles(rows: int, vocab: int, size: int, warps: int, stages: int, per_core: int) -> HeadTiles:
    options = {"num_warps": warps, "num_stages": stages}
    # on other GPUs than an H100 or H200 the vocabulary is cut a little worse than best
    return HeadTiles(rows, vocab, size, per_core * NUM_CORES, options=options)


# most rows -> tiles
BY_DESCRIPTOR: "Mapping[int, HeadTiles]" = {
    16: _tiles(16, 128, 128, 4, 4, 2),
    64: _tiles(64, 128, 128, 4, 4, 1),
    2**31: _tiles(128, 256, 64, 8, 3, 1),
}
BY_ADDRESS = _tiles(16, 64, 64, 4, 3, 2)
PRODUCT_ROWS = 8192  # of the head in one of the library's products: its logits are what is held beside the result


def _accepts_descriptors(spec: OpSpec) -> str | None:
    if spec.dtype not in HALF:
        return f"takes {', '.join(map(str, HALF))}, got {spec.dtype}"
    refused = why_descriptors_refused(spec, "M")
    return refused or why_dtype_refused(head_logsumexp_by_descriptor_kernel, spec.dtype)


def _accepts(spec: OpSpec) -> str | None:
    if spec.dtype not in HALF:
        return f"takes {', '.join(map(str, HALF))}, got {spec.dtype}"
    return why_dtype_refused(head_logsumexp_kernel, spec.dtype)


def _accepts_fp32(spec: OpSpec) -> str | None:
    return None if spec.dtype == torch.float32 else f"takes torch.float32, got {spec.dtype}"


@impl(head_logsumexp, provider="triton-tma", device="cuda", accepts=_accepts_descriptors)
def head_logsumexp_by_descriptor(
    hidden_NM: "torch.Tensor", weight_VM: "torch.Tensor", scale: float
) -> "torch.Tensor":
    """Tiles by the copy engine."""
    num_rows = hidden_NM.shape[0]
    tiles = next(tiles for most_rows, tiles in BY_DESCRIPTOR.items() if num_rows <= most_rows)
    return launch_head_logsumexp_by_descriptor(hidden_NM, weight_VM, scale, tiles)


@impl(head_logsumexp, provider="triton", device="cuda", accepts=_accepts)
def head_logsumexp_by_address(
    hidden_NM: "torch.Tensor", weight_VM: "torch.Tensor", scale: float
) -> "torch.Tensor":
    """Tiles by address: any size."""
    return launch_head_logsumexp(hidden_NM, weight_VM, scale, BY_ADDRESS)


@impl(head_logsumexp, provider="torch", device="cuda", accepts=_accepts_fp32)
def head_logsumexp_by_products(
    hidden_NM: "torch.Tensor", weight_VM: "torch.Tensor", scale: float
) -> "torch.Tensor":
    """A product for every tile of the head's rows, then the tiles' normalisers joined."""
    scaled_NM = hidden_NM if scale == 1.0 else hidden_NM * scale
    of_tiles = [
        torch.logsumexp(torch.mm(scaled_NM, weight_CM.T), dim=1)
        for weight_CM in torch.split(weight_VM, PRODUCT_ROWS)
    ]
    return of_tiles[0] if len(of_tiles) == 1 else torch.logsumexp(torch.stack(of_tiles), dim=0)


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


def _accepts_logits(spec: OpSpec) -> str | None:
    if spec.dtype in DTYPES:
        return None
    return f"takes {', '.join(map(str, DTYPES))}, got {spec.dtype}"


@impl(head_logits, provider="torch", device="cuda", accepts=_accepts_logits)
def head_logits_in_one_product(
    hidden_NM: "torch.Tensor", weight_CM: "torch.Tensor", scale: float
) -> "torch.Tensor":
    """16-bit rows are multiplied as they are; the scale is applied to fp32 sums, and not at all where it is 1."""
    if hidden_NM.dtype == torch.float32:
        logits_NC = torch.mm(hidden_NM, weight_CM.T)
    else:
        logits_NC = torch.mm(hidden_NM, weight_CM.T, out_dtype=torch.float32)
    return logits_NC if scale == 1.0 else logits_NC.mul_(scale)
