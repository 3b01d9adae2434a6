"""What NVIDIA's Hopper GPUs (H100, H200) are to whoever cuts work for them, and what their kernels take.

The one owner of these numbers. Nothing here needs Triton: who also serves other generations imports it too.
"""

from xgr_runtime.hal.registry import OpSpec

CAPABILITY = "sm_90"  # the instructions of its matrix units exist on no other generation
NUM_CORES = 132
MOST_CORES = NUM_CORES * 3 // 4  # nearly all: more of them read no faster
WARPGROUP_ROWS = 64  # of a tile: the rows of one matrix instruction
REGISTERS = 232  # a thread of the second warpgroup; the first gets what is left
BYTES_ON_CHIP = 192 * 1024  # of tiles of a product in parts
HEAD_DIMS = (64, 128)  # of heads that kernels keep as a whole


def why_generation_refused(spec: OpSpec) -> str | None:
    """Why a GPU of that capability cannot run these kernels, or None; a spec may leave it open."""
    if spec.capability in ("", CAPABILITY):
        return None
    return f"needs a GPU of capability {CAPABILITY}, got {spec.capability}"


def why_head_refused(spec: OpSpec) -> str | None:
    """Why heads of that size are none that these kernels keep, or None."""
    head_dim = spec.dims.get("D", HEAD_DIMS[0])
    if head_dim in HEAD_DIMS:
        return None
    return f"D must be {' or '.join(map(str, HEAD_DIMS))}, got {head_dim}"
