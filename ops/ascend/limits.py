"""Why providers of this folder refuse: documented limits of the vendor's ops, as reasons."""

import torch

from xgr_runtime.hal.registry import OpSpec

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Whole numbers below this are exact in fp32. Keys that have to be sorted are fp32: other dtypes are sorted by the NPU's
# CPU cores (aclnnSort), which is slow and takes the device's time from others.
EXACT_IN_FP32 = 1 << 24

_A2_AND_A3 = ("Ascend910B", "Ascend910_93")


def refuse_dtype(spec: OpSpec, op_name: str) -> str | None:
    """The dtypes that the vendor's ops of this folder take."""
    if spec.dtype in FLOATS:
        return None
    return f"{op_name} takes {', '.join(str(dtype) for dtype in FLOATS)}, got {spec.dtype}"


def refuse_soc(spec: OpSpec, fact: str) -> str | None:
    """Refuse anything but Atlas A2 and A3, with the documented `fact`. An empty capability (not known) is accepted."""
    if not spec.capability or spec.capability.startswith(_A2_AND_A3):
        return None
    return f"{fact}; expected Ascend910B* (Atlas A2) or Ascend910_93* (Atlas A3), got {spec.capability}"


def refuse_size(spec: OpSpec, name: str, limit: int, why: str) -> str | None:
    """Refuse a size that is not below `limit`; a size that is not known is accepted."""
    size = spec.dims.get(name, 0)
    return None if size < limit else f"{why}: {name} must be below {limit}, got {size}"
