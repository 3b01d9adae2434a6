"""The vendor's ops that the providers call, as small functions on the CPU: our reading of the documentation.

They show that a call has the vendor's schema and keeps the documented rules (dtypes, dims, limits), and compute what the
documentation says; whether the real kernels do is seen on a card alone. Where a rule is broken they raise. SCHEMAS holds
what torch_npu 2.13 registers, so that it can be compared with torch_npu itself. Sources: torch_npu 2.13 docs of
npu_rms_norm, npu_rotary_mul, npu_swiglu, npu_scatter_nd_update_; CANN docs of aclnnAddRmsNorm.

Never together with torch_npu in one process: the ops would be declared twice.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SCATTERED = (*FLOATS, torch.bool, torch.int64, torch.int8)
_INDEX = (torch.int32, torch.int64)
_ROTARY_LIMIT, _ROTARY_DIM_LIMIT = 1000, 896

SCHEMAS: dict[str, str] = {
    "npu_rms_norm": "(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_add_rms_norm": (
        "(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)"
    ),
    "npu_rotary_mul": (
        "(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor"
    ),
    "npu_swiglu": "(Tensor input, int dim=-1) -> Tensor",
    "npu_scatter_nd_update_": ("(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)"),
}


class VendorRuleError(RuntimeError):
    """A call breaks a documented rule of the vendor's op (a rule about content raises RuntimeError)."""


def _require(is_kept: bool, op_name: str, rule: str) -> None:
    if not is_kept:
        raise VendorRuleError(f"{op_name}: {rule}")


def _require_of_values(is_kept: Tensor, op_name: str, rule: str) -> None:
    """A rule about content. A device op may look at it where a captured segment may not: no read by Python."""
    torch._assert_async(is_kept.all(), f"{op_name}: {rule}")


