"""How an NVIDIA GPU wants the kernels of `xgr_ops.triton` started.

A grid may be as large as there are items: the GPU hands programs out as others end, so no program loops. A tile of
2,048 fp32 elements is 16 registers a thread of 4 warps.
"""

from xgr_runtime.hal.registry import OpSpec

from ..triton.launch import LaunchRules, next_power_of_two

MOST_PROGRAMS = 2**31 - 1
# score arithmetic and rotations round step by step, as the references do
RULES = LaunchRules(MOST_PROGRAMS, 2048, {"num_warps": 4, "enable_fp_fusion": False})
# A row that is normalised is one tile; 16,384 elements are 128 registers a thread.
LARGEST_ROW = 16384


def why_row_refused(spec: OpSpec, size_name: str) -> str | None:
    """Why a row of that size, one tile, is too large, or None."""
    size = spec.dims.get(size_name, 1)
    if next_power_of_two(size) > LARGEST_ROW:
        return f"{size_name} must be at most {LARGEST_ROW}, got {size}"
    return None
