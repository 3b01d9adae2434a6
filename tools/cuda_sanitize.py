"""Every CUDA provider once on small shapes, for NVIDIA's checkers of memory, races and uninitialised reads:

    compute-sanitizer --tool memcheck python3 tools/cuda_sanitize.py
    compute-sanitizer --tool racecheck python3 tools/cuda_sanitize.py --ops rms_norm
    compute-sanitizer --tool initcheck python3 tools/cuda_sanitize.py --dtypes bfloat16 --unfilled

Each tensor is an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING), so that a read behind its end is one. Results
are compared with the references too. What the parity cases do else, fill new memory with NaN, would hide from initcheck what it
looks for: --unfilled leaves that out. --plant writes behind a tensor's end, which memcheck has to find: that shows that it sees
these kernels. Exit code 0: all ran and agreed; 1: one did not; 2: there is no CUDA device here.

tools/cuda_sanitize_all.py runs all of it in processes of their own.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from xgr_runtime.conformance.comparison import clone_to, convert
from xgr_runtime.conformance.op_cases import GENERATORS
from xgr_runtime.conformance.parity import check_provider
from xgr_runtime.errors import DeviceError
from xgr_runtime.hal.discovery import open_device
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import OpSpec, all_ops

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xgr_runtime.conformance.op_case import OpCase
    from xgr_runtime.hal.device import Device
    from xgr_runtime.hal.registry import Impl, Op

ROOT = Path(__file__).resolve().parents[1]
AGREED = "all ran and agreed"
DTYPES = ("bfloat16", "float16", "float32")
MAX_ELEMENTS = 200_000  # of a case's largest tensor: a checker takes tens of times as long


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", choices=sorted(all_ops()), help="all without it")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES[::2])
    parser.add_argument("--most", type=int, default=4, help="cases of an op and dtype (default: 4)")
    parser.add_argument("--unfilled", action="store_true", help="new memory is left as it is")
    parser.add_argument("--plant", action="store_true", help="only a write that memcheck must find")
    options = parser.parse_args(arguments)
    # torch reads it when its allocator is first used
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    try:
        device = open_device("cuda").device
    except DeviceError as error:
        print(f"cuda_sanitize: needs a CUDA device: {error}", file=sys.stderr)
        return 2
    offer_providers()
    failures = [f"{f.module} {f.reason}" for f in load_providers("cuda")]
    if options.plant:
        return plant(device)
    for name, op in all_ops().items():
        if options.ops is None or name in options.ops:
            for dtype in options.dtypes:
                failures += run_op(
                    op,
                    getattr(torch, dtype),
                    device,
                    options.most,
                    is_filling=not options.unfilled,
                )
    print("\n".join(f"wrong: {failure}" for failure in failures) or AGREED)
    return 1 if failures else 0


def plant(device: Device) -> int:
    """Write keys and values into the slot behind the last page, by the first provider that there is."""
    op = all_ops()["write_shared_kv"]
    (found, *_) = (i for i in op.impls if i.device_kind == device.kind)
    args = convert(next(GENERATORS[op.name](torch.bfloat16)).args, clone_to(device.torch_device))
    pages, size = args["k_pages"].shape[:2]
    args["slot_T"].fill_(pages * size)
    found.fn(**args)
    device.synchronize()
    print("planted", flush=True)
    return 0


def run_op(
    op: Op[..., object],
    dtype: torch.dtype,
    device: Device,
    most: int,
    *,
    is_filling: bool = True,
) -> list[str]:
    """All CUDA providers of an op on some of the small cases that each takes; what went wrong.

    is_filling: as of `check_provider`.
    """
    failures = []
    for found in op.impls:
        if found.device_kind == device.kind:
            chosen = chosen_cases(op, found, dtype, device, most)
            generator = partial(_again, chosen)
            entry = check_provider(
                op, found.provider, found.fn, dtype, device, generator, is_filling=is_filling
            )
            what = f"{op.name} by {found.provider}, {entry.dtype}"
            print(f"{what}: {entry.num_run} cases ran, {entry.num_refused} refused", flush=True)
            failures += [f"{what}, {label}: {message}" for label, message in entry.failures]
    return failures


def chosen_cases(
    op: Op[..., object], found: Impl[..., object], dtype: torch.dtype, device: Device, most: int
) -> list[OpCase]:
    """At most so many cases, spread over the small ones that the provider takes; without such ones the smallest.

    Where it takes none, the first of all, so that what it refuses is said.
    """
    cases = list(GENERATORS[op.name](dtype))
    taken = [
        case
        for case in cases
        if found.accepts(OpSpec(device.kind, dtype, device.capability, case.dims)) is None
    ]
    small = [case for case in taken if largest_tensor(case) <= MAX_ELEMENTS]
    if not small:
        return [min(taken, key=largest_tensor)] if taken else cases[:1]
    return small[:: -(-len(small) // most)]


def _again(cases: list[OpCase], _: torch.dtype) -> Iterator[OpCase]:
    """Those of a dtype that are made already."""
    yield from cases


def largest_tensor(case: OpCase) -> int:
    """Its elements, by which a checker ends in seconds or does not."""
    tensors = [value for value in case.args.values() if isinstance(value, torch.Tensor)]
    return max((tensor.numel() for tensor in tensors), default=0)


def offer_providers() -> None:
    """Make xgr_ops importable where the project is not installed: it is the folder ops of this checkout."""
    if find_spec("xgr_ops") is not None:
        return
    folder = ROOT / "ops"
    spec = spec_from_file_location(
        "xgr_ops", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["xgr_ops"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["xgr_ops"])


if __name__ == "__main__":
    sys.exit(main())
