"""Binding all ops of a bucket at once."""

from __future__ import annotations

import pytest
import torch

from xgr_runtime.errors import OpUnavailable
from xgr_runtime.hal.bound import bind_ops
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.registry import PARTS, REFERENCE, all_ops


class Bare(CpuDevice):
    """A kind of device without any provider."""

    kind = "bare"


def test_every_op_without_a_provider_is_named_at_once() -> None:
    with pytest.raises(OpUnavailable) as caught:
        bind_ops(Bare(), torch.float32, {}, allow_reference=False)
    text = str(caught.value)
    # a fused op without parts of its own is made of what every device has
    missing = {name for name, op in all_ops().items() if op.parts or op.run_by_parts is None}
    assert set(all_ops()) - missing == {"head_logits", "linear"}
    for name in all_ops():
        assert (f"op '{name}' has no provider on bare:" in text) == (name in missing), name
    assert text.count("set ops.allow_reference: true") == len(missing)


def test_what_is_bound() -> None:
    ops = bind_ops(Bare(), torch.float32, {}, allow_reference=True)
    assert [binding.op_name for binding in ops.bindings] == list(all_ops())
    for binding in ops.bindings:
        is_fused = all_ops()[binding.op_name].run_by_parts is not None
        assert binding.provider == (PARTS if is_fused else REFERENCE), binding.op_name
    assert len({binding.provider for binding in ops.bindings}) == 2
    assert ops.silu_mul(torch.ones(1, 4)).shape == (1, 2)
    with pytest.raises(AttributeError, match="no op 'convolve' is bound; bound: add_rms_norm"):
        ops.convolve()
