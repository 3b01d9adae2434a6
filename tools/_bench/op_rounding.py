"""What roundings between the products of a call may change in its results, counted.

`stream_linear_silu_mul` by its parts rounds four times before the second product: the first product, the stream that it is added
to, the stream's normalised rows, and these times the weight. Each rounding is off by at most half a unit in the last place,
evenly, hence by 1/sqrt(12) units in the mean square, and each is independent of the others. An output of the second product
is off by their sum over M inputs, each times a weight: its variance is the sum of theirs. As even errors are sub-Gaussian with
their own variance, so is the sum, and one beyond SIGMAS of its deviations is less likely than 2 exp(-SIGMAS^2 / 2): of the 5e7
results of 8,192 rows, one in 400 calls.

The gate and the value carry that error into silu(gate) * value, each by the derivative: where the gate is 4 and the value 0, four
times the value's, with nothing in the result that a relative tolerance could be a share of. That is why the table's atol, which
fits results that are rounded once, does not hold there, and why more rows exceed it sooner. A provider that leaves out
some of the roundings has less.

Not counted here, as the table's tolerance covers them: the gate, the value, silu(gate) and the result as they are rounded
themselves, in bf16 by less than 2^-8 of each (8 significant bits). The last three change the result by that share, the gate's by
|gate * silu'(gate) / silu(gate)| = |1 + gate * (1 - sigmoid(gate))| times it: at most 1.3 above a gate of 0, 6 at -7, about
-gate - 1 below. rtol (3e-2, 7.7 such roundings) does not cover the sum at -7, (6 + 1 + 1 + 1) * 2^-8 = 3.5e-2, nor any below
-5.7; what is left is less than 4e-5 of the value, most at a gate of -6.9, which atol (3e-2) covers for values up to 700.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    # With a case's arguments in float32 and the dtype under test: the standard deviation of each result that has one, by name.
    Noise = Callable[[Mapping[str, Any], torch.dtype], Mapping[str, torch.Tensor]]

SIGMAS = 7.0


def stream_silu_noise(args: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of `stream_linear_silu_mul` by its parts, [N, F]. Nothing is mutated."""
    product_NM = args["x_NK"] @ args["weight_MK"].T
    stream_NM = args["residual_NM"] + product_NM
    variance_NM = rounding_variance(product_NM, dtype) + rounding_variance(stream_NM, dtype)
    del product_NM
    weight_M = args["norm_weight_M"]
    inverse_N1 = (stream_NM.square().mean(-1, keepdim=True) + args["eps"]).rsqrt()
    scaled_NM = stream_NM.mul_(inverse_N1)
    variance_NM.mul_(inverse_N1.square()).add_(rounding_variance(scaled_NM, dtype))
    rows_NM = scaled_NM * weight_M
    variance_NM.mul_(weight_M.square()).add_(rounding_variance(rows_NM, dtype))
    gate_NF, value_NF = (rows_NM @ args["gate_up_2FM"].T).chunk(2, dim=-1)
    of_gate_NF, of_value_NF = (variance_NM @ args["gate_up_2FM"].square().T).chunk(2, dim=-1)
    share_NF = gate_NF.sigmoid()
    slope_NF = share_NF * (1 + gate_NF * (1 - share_NF))
    by_gate_NF = (slope_NF * value_NF).square() * of_gate_NF
    by_value_NF = functional.silu(gate_NF).square() * of_value_NF
    return {"result": (by_gate_NF + by_value_NF).sqrt()}


def rounding_variance(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of the error with which each value is rounded to the dtype: a unit in the last place squared, by 12."""
    _, exponent = torch.frexp(values)  # of a fraction in [0.5, 1)
    unit = torch.ldexp(torch.full_like(values, torch.finfo(dtype).eps), exponent - 1)
    return torch.where(values == 0, 0.0, unit.square() / 12)
