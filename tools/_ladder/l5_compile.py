"""One Triton launch through Huawei's own compiler, as far as it goes without CANN, and the verdict on its end.

Two stages: triton-ascend lowers Triton to linalg, `bishengir-compile` lowers that for an Ascend910B2: language subset, fit into
the unified buffer, synchronisation. The last step, `hivmc`, comes with CANN. PATH is empty for the compiler, so that the end is
the same everywhere: hivmc not found, with the module that hivmc would have got.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ascendnpuir
import torch
from triton._C.libtriton import ir
from triton.backends.ascend import compiler
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from tools._ladder.l5_verdict import LAST_MODULE, first_lines, verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHIP = "Ascend910B2"
OPTIONS = (
    f"--target={CHIP}",
    "--enable-auto-multi-buffer=true",
    "--enable-auto-bind-sub-block=true",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)
LIMIT_S = 300.0
TYPE_NAMES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Launch:
    """A kernel and what it was launched with, as the launcher passed it."""

    kernel: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def values(self) -> dict[str, Any]:
        """Argument by parameter name, in order."""
        names = [parameter.name for parameter in self.kernel.params]
        given = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        return {name: given[name] for name in names}

    def options(self) -> dict[str, Any]:
        """What was passed beside the kernel's parameters."""
        names = {parameter.name for parameter in self.kernel.params}
        return {name: value for name, value in self.kwargs.items() if name not in names}


def why_not_compiled(launch: Launch, folder: Path) -> str | None:
    """None where the compiler took the kernel up to hivmc, else the reason; its files stay in `folder`."""
    folder.mkdir(parents=True)
    try:
        linalg = _lower_to_linalg(launch)
    except subprocess.CalledProcessError as error:
        return f"not lowered to linalg: {first_lines(error.stderr.decode())}"
    source = folder / "linalg.mlir"
    source.write_text(linalg, encoding="utf-8")
    compile_command = str(Path(ascendnpuir.__file__).parent / "bin" / "bishengir-compile")
    ended = subprocess.run(
        [compile_command, source, *OPTIONS, f"--save-temps={folder}", "-o", folder / "kernel"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={"PATH": ""},
        check=False,
    )
    log = ended.stdout + ended.stderr
    (folder / "log.txt").write_text(log, encoding="utf-8")
    last = folder / LAST_MODULE
    return verdict(log, last.read_text(encoding="utf-8") if last.is_file() else None)


def _lower_to_linalg(launch: Launch) -> str:
    """Triton's and triton-ascend's share, specialised as the launch itself would be: on 1 and on multiples of 16."""
    target = GPUTarget("npu", CHIP, 0)
    backend = compiler.AscendBackend(target)
    options = backend.parse_options(launch.options())
    values = launch.values()
    attributes = backend.get_attrs_descriptor(launch.kernel.params, tuple(values.values()))
    fixed = attributes.get_constants()
    constants, signature = {}, {}
    for parameter in launch.kernel.params:
        value = values[parameter.name]
        if parameter.is_constexpr or parameter.num in fixed:
            constants[parameter.name] = value
        if not parameter.is_constexpr:
            signature[parameter.name] = _type_name(value)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = ASTSource(launch.kernel, signature, constants, attributes).make_ir(
        options, backend.get_codegen_implementation(), backend.get_module_map(), context
    )
    metadata = {"target": target, **options.__dict__}
    module = compiler.make_ttir(module, metadata, options)
    linalg = compiler.ttir_to_linalg(module, metadata, options, named_ops=True)
    return str(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg))


def _type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPE_NAMES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
