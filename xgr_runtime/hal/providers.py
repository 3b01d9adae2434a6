"""Which modules provide ops on which kind of device. They are imported on first use, never at package import."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module

PROVIDER_MODULES: dict[str, tuple[str, ...]] = {
    "cpu": ("xgr_ops.cpu.beam", "xgr_ops.cpu.attention", "xgr_ops.cpu.cache"),
    "cuda": (
        "xgr_ops.cuda.stream",
        "xgr_ops.cuda.qkv",
        "xgr_ops.cuda.layers",
        "xgr_ops.cuda.embedding",
        "xgr_ops.cuda.cache",
        "xgr_ops.cuda.head",
        "xgr_ops.cuda.matmul",
        "xgr_ops.cuda.linear",
        "xgr_ops.cuda.early_beam",
        "xgr_ops.cuda.beam",
        "xgr_ops.cuda.short_beam_attention",
        "xgr_ops.cuda.warpgroup_attention_providers",
        "xgr_ops.cuda.short_prefill_attention",
        "xgr_ops.cuda.attention",
    ),
    "npu": (
        "xgr_ops.ascend.norm",
        "xgr_ops.ascend.rope",
        "xgr_ops.ascend.activation",
        "xgr_ops.ascend.cache",
        "xgr_ops.ascend.attention",
        "xgr_ops.ascend.attention_fp32",
        "xgr_ops.ascend.head",
        "xgr_ops.ascend.beam",
        "xgr_ops.ascend.triton_kernels",  # last: experimental, bound only where the others refuse
    ),
}


@dataclass(frozen=True)
class LoadFailure:
    """A provider module that could not be imported on this machine, and why."""

    module: str
    reason: str


@cache
def load_providers(device_kind: str) -> tuple[LoadFailure, ...]:
    """Import the provider modules of `device_kind` once; returns those that could not be imported.

    Only a missing module or shared library is a reason; any other exception is a defect and is raised.
    """
    failures = []
    for module in PROVIDER_MODULES.get(device_kind, ()):
        try:
            import_module(module)
        except (ImportError, OSError) as error:
            failures.append(LoadFailure(module, f"could not be imported: {error}"))
    return tuple(failures)
