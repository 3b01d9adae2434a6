"""Products of few rows by clusters of programs, whose kernels start before those in front of them have ended.

Every number of programs of a cluster, rows that fill tiles and do not; nothing is written beside results; the same inputs give the
same bits, layer behind layer in a captured graph too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.ops.test_cuda_stream import NUM_REPLAYS, PAGE_SIZE, Layers, normal
from xgr_runtime.hal.ops.stream import (
    stream_linear_rope_write_shared_kv,
    stream_linear_rope_write_unshared_kv,
    stream_linear_silu_mul,
)
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec
from xgr_runtime.hal.tolerances import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Op

pytestmark = pytest.mark.device("cuda")
EPS, NUM_REPEATS, NUM_BEHIND = 1e-6, 50, 3
ROWS = (1, 17, 64, 65, 100, 128)
# columns, inputs: of the stream from attention and feed-forward layer, and a size that fills no tile
ADD_SIZES = ((2048, 2048), (2048, 6144), (1024, 3072), (200, 512))
GATED_SIZES = ((6144, 2048), (3072, 1024), (72, 192))


def provider(op: Op[..., Any]) -> Callable[..., Any]:
    load_providers("cuda")
    return next(i.fn for i in op.impls if (i.provider, i.device_kind) == ("nvrtc", "cuda"))


def guarded(rows: torch.Tensor | tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Any:
    """The rows (or NaN of that shape) with some behind them that nobody may write."""
    shape = rows if isinstance(rows, tuple) else rows.shape
    block = torch.full((shape[0] + NUM_BEHIND, shape[1]), torch.nan, dtype=dtype).cuda()
    if isinstance(rows, torch.Tensor):
        block[: shape[0]] = rows
    return block[: shape[0]]


def is_kept(rows: torch.Tensor) -> bool:
    behind = rows.as_strided((NUM_BEHIND, rows.shape[1]), rows.stride(), rows.numel())
    return bool(behind.isnan().all())


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCES[torch.bfloat16]
    torch.testing.assert_close(
        got.float(), want.float(), atol=tolerance.atol, rtol=tolerance.rtol
    )  # fmt: skip


@pytest.mark.parametrize("programs", [2, 4, 8])
@pytest.mark.parametrize(("size", "inputs"), ADD_SIZES)
def test_a_product_is_added_to_the_stream(size: int, inputs: int, programs: int) -> None:
    from xgr_ops.cuda.cluster import launch_cluster_add  # noqa: PLC0415 - needs the GPU's packages

    weight, norm = normal(1, size, inputs, scale=inputs**-0.5), normal(2, size)
    for num_rows in ROWS:
        x, start = normal(3, num_rows, inputs), normal(4, num_rows, size)
        stream = (start.double() + x.double() @ weight.double().T).to(torch.bfloat16)
        first: list[torch.Tensor] = []
        for _ in range(NUM_REPEATS):
            residual = guarded(start)
            rows, lacks = launch_cluster_add(x, weight, residual, norm, EPS, programs)
            results = [residual, rows, lacks.squares_NS]
            if not first:
                assert_near(residual, stream)
                new = residual.double()
                assert_near(rows, new * norm.double())
                squares = lacks.squares_NS.double().sum(1)
                torch.testing.assert_close(squares, new.square().sum(1), atol=1e-3, rtol=1e-4)
                first = [result.clone() for result in results]
            assert all(torch.equal(got, want) for got, want in zip(results, first, strict=True))
            assert is_kept(residual)


@pytest.mark.parametrize("programs", [1, 2, 4])
@pytest.mark.parametrize(("size", "inputs"), GATED_SIZES)
@pytest.mark.parametrize("lacks_norm", [False, True])
def test_a_gated_product(size: int, inputs: int, programs: int, lacks_norm: bool) -> None:
    from xgr_ops.cuda.cluster import launch_cluster_gated  # noqa: PLC0415 - needs the GPU's packages
    from xgr_ops.cuda.matmul_warp import Outstanding  # noqa: PLC0415

    weight = normal(5, 2 * size, inputs, scale=inputs**-0.5)
    for num_rows in ROWS:
        x, norm = normal(6, num_rows, inputs), None
        factor = torch.ones(num_rows, 1, dtype=torch.float64).cuda()
        if lacks_norm:
            squares = normal(7, num_rows, 29).float().square() * inputs / 7 + 1
            norm = Outstanding(squares, EPS)
            mean = squares.double().sum(1, keepdim=True) / inputs
            factor = torch.rsqrt(mean + EPS)
        gate, up = ((x.double() @ weight.double().T) * factor).chunk(2, 1)
        first = launch_cluster_gated(x, weight, programs, norm)
        assert_near(first, torch.nn.functional.silu(gate) * up)
        for _ in range(NUM_REPEATS):
            assert torch.equal(launch_cluster_gated(x, weight, programs, norm), first)


def as_pages(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The op that stores rows, called as the one that stores pages: a slot is a row of one token."""

    def projected(*args: Any) -> Any:
        *others, k_pages, v_pages, slot = args
        slots = [pages.flatten(0, 1).unsqueeze(1) for pages in (k_pages, v_pages)]
        return fn(*others, *slots, slot.int(), 0)

    return projected


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("num_rows", [1, 40, 128])
def test_pairs_that_follow_each_other(num_rows: int, is_shared: bool, device: Device) -> None:
    layers, held = Layers(num_rows), list[torch.Tensor]()
    gated, reference = provider(stream_linear_silu_mul), stream_linear_rope_write_shared_kv
    if is_shared:
        projected = provider(reference)
    else:
        projected = as_pages(provider(stream_linear_rope_write_unshared_kv))
    apart = layers.run(gated, projected, torch.cuda.synchronize)
    references = stream_linear_silu_mul.reference, reference.reference
    tolerance = TOLERANCES[torch.bfloat16]
    for got, want in zip(apart, layers.run(*references, lambda: None), strict=True):
        # layers that follow each other carry the other's rounding on
        torch.testing.assert_close(got, want, atol=4 * tolerance.atol, rtol=4 * tolerance.rtol)

    def run() -> None:
        held[:] = layers.run(gated, projected, lambda: None)

    run()
    torch.cuda.synchronize()
    graph = device.capture("pairs of few rows", run)
    for _ in range(NUM_REPLAYS):
        for result in (*held, *layers.pages):
            result.fill_(torch.nan)
        for pages in layers.pages:
            pages[:, 0] = 0  # nobody writes there
            pages.flatten(1, 2)[:, PAGE_SIZE + num_rows :] = 0
        torch.cuda.synchronize()
        with device.segment("pairs of few rows"):
            graph.replay()
        device.synchronize()
        assert all(torch.equal(got, want) for got, want in zip(held, apart, strict=True))


