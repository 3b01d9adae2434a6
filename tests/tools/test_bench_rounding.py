"""Tolerance of a pair of products: roundings on the way are counted right, they pass, and what is wrong does not."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tools._bench.op_check import check_work, of_tolerance
from tools._bench.op_rounding import rounding_variance, stream_silu_noise
from tools._bench.op_work import OpWork
from xgr_runtime.conformance.op_case import OpCase
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.ops.stream import stream_linear_silu_mul
from xgr_runtime.hal.registry import all_ops
from xgr_runtime.hal.tolerances import TOLERANCES

BF16 = torch.bfloat16
ROWS, INPUTS, HIDDEN, INNER = 96, 64, 1024, 256


def draw(seed: int, scale: float = 1.0) -> dict[str, Any]:
    """Arguments of a call as the benchmark draws them; scale: of the gate and the value, 1 there."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(BF16)

    return {
        "x_NK": normal(ROWS, INPUTS),
        "weight_MK": normal(HIDDEN, INPUTS, scale=INPUTS**-0.5),
        "residual_NM": normal(ROWS, HIDDEN),
        "norm_weight_M": 1 + normal(HIDDEN, scale=0.1),
        "eps": 1e-6,
        "gate_up_2FM": normal(2 * INNER, HIDDEN, scale=scale * HIDDEN**-0.5),
    }


def in_float32(args: dict[str, Any]) -> dict[str, Any]:
    return {n: a.float() if isinstance(a, torch.Tensor) else a for n, a in args.items()}


def rounded(values: np.ndarray) -> np.ndarray:
    """To 8 bits of significand, by numpy alone."""
    fraction, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.round(fraction * 256) / 256, exponent))


def by_numpy(args: dict[str, Any], *, is_rounded: bool) -> np.ndarray:
    """The call in float64, with the four roundings before the second product or with none."""
    x, weight, residual, norm_weight, gate_up = (
        a.double().numpy() for a in args.values() if isinstance(a, torch.Tensor)
    )
    r = rounded if is_rounded else np.asarray
    stream = r(residual + r(x @ weight.T))
    scaled = r(stream / np.sqrt((stream**2).mean(-1, keepdims=True) + args["eps"]))
    gate, value = np.split(r(scaled * norm_weight) @ gate_up.T, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * value  # type: ignore[no-any-return]


def test_the_error_of_one_rounding() -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(1)) * 3
    errors = values.to(BF16).double() - values.double()
    expected = rounding_variance(values, BF16).double()
    assert float(errors.square().mean() / expected.mean()) == pytest.approx(1, abs=0.02)
    assert rounding_variance(torch.zeros(2), BF16).tolist() == [0, 0]


def test_roundings_that_are_not_counted_are_within_the_table() -> None:
    """The gate, the value, silu(gate) and the result, each off by the most there is: rtol alone does not hold, atol does."""
    fractions = np.linspace(1, 2, 100_001)
    most = float(np.abs(rounded(fractions) / fractions - 1).max())
    assert most == pytest.approx(2**-8, rel=0.01)
    assert most < 2**-8
    gates = np.linspace(-30, 30, 60_001)
    off = 1 + most * np.array([[-1], [1]])
    silu, moved = (g / (1 + np.exp(-g)) for g in (gates, gates * off))
    moved *= (1 + most * np.sign(np.abs(moved) - np.abs(silu))) ** 3  # away from it
    excess = (np.abs(moved - silu) - TOLERANCES[BF16].rtol * np.abs(silu)).max(axis=0)
    assert gates[excess > 0].max() == pytest.approx(-5.7, abs=0.2)
    assert gates[excess.argmax()] == pytest.approx(-6.9, abs=0.1)
    assert 3e-5 < excess.max() < 4e-5
    assert excess.max() * 700 < TOLERANCES[BF16].atol


def test_the_counted_noise_is_what_roundings_do() -> None:
    args = draw(2)
    errors = by_numpy(args, is_rounded=True) - by_numpy(args, is_rounded=False)
    noise = stream_silu_noise(in_float32(args), BF16)["result"].double().numpy()
    assert np.sqrt(((errors / noise) ** 2).mean()) == pytest.approx(1, abs=0.05)
    assert np.abs(errors / noise).max() < 6


def check(args: dict[str, Any]) -> dict[str, Any]:
    """What the benchmark says of the parts."""
    work = OpWork(
        stream_linear_silu_mul.name,
        "drawn",
        lambda _: OpCase("drawn", args, {}, view=lambda _, result: {"result": result}),
        flops=1.0,
        num_bytes=1.0,
        noise=stream_silu_noise,
    )
    op = all_ops()[work.op]
    return next(c for c in check_work(work, op, BF16, CpuDevice()) if c["provider"] == "parts")


def test_the_parts_are_within_it_also_where_gates_are_large() -> None:
    """Beyond what the table alone allows, as in a call of many rows."""
    args = draw(3, scale=2.0)
    entry = check(args)
    assert "failure" not in entry
    assert 0 < entry["error_of_tolerance"] < 1
    expected = torch.from_numpy(by_numpy(args, is_rounded=False))
    got = stream_linear_silu_mul.reference(**{**args, "residual_NM": args["residual_NM"].clone()})
    assert of_tolerance(got, expected, BF16) > 1


def swap_rows(args: dict[str, Any]) -> None:
    args["x_NK"][[3, 4]] = args["x_NK"][[4, 3]]


def drop_column(args: dict[str, Any], name: str) -> None:
    args[name][:, 7] = 0


def forget_norm_weight(args: dict[str, Any]) -> None:
    args["norm_weight_M"].fill_(1)


def drop_feature(args: dict[str, Any]) -> None:
    args["gate_up_2FM"][INNER + 9] = 0


@pytest.mark.parametrize(
    "fault",
    [
        swap_rows,
        partial(drop_column, name="gate_up_2FM"),
        partial(drop_column, name="weight_MK"),
        forget_norm_weight,
        drop_feature,
    ],
    ids=["rows", "input of the gate", "input of the stream", "norm weight", "feature"],
)
def test_a_fault_is_beyond_it(fault: Any) -> None:
    args = draw(4)
    noise = stream_silu_noise(in_float32(args), BF16)["result"]
    expected = torch.from_numpy(by_numpy(args, is_rounded=False))
    right = torch.from_numpy(by_numpy(args, is_rounded=True))
    assert of_tolerance(right, expected, BF16, noise=noise) < 1
    fault(args)
    wrong = torch.from_numpy(by_numpy(args, is_rounded=True))
    assert of_tolerance(wrong, expected, BF16, noise=noise) > 1.5