def _normalise(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(dims, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype).contiguous(), rstd


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(x / sqrt(mean(x^2) + epsilon) * gamma, 1 / sqrt(...) in fp32), over the dims that gamma has."""
    name = "npu_rms_norm"
    _require(
        input.dtype in FLOATS, name, f"input is float16, bfloat16 or float32, got {input.dtype}"
    )
    _require(gamma.dtype == input.dtype, name, "gamma has the dtype of input")
    _require(1 <= input.dim() <= 8, name, f"input has at most 8 dims, got {input.dim()}")
    _require(
        1 <= gamma.dim() <= input.dim() and gamma.shape == input.shape[-gamma.dim() :],
        name,
        f"gamma has the last dims of input, got {tuple(gamma.shape)} for {tuple(input.shape)}",
    )
    return _normalise(input, gamma, epsilon)


def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """(norm of the sum, 1 / sqrt(...) in fp32, the sum rounded to the dtype); nothing is written in place."""
    name = "npu_add_rms_norm"
    _require(x1.dtype in FLOATS, name, f"x1 is float16, bfloat16 or float32, got {x1.dtype}")
    _require(x1.dtype == x2.dtype == gamma.dtype, name, "all have one dtype")
    _require(x1.shape == x2.shape, name, f"x1 and x2 have one shape, got {x1.shape}, {x2.shape}")
    _require(gamma.shape == x1.shape[-gamma.dim() :], name, "gamma has the last dims of x1")
    total = (x1.float() + x2.float()).to(x1.dtype)
    out, rstd = _normalise(total, gamma, epsilon)
    return out, rstd, total


def npu_rotary_mul(
    input: Tensor,
    r1: Tensor,
    r2: Tensor,
    rotary_mode: str = "half",
    rotate: Tensor | None = None,
) -> Tensor:
    """r1 * input + r2 * (-second half, first half), in the dtype of the arguments."""
    name = "npu_rotary_mul"
    _require(rotary_mode == "half" and rotate is None, name, "half mode alone is imitated here")
    _require(input.dtype in FLOATS, name, f"input is a float, got {input.dtype}")
    _require(input.dtype == r1.dtype == r2.dtype, name, "all have one dtype")
    _require(input.dim() == r1.dim() == 4 and r1.shape == r2.shape, name, "all have 4 dims")
    dim = input.shape[-1]
    _require(dim < _ROTARY_DIM_LIMIT and dim % 2 == 0, name, f"D is even and < 896, got {dim}")
    _require(_has_rotary_layout(input, r1), name, _rotary_shapes(input, r1))
    _require_of_values((r1.abs() <= 1) & (r2.abs() <= 1), name, "r1 and r2 are in [-1, 1]")
    first, second = input.chunk(2, dim=-1)
    return r1 * input + r2 * torch.cat((-second, first), dim=-1)


def _has_rotary_layout(input: Tensor, r1: Tensor) -> bool:
    """Whether the shapes are one of the documented pairs, with B and N below 1000."""
    for layout in ("BNSD", "BSND", "SBND"):
        size = dict(zip(layout, input.shape, strict=True))
        allowed = [
            tuple(1 if axis in ones else size[axis] for axis in layout) for ones in ("BN", "N", "")
        ]
        if tuple(r1.shape) in allowed and max(size["B"], size["N"]) < _ROTARY_LIMIT:
            return True
    return False


def _rotary_shapes(input: Tensor, r1: Tensor) -> str:
    return f"no documented layout with B, N < 1000 has input {tuple(input.shape)} and r1 {tuple(r1.shape)}"


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """A * sigmoid(A) * B for the halves A, B of `dim`; rounded once."""
    name = "npu_swiglu"
    _require(
        input.dtype in FLOATS, name, f"input is float16, bfloat16 or float32, got {input.dtype}"
    )
    _require(1 <= input.dim() <= 8, name, f"input has 1 to 8 dims, got {input.dim()}")
    _require(input.shape[dim] % 2 == 0, name, f"the split dim is even, got {input.shape[dim]}")
    gate, up = input.float().chunk(2, dim=dim)
    return (gate * torch.sigmoid(gate) * up).to(input.dtype).contiguous()


def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """input[indices] = updates in place. Which of several updates of one place stays is not documented."""
    name = "npu_scatter_nd_update_"
    _require(input.dtype in _SCATTERED, name, f"no kernel for {input.dtype}")
    _require(updates.dtype == input.dtype, name, f"updates are {input.dtype}, got {updates.dtype}")
    _require(indices.dtype in _INDEX, name, f"indices are int32 or int64, got {indices.dtype}")
    _require(1 <= input.dim() <= 8, name, f"input has 1 to 8 dims, got {input.dim()}")
    _require(indices.dim() >= 2, name, f"indices have at least 2 dims, got {indices.dim()}")
    depth = indices.shape[-1]
    _require(depth <= input.dim(), name, f"the last dim of indices is too large: {depth}")
    expected = (*indices.shape[:-1], *input.shape[depth:])
    _require(updates.shape == expected, name, f"updates are {expected}, got {tuple(updates.shape)}")
    parts = indices.long().unbind(-1)
    for part, size in zip(parts, input.shape, strict=False):
        _require_of_values((part >= 0) & (part < size), name, f"indices are in [0, {size})")
    input.index_put_(parts, updates)
    return input


_FUNCTIONS: dict[str, Callable[..., object]] = {
    "npu_rms_norm": npu_rms_norm,
    "npu_add_rms_norm": npu_add_rms_norm,
    "npu_rotary_mul": npu_rotary_mul,
    "npu_swiglu": npu_swiglu,
    "npu_scatter_nd_update_": npu_scatter_nd_update_,
}


@cache
def define() -> Any:
    """Declare the ops for CPU tensors, once; the declarations live as long as the process."""
    if "torch_npu" in sys.modules:
        raise RuntimeError("torch_npu is imported: its own ops must not be replaced")
    library: Any = torch.library.Library("npu", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _FUNCTIONS[name], "CPU")
    return library
