"""Launcher of the normaliser over a vocabulary. N rows, V rows of the head, M hidden size, S runs of the vocabulary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .head_kernels import head_logsumexp_kernel, join_runs_kernel
from .launch import check_dtype, check_rows_dense, next_power_of_two

LEAST_TILE = 16  # rows, vocabulary or hidden size of a product
JOIN_ELEMENTS = 4096  # of a tile of the kernel that joins runs


@dataclass(frozen=True)
class HeadTiles:
    """How the product of rows and vocabulary is cut.

    rows, vocab, size: of a tile (N, V, M), powers of two, at least 16. num_programs: what the device works on at once.
    most_waves: how often that many at most. options: of the compiler.
    """

    rows: int
    vocab: int
    size: int
    num_programs: int
    most_waves: int = 8
    options: Mapping[str, Any] = field(default_factory=dict)

    def num_runs(self, num_rows: int, num_vocab: int) -> int:
        """Into how many runs the vocabulary goes so that the slowest program ends soonest; of equal ones the fewest."""
        num_row_tiles, num_tiles = -(-num_rows // self.rows), -(-num_vocab // self.vocab)
        best, best_cost = 1, float("inf")
        for waves in range(1, self.most_waves + 1):
            num_runs = min(num_tiles, waves * self.num_programs // num_row_tiles)
            if num_runs < 1:
                continue
            tiles_each = -(-num_tiles // num_runs)
            num_waves = -(-num_row_tiles * -(-num_tiles // tiles_each) // self.num_programs)
            if num_waves * tiles_each < best_cost:
                best, best_cost = -(-num_tiles // tiles_each), num_waves * tiles_each
        return best


def launch_head_logsumexp(
    hidden_NM: torch.Tensor, weight_VM: torch.Tensor, scale: float, tiles: HeadTiles
) -> torch.Tensor:
    """See `xgr_runtime.hal.ops.head.head_logsumexp`; raises ValueError for dtypes or strides that it cannot take."""
    check_head(head_logsumexp_kernel, hidden_NM, weight_VM)
    size = hidden_NM.shape[1]

    def launch(grid: tuple[int], *states_and_sizes: Any) -> None:
        head_logsumexp_kernel[grid](
            hidden_NM,
            weight_VM,
            *states_and_sizes,
            M=size,
            HAS_SCALE=scale != 1.0,
            TILE_N=tiles.rows,
            TILE_V=tiles.vocab,
            TILE_M=min(tiles.size, max(LEAST_TILE, next_power_of_two(size))),
            **tiles.options,
        )

    return in_runs(launch, hidden_NM, weight_VM.shape[0], scale, tiles)


def in_runs(
    launch: Callable[..., None],
    hidden_NM: torch.Tensor,
    num_vocab: int,
    scale: float,
    tiles: HeadTiles,
) -> torch.Tensor:
    """fp32 [N]: what `launch(grid, largest_SN, total_SN, N, V, scale, tiles_each)` gives run by run, joined."""
    num_rows = hidden_NM.shape[0]
    num_runs = tiles.num_runs(num_rows, num_vocab)
    num_tiles = -(-num_vocab // tiles.vocab)
    tiles_each = -(-num_tiles // num_runs)
    largest_SN = hidden_NM.new_empty((num_runs, num_rows), dtype=torch.float32)
    total_SN = torch.empty_like(largest_SN)
    out_N = hidden_NM.new_empty(num_rows, dtype=torch.float32)
    if num_rows == 0:
        return out_N
    grid = (-(-num_rows // tiles.rows) * num_runs,)
    launch(grid, largest_SN, total_SN, num_rows, num_vocab, scale, tiles_each)
    runs_padded = next_power_of_two(num_runs)
    tile_rows = max(1, min(JOIN_ELEMENTS // runs_padded, 64))
    join_runs_kernel[(-(-num_rows // tile_rows),)](
        largest_SN, total_SN, out_N, num_rows, num_runs, S_PAD=runs_padded, TILE_N=tile_rows
    )
    return out_N


def check_head(kernel: object, hidden_NM: torch.Tensor, weight_VM: torch.Tensor) -> None:
    """Raises ValueError for what no kernel here takes."""
    check_dtype(kernel, hidden_NM.dtype)
    if hidden_NM.dtype != weight_VM.dtype:
        raise ValueError(f"dtypes must be alike, got {hidden_NM.dtype} and {weight_VM.dtype}")
    check_rows_dense("hidden_NM", hidden_NM, 2)
    check_rows_dense("weight_VM", weight_VM, 2)
