"""Compiling started kernels for sm_90 as far as Triton's own stages, in processes beside this one, and what is said where one fails.

A pass of the compiler that fails raises an exception that says no more than that, and its reason on standard error; one may also
end its process. So each process reports what it has compiled as it goes, and what it ended at has failed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton.language as tl
from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend
from triton.runtime.jit import convert_to_tuple_if_list

from tools._ladder.l4_started import TARGET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools._ladder.l4_started import Started

MESSAGE = 300  # characters of an error's line


def compile_until(kernel: Started, last_stage: str) -> None:
    """Run the compiler's stages up to that one, such as ttgir. Raises what a stage raises, with a note of its name."""
    told = json.loads(kernel.data)
    backend: Any = make_backend(TARGET)
    options = backend.parse_options({name: _tuple(it) for name, it in told["options"].items()})
    source = kernel.function.ASTSource(
        kernel.function,
        {name: convert_to_tuple_if_list(kind) for name, kind in told["signature"].items()},
        {
            place: _constant(value)
            for place, value in _pairs(told, "constant_keys", "constant_vals")
        },
        dict(_pairs(told, "attrs_keys", "attrs_vals")),
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    metadata = {"target": TARGET, **options.__dict__}
    name = "syntax"
    try:
        functions = (backend.get_codegen_implementation(options), backend.get_module_map())
        module = source.make_ir(TARGET, options, *functions, context)
        for name, stage in stages.items():
            module = stage(module, metadata)
            if name == last_stage:
                break
    except Exception as error:
        raise NotCompiled(f"{name}: {type(error).__name__}: {error}") from error


class NotCompiled(Exception):
    """A stage, and what it raised."""


def failures(kernels: Sequence[tuple[Started, str]], num_processes: int) -> list[str]:
    """A line for each that does not compile up to its stage: kernel, constants and warps, who started it, the reason's first line."""
    found: list[str] = []
    lanes = [list(range(lane, len(kernels), num_processes)) for lane in range(num_processes)]
    with tempfile.TemporaryDirectory() as folder:
        while any(lanes):
            children = [
                (places, *_start(kernels, places, Path(folder) / f"{lane}.jsonl"))
                for lane, places in enumerate(lanes)
                if places
            ]
            lanes = []
            for places, child, told in children:
                child.join()
                reasons = [json.loads(line) for line in told.read_text().splitlines()]
                found += [
                    describe(kernels[at][0], why)
                    for at, why in zip(places, reasons, strict=False)
                    if why
                ]
                if len(reasons) < len(places):
                    why = f"the compiler ended its process: {_ended(child.exitcode)}"
                    found.append(describe(kernels[places[len(reasons)]][0], why))
                lanes.append(places[len(reasons) + 1 :])
    return found


def describe(kernel: Started, why: str) -> str:
    """What does not compile, and why."""
    told = json.loads(kernel.data)
    names = kernel.function.arg_names
    constants = [
        f"{'.'.join([names[place[0]], *map(str, place[1:])])}={_short(value)}"
        for place, value in _pairs(told, "constant_keys", "constant_vals")
    ]
    sizes = ", ".join([*constants, f"num_warps={told['options']['num_warps']}"])
    return f"{kernel.name} ({sizes}), started by {kernel.by}, does not compile for sm_90: {why}"


def _start(
    kernels: Sequence[tuple[Started, str]], places: Sequence[int], told: Path
) -> tuple[Any, Path]:
    told.write_text("")
    arguments = ([kernels[at] for at in places], told)
    # Functions of modules and what was found of them are there in a process that is forked.
    child = multiprocessing.get_context("fork").Process(target=_compile, args=arguments)
    child.start()
    return child, told


def _compile(kernels: Sequence[tuple[Started, str]], told: Path) -> None:
    """A line of JSON for each kernel: why it does not compile, or ""."""
    with told.open("w") as reasons, told.with_suffix(".log").open("w+", errors="replace") as log:
        os.dup2(log.fileno(), 2)
        for kernel, last_stage in kernels:
            begin = log.seek(0, os.SEEK_END)
            why = ""
            try:
                compile_until(kernel, last_stage)
            except NotCompiled as error:
                log.seek(begin)
                said = [line for line in log if "error:" in line]
                stage = str(error).split(":")[0]
                line = f"{stage}: {said[0].strip()}" if said else " ".join(str(error).split())
                why = (
                    line if len(line) <= 2 * MESSAGE else f"{line[:MESSAGE]} ... {line[-MESSAGE:]}"
                )
            reasons.write(json.dumps(why) + "\n")
            reasons.flush()


def _pairs(told: dict[str, Any], keys: str, values: str) -> list[tuple[tuple[int, ...], Any]]:
    return list(zip(map(tuple, told[keys]), told[values], strict=True))


def _constant(value: Any) -> Any:
    """As Triton's `JITFunction.preload` reads one."""
    if tl.dtype.is_dtype(value):
        return tl.dtype(value)
    if isinstance(value, dict) and "constexpr" in value:
        return tl.constexpr(value["constexpr"])
    return value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _short(value: Any) -> Any:
    return value["constexpr"] if isinstance(value, dict) and "constexpr" in value else value


def _ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return signal.Signals(-exit_code).name
    return f"exit code {exit_code}"
