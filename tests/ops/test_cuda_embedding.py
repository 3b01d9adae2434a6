"""The kernel that begins a pass, and the product behind it, which starts while it runs.

What must hold beside parity: the product reads this replay's rows and angles, the kernel behind that reads the stream as it was
begun, and cosines and sines are good to fp32 at the largest positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from xgr_runtime.hal.ops.embedding import embedding_rms_norm_cos_sin
from xgr_runtime.hal.ops.fused_attention import linear_rope_write_unshared_kv
from xgr_runtime.hal.ops.linear import linear_add_rms_norm
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec, resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Impl

on_gpu = pytest.mark.device("cuda")
VOCABULARY, CODES, NUM_HEADS, NUM_KV_HEADS, DIM, EPS = 3000, 500, 8, 4, 128, 1e-6
NUM_REPLAYS = 30


def found(provider: str) -> Impl[..., Any]:
    load_providers("cuda")
    impls = embedding_rms_norm_cos_sin.impls
    return next(i for i in impls if (i.provider, i.device_kind) == (provider, "cuda"))


def normal(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(torch.bfloat16).cuda()


class Step:
    """The first kernels of a step: its codes and positions can be set anew."""

    def __init__(self, num_rows: int, hidden: int, capability: str) -> None:
        outputs = (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM
        self.embedding, self.norm = normal(1, VOCABULARY, hidden), 1 + normal(2, hidden, scale=0.1)
        self.qkv = normal(3, outputs, hidden, scale=hidden**-0.5)
        self.out = normal(4, hidden, NUM_HEADS * DIM, scale=0.02)
        self.head_norms = [1 + normal(5 + i, DIM, scale=0.1) for i in range(2)]
        pair = torch.arange(DIM // 2, device="cuda")
        self.frequency = (1e6 ** (-2.0 * pair / DIM)).repeat(2)
        self.codes = torch.zeros(num_rows, dtype=torch.int32, device="cuda")
        self.positions = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
        self.token_of = torch.arange(CODES, device="cuda") * 5 + 3
        self.slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
        shape = (num_rows, 2, NUM_KV_HEADS, DIM)
        self.kv = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        sizes = {"T": num_rows, "N": num_rows, "max_rows": num_rows, "M": hidden}
        sizes |= {"Q": NUM_HEADS, "G": NUM_KV_HEADS, "D": DIM}
        spec = OpSpec("cuda", torch.bfloat16, capability, sizes)
        behind = linear_rope_write_unshared_kv, linear_add_rms_norm
        self.product, self.added = (resolve(op, spec, allow_reference=True).fn for op in behind)

    def set(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = self.codes.shape
        self.codes.copy_(torch.randint(CODES, shape, generator=generator))
        self.positions.copy_(torch.randint(5000, shape, generator=generator))

    def run(self, begin: Callable[..., Any], between: Callable[[], None]) -> list[torch.Tensor]:
        norm, place = (self.norm, EPS), (self.positions, self.frequency)
        begun = begin(self.embedding, self.codes, self.token_of, *norm, *place)
        residual, rows, *angles = begun
        between()
        heads = (*self.head_norms, EPS, *angles, *self.kv, self.slots, 1)
        q_NQD = self.product(rows, self.qkv, *heads)
        between()
        out = self.added(q_NQD.flatten(1), self.out, residual, *norm)
        between()
        return [*begun, q_NQD, out, *(rows.clone() for rows in self.kv)]


@on_gpu
@pytest.mark.parametrize("hidden", [1024, 2048])
@pytest.mark.parametrize("num_rows", [32, 128, 700])
@pytest.mark.parametrize("provider", ["triton-pdl", "triton"])
def test_kernels_behind_read_what_this_replay_began(
    provider: str, num_rows: int, hidden: int, device: Device
) -> None:
    reason = found(provider).accepts(OpSpec("cuda", torch.bfloat16, device.capability))
    if provider == "triton-pdl" and device.capability != "sm_90":
        assert reason is not None
        return
    assert reason is None, reason
    step, begin = Step(num_rows, hidden, device.capability), found(provider).fn
    held = list[torch.Tensor]()
    step.run(begin, torch.cuda.synchronize)

    def run() -> None:
        held[:] = step.run(begin, lambda: None)

    graph = device.capture("step", run)
    for seed in range(NUM_REPLAYS):
        step.set(seed)
        apart = step.run(begin, torch.cuda.synchronize)
        for result in (*held, *step.kv):
            result.fill_(torch.nan)
        for rows in step.kv:
            rows[:, 0] = 0  # nobody writes there
        torch.cuda.synchronize()
        with device.segment("step"):
            graph.replay()
        device.synchronize()
        assert all(torch.equal(got, want) for got, want in zip(held, apart, strict=True))


@on_gpu
@pytest.mark.parametrize("provider", ["triton-pdl", "triton"])
def test_angles_of_the_largest_positions_against_float64(provider: str, device: Device) -> None:
    """Up to 200,000 rad: behind some 100,000 the kernel's functions go another way."""
    if found(provider).accepts(OpSpec("cuda", torch.float32, device.capability)) is not None:
        assert device.capability != "sm_90"
        return
    positions = torch.cat([torch.arange(0, 200_000, 37), torch.arange(0, 64)])
    frequency = (1e6 ** (-torch.arange(0, 64) / 64)).repeat(2)
    table, norm = torch.ones(1, 64), torch.ones(64)
    ids = torch.zeros(len(positions), dtype=torch.int64)
    arrays = [x.to(device.torch_device) for x in (table, ids, norm, positions, frequency)]
    _, _, cos, sin = found(provider).fn(*arrays[:2], None, arrays[2], EPS, *arrays[3:])
    angle = (positions.float()[:, None] * frequency).double()
    torch.testing.assert_close(cos.cpu().double(), angle.cos(), atol=2e-7, rtol=0)
    torch.testing.assert_close(sin.cpu().double(), angle.sin(), atol=2e-7, rtol=0)
