"""The one table of tolerances: by how much a provider's result may differ from the float32 CPU reference."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Op parity: |got - ref| <= atol + rtol * |ref|. same_answer: t of `assert_same_answer`, in nats."""

    atol: float
    rtol: float
    same_answer: float
    reason: str


TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-10, 1e-10, 1e-9, "oracle precision"),
    torch.float32: Tolerance(
        2e-5, 2e-5, 1e-4, "another summation order; plain fp32 is up to 1.4e-5 from float64"
    ),
    torch.float16: Tolerance(4e-3, 4e-3, 0.03, "11-bit significand, fp32 accumulation"),
    torch.bfloat16: Tolerance(3e-2, 3e-2, 0.2, "8-bit significand, fp32 accumulation"),
}
