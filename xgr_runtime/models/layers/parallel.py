"""Which part of a weight this rank holds, and the sum over ranks. Size 1 changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from xgr_runtime.errors import CheckpointError


@dataclass(frozen=True)
class ParallelContext:
    """One rank of a tensor-parallel group. sum_over_ranks adds a tensor over the group (None only for size 1)."""

    rank: int = 0
    size: int = 1
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert self.size == 1 or self.sum_over_ranks is not None

    def part_of(self, count: int, what: str) -> int:
        """count / size; raises CheckpointError when `what` cannot be split evenly."""
        if count % self.size:
            raise CheckpointError(
                f"{what} ({count}) must be a multiple of the number of ranks, got {self.size} ranks"
            )
        return count // self.size

    def shard(self, weight: torch.Tensor, dim: int, what: str) -> torch.Tensor:
        """This rank's slice of `weight` along `dim`."""
        length = self.part_of(weight.shape[dim], what)
        return weight.narrow(dim, self.rank * length, length)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all ranks."""
        return x if self.sum_over_ranks is None else self.sum_over_ranks(x)
