"""Which sizes, dtypes and chips the NPU's attention providers accept, and what a refusal says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ascend.attention_cases import registered
from xgr_runtime.hal.ops.attention import (
    merge_attention_states,
    prefill_attention,
    shared_attention,
    unshared_attention,
)
from xgr_runtime.hal.registry import OpSpec

KNOWN = {"Q": 8, "G": 2, "D": 64, "page_size": 128, "N": 9, "H": 3, "max_rows": 5, "max_kv": 300}
PAGED = (prefill_attention, shared_attention)
REFUSALS: list[tuple[Any, str, dict[str, Any], str | None]] = [
    *((op, "torch_npu", {}, None) for op in (*PAGED, unshared_attention, merge_attention_states)),
    *((op, "torch_npu", {"page_size": 16}, "set cache.page_size_tokens: 128") for op in PAGED),
    *((op, "torch_npu", {"page_size": 640}, "page_size 640") for op in PAGED),
    *((op, "torch_npu", {"page_size": 512}, None) for op in PAGED),
    (unshared_attention, "torch_npu", {"page_size": 16}, None),
    *((op, "torch_npu", {"D": 24}, "multiple of 16") for op in (*PAGED, unshared_attention)),
    (merge_attention_states, "torch_npu", {"D": 24}, None),
    (merge_attention_states, "torch_npu", {"D": 12}, "multiple of 8"),
    (unshared_attention, "torch_npu", {"D": 528}, "up to 512"),
    (unshared_attention, "torch_npu", {"Q": 130}, "up to 64"),
    (unshared_attention, "torch_npu", {"Q": 257, "G": 257, "D": 16}, "up to 256"),
    (unshared_attention, "torch_npu", {"Q": 128, "D": 512}, "fewer than 65535"),
    (shared_attention, "torch_npu", {"G": 129, "Q": 129, "D": 512}, "65535"),
    (unshared_attention, "torch_npu", {"N": 65537}, "lower scheduler.max_batch_rows"),
    *((op, "torch_npu", {"num_pages": 131071}, None) for op in PAGED),
    *((op, "torch_npu", {"num_pages": 131072}, "to have 131071 pages") for op in PAGED),
    (unshared_attention, "torch_npu", {"num_pages": 131072}, None),
    # 64 histories of 8 heads of 64: 32,768 elements a row of the bound.
    (shared_attention, "torch_npu", {"H": 64, "max_rows": 32768}, None),
    (
        shared_attention,
        "torch_npu",
        {"H": 64, "max_rows": 32769},
        "max_batch_rows to at most 32768",
    ),
    (shared_attention, "aten", {"dtype": torch.float32, "H": 64, "max_rows": 32769}, "histories"),
    (prefill_attention, "torch_npu", {"H": 64, "max_rows": 32769}, None),
    *((op, "torch_npu", {"dtype": torch.float32}, "model.dtype: bfloat16") for op in PAGED),
    (merge_attention_states, "torch_npu", {"dtype": torch.float32}, None),
    (merge_attention_states, "torch_npu", {"dtype": torch.float64}, "got torch.float64"),
    *((op, "torch_npu", {"capability": "Ascend310P3"}, "Ascend310P3") for op in PAGED),
    (merge_attention_states, "torch_npu", {"capability": "Ascend310P3"}, "Ascend310P3"),
    *((op, "torch_npu", {"capability": c}, None) for op in PAGED for c in ("", "Ascend910_9391")),
    *((op, "aten", {"dtype": torch.float32, "D": 5, "page_size": 3}, None) for op in PAGED),
    *((op, "aten", {}, "takes torch.float32") for op in (*PAGED, merge_attention_states)),
]


@pytest.mark.parametrize(("op", "provider", "changes", "text"), REFUSALS)
def test_what_is_accepted(
    op: Any, provider: str, changes: dict[str, Any], text: str | None
) -> None:
    accepts = registered(op, provider).accepts
    dtype = changes.get("dtype", torch.bfloat16)
    capability = changes.get("capability", "Ascend910B2")
    dims = KNOWN | {k: v for k, v in changes.items() if k not in ("dtype", "capability")}
    reason = accepts(OpSpec("npu", dtype, capability, dims))
    assert (reason is None) == (text is None), reason
    assert text is None or text in str(reason)
    if not {"dtype", "capability"} & changes.keys() and provider == "torch_npu":
        assert accepts(OpSpec("npu", dtype, capability)) is None
