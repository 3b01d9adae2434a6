"""One measured call of an op: how its inputs are drawn, what it has to do at least, and what torch offers beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tools._bench.floor import BF16_TFLOPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tools._bench.op_rounding import Noise
    from xgr_runtime.conformance.op_case import OpCase

    # With a case's arguments: prepares what is not to be timed, and gives the call, whose results are those of the case by name.
    Peer = Callable[[Mapping[str, Any]], Callable[[], Mapping[str, torch.Tensor]]]

COPY_TB_PER_S = 4.24  # a copy within one H200, measured 2026-11-29
RIDGE = BF16_TFLOPS / COPY_TB_PER_S  # FLOPs a byte from which products bound a kernel, not memory


@dataclass(frozen=True)
class Place:
    """Where and how large inputs are drawn."""

    device: torch.device
    dtype: torch.dtype
    is_tiny: bool = False

    def normal(
        self, seed: int, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0
    ) -> torch.Tensor:
        """Standard normal numbers times `scale`, in the dtype under test."""
        generator = torch.Generator(self.device).manual_seed(seed)
        drawn = torch.randn(shape, generator=generator, device=self.device).mul_(scale)
        return drawn.to(dtype or self.dtype)

    def permutation(self, seed: int, size: int) -> torch.Tensor:
        """int64 [size]."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randperm(size, generator=generator, device=self.device)

    def int32(self, values: Any) -> torch.Tensor:
        """Whole numbers."""
        return torch.as_tensor(values, dtype=torch.int32, device=self.device)


@dataclass(frozen=True)
class OpWork:
    """draw: a case with its arguments on the device, from a seed. flops and num_bytes: what no provider can avoid, every input
    read once and every result written once. note: more about the call, for the report. noise: of results for which roundings on
    the way count, beyond what the table of tolerances is made for.
    """

    op: str
    label: str
    draw: Callable[[int], OpCase]
    flops: float
    num_bytes: float
    peers: Mapping[str, Peer] = field(default_factory=dict)
    note: str = ""
    noise: Noise | None = None

    @property
    def name(self) -> str:
        return f"{self.op} {self.label}"

    @property
    def floor_ms(self) -> float:
        """The longer of both: the products at the measured rate, the bytes at that of a copy."""
        return max(self.flops / BF16_TFLOPS, self.num_bytes / COPY_TB_PER_S) / 1e9

    @property
    def is_compute_bound(self) -> bool:
        return self.flops > RIDGE * self.num_bytes
