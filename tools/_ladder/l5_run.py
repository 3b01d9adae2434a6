"""Rung L5: Huawei's own compiler takes every Triton kernel of the Ascend providers, at the shapes of models.

    python tools/_ladder/l5_run.py --json FILE

Needs CPython 3.11 on x86-64 with torch==2.13.0, numpy==1.26.4, triton-ascend==3.2.0, pybind11 (imported by triton-ascend,
not among its requirements) and ascendnpu-ir==1.2.0. TRITON_INTERPRET must not be set. The launchers run as they are; what they
would start is recorded and compiled. Kernels that are bad on purpose have to be refused, else the rung fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import torch
from triton.runtime.jit import JITFunction

from tools._ladder import l5_bad_kernels
from tools._ladder.l4_report import Report, provider_functions
from tools._ladder.l5_compile import Launch, why_not_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PACKAGES = ("triton-ascend", "ascendnpu-ir", "torch", "numpy")


@dataclass(frozen=True)
class Shape:
    """Sizes of a round: rows, query heads, KV heads, head dim, own tokens kept and attended to, slots' tokens, layers."""

    label: str
    rows: int
    heads: int
    kv_heads: int
    dim: int
    num_tokens: int = 2
    max_tokens: int = 2
    layers: int = 4


SHAPES = (
    Shape("Qwen3 0.6B and 1.7B", 512, 16, 8, 128),
    Shape("one row, one token", 1, 16, 8, 128, num_tokens=1),
    Shape("eight query heads a KV head", 512, 64, 8, 128),
    Shape("no shared heads", 512, 32, 32, 128),
    Shape("small heads", 512, 14, 2, 64),
    Shape("wide heads", 512, 16, 4, 256),
    Shape("uneven", 33, 21, 7, 96, num_tokens=3, max_tokens=7),
    Shape("tiny", 7, 6, 2, 6),
)


class Recorder:
    """Takes the place of every launch of a compiled kernel."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        self.launches.append(Launch(kernel, args, kwargs))


def calls(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
    """A call of every op that has a Triton provider, by the op's name; contents do not matter."""
    rows, slots = shape.rows, shape.rows + 1
    slot_N = torch.arange(rows, dtype=torch.int32)
    own = torch.zeros(slots, shape.max_tokens, shape.kv_heads, shape.dim, dtype=dtype)
    out_NQD = torch.zeros(rows, shape.heads, shape.dim, dtype=dtype)
    lse_NQ = torch.zeros(rows, shape.heads)
    fused = torch.zeros(rows, shape.heads + 2 * shape.kv_heads, shape.dim, dtype=dtype)
    k_NGD, v_NGD = fused[:, -2 * shape.kv_heads : -shape.kv_heads], fused[:, -shape.kv_heads :]
    pages = torch.zeros(rows // 16 + 2, 16, shape.kv_heads, shape.dim, dtype=dtype)
    yield (
        "unshared_attention",
        {"q_NQD": out_NQD, "k_rows": own, "v_rows": own, "slot_N": slot_N}
        | {"num_tokens": shape.num_tokens, "scale": shape.dim**-0.5},
    )
    yield (
        "merge_attention_states",
        {"out_a_NQD": out_NQD, "lse_a_NQ": lse_NQ, "out_b_NQD": out_NQD, "lse_b_NQ": lse_NQ},
    )
    yield (
        "write_shared_kv",
        {"k_TGD": k_NGD, "v_TGD": v_NGD, "k_pages": pages, "v_pages": pages}
        | {"slot_T": slot_N.long() + 16},
    )
    yield (
        "write_unshared_kv",
        {"k_NGD": k_NGD, "v_NGD": v_NGD, "k_rows": own, "v_rows": own}
        | {"slot_N": slot_N, "position": shape.max_tokens - 1},
    )
    yield (
        "reorder_unshared_kv",
        {"kv_rows": own.repeat(2 * shape.layers, 1, 1, 1, 1), "parents_N": slot_N}
        | {"slot_in_N": slot_N, "search_of_row_N": torch.zeros_like(slot_N)}
        | {"slot_start_S1": torch.tensor([0, rows], dtype=torch.int32)}
        | {"num_tokens": shape.num_tokens, "slot_out_N": torch.empty_like(slot_N)}
        | {"tile": torch.empty(0)},
    )


def compile_providers(
    providers: dict[str, Callable[..., Any]], recorder: Recorder, folder: Path, report: Report
) -> None:
    """Compile what every provider launches for every shape and dtype."""
    for dtype in DTYPES:
        for shape in SHAPES:
            for op_name, args in calls(shape, dtype):
                where = f"{op_name}, {shape.label}, {dtype}"
                recorder.launches.clear()
                providers[op_name](**args)
                report.require(bool(recorder.launches), f"{where}: nothing was launched")
                for launch in recorder.launches:
                    number = report.count("kernels compiled")
                    reason = why_not_compiled(launch, folder / f"{number}-{launch.name}")
                    report.require(reason is None, f"{where}, {launch.name}: {reason}")
                report.note(op_name)


def refuse_bad_kernels(recorder: Recorder, folder: Path, report: Report) -> None:
    """Each bad kernel has to be refused for its own reason."""
    x, index = torch.zeros(1 << 16, dtype=torch.float16), torch.zeros(1 << 16, dtype=torch.int32)
    for kernel, tile, expected in (
        (l5_bad_kernels.element_gather, 1024, "element by element"),
        (l5_bad_kernels.too_large, 65536, "or not at all"),
        (l5_bad_kernels.fits_without_overlap, 65536, "without overlap"),
    ):
        recorder.launches.clear()
        kernel[(48,)](x, index, x, 100, TILE=tile)
        reason = why_not_compiled(recorder.launches[0], folder / kernel.__name__)
        report.count("bad kernels refused")
        report.require(
            reason is not None and expected in reason,
            f"{kernel.__name__} has to be refused as {expected!r}, got {reason!r}",
        )


def main(arguments: list[str] | None = None) -> int:
    """Compile everything; 0 where all kernels were taken and all bad ones refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--keep", type=Path, help="an absent folder that keeps what the compiler wrote"
    )
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    report = Report({name: metadata.version(name) for name in PACKAGES})
    recorder = Recorder()
    JITFunction.run = lambda kernel, *args, **kwargs: recorder.run(kernel, *args, **kwargs)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        refuse_bad_kernels(recorder, folder / "bad", report)
        compile_providers(provider_functions(report), recorder, folder / "kernels", report)
    report.write(options.json)
    return 0 if report.is_passed else 1


if __name__ == "__main__":
    sys.exit(main())