@pytest.mark.parametrize(
    ("dtype", "dims", "reason"),
    [
        (torch.float16, {}, "overflow"),
        (torch.bfloat16, {"T": 129}, "T must be"),
        (torch.bfloat16, {"N": 129, "max_rows": 129}, "T must be"),
        (torch.bfloat16, {"M": 1000}, "M must be"),
        (torch.bfloat16, {"M": 4096}, "M must be"),
        (torch.bfloat16, {"Q": 3, "D": 64, "F": 192}, "inputs must be"),
        (torch.bfloat16, {"F": 2052}, "F times|inputs must be"),
    ],
)
def test_what_is_refused(dtype: torch.dtype, dims: dict[str, int], reason: str) -> None:
    from xgr_ops.cuda import cluster_stream  # noqa: PLC0415 - needs the GPU's packages

    for why in (cluster_stream.why_gated_refused, cluster_stream.why_heads_refused):
        refusal = why(OpSpec("cuda", dtype, "sm_90", dims))
        assert refusal is not None
        assert re.search(reason, refusal)


@pytest.mark.parametrize("sizes", [(2048, 6144), (1024, 3072)])
def test_what_is_taken(sizes: tuple[int, int]) -> None:
    from xgr_ops.cuda import cluster_stream  # noqa: PLC0415 - needs the GPU's packages

    model = {"M": sizes[0], "F": sizes[1], "Q": 16, "G": 8, "D": 128}
    for rows in ({"T": 128}, {"N": 128, "max_rows": 128}, {"T": 1}, {}):
        spec = OpSpec("cuda", torch.bfloat16, "sm_90", {**model, **rows})
        assert cluster_stream.why_gated_refused(spec) is None
        assert cluster_stream.why_heads_refused(spec) is None
