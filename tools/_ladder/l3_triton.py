"""The Triton providers in rung L3: everything but their kernels, which take no part here.

Beside a kernel a provider makes views, allocates and, to reorder, plans with ops of torch; those have to have kernels of torch_npu
and may neither copy nor wait, as those of any other provider. The kernels' launches do nothing: L4 and L5 are about them.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from xgr_runtime.hal.registry import OpSpec, all_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from xgr_runtime.hal.registry import Impl

MODULE, PROVIDER = "xgr_ops.ascend.triton_kernels", "triton"
KERNELS = {
    "unshared_attention_kernel",
    "merge_attention_states_kernel",
    "write_rows_kernel",
    "move_slots_kernel",
}
_CHIPS = {"Ascend910B2": True, "Ascend910_9391": True, "": True, "Ascend310P3": False}


def triton_functions() -> Mapping[str, Callable[..., Any]]:
    """The function of every Triton provider for the NPU, by op."""
    return {op: impl.fn for op, impl in _impls().items()}


@contextmanager
def without_kernels() -> Iterator[list[str]]:
    """Launches of Triton kernels do nothing but add the kernel's name to the list."""
    launched: list[str] = []

    def run(kernel: Any, *_args: Any, **_kwargs: Any) -> None:
        launched.append(kernel.__name__)

    with patch("triton.runtime.jit.JITFunction.run", run):
        yield launched


def chip_failures() -> list[str]:
    """Providers that take a chip their kernels were not compiled for, or refuse one they were."""
    failures = []
    for op, impl in _impls().items():
        for chip, is_expected in _CHIPS.items():
            reason = impl.accepts(OpSpec("npu", torch.bfloat16, chip))
            if (reason is None) != is_expected:
                failures.append(f"{op} by {PROVIDER}: on {chip or 'an unknown chip'}: {reason}")
    return failures


def _impls() -> Mapping[str, Impl[..., Any]]:
    import_module(MODULE)
    return {
        op.name: impl
        for op in all_ops().values()
        for impl in op.impls
        if (impl.provider, impl.device_kind) == (PROVIDER, "npu")
    }
