"""What a device captures of the NPU's attention, replayed from a tape with other contents and lengths.

Devices and real graphs are tested with the backend; here is shown that nothing but memory and the update decides.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ascend.attention_cases import (
    SCALE,
    both_providers,
    cache_of,
    check_shared,
    function,
    int32,
    normal,
    shared_arguments,
)
from tests.ascend.vendor_attention import define
from xgr_runtime.hal.ops.attention import (
    merge_attention_states,
    shared_attention,
    unshared_attention,
)

define()


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The ops of one run, and their replay on the same memory, as a captured graph does it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert torch.Tag.data_dependent_output not in func.tags, func
        assert torch.Tag.dynamic_output_shape not in func.tags, func
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, dict(kwargs or {}), output))
        return output

    def replay(self, kv_lens: list[int] | None) -> None:
        """kv_lens: what replaces the keyword of that name where a call was given one."""
        for func, args, kwargs, output in self.calls:
            if kv_lens is not None and "actual_seq_lengths_kv" in kwargs:
                kwargs["actual_seq_lengths_kv"] = kv_lens
            outputs = output if isinstance(output, tuple | list) else [output]
            if any(
                o.untyped_storage()._cdata == t.untyped_storage()._cdata
                for o in outputs
                for t in tensors(args)
            ):
                assert not func._schema.is_mutable, f"{func} writes to its arguments"
                continue
            again = func(*args, **kwargs)
            for old, new in zip(
                outputs, again if isinstance(again, tuple | list) else [again], strict=True
            ):
                old.copy_(new)


def tensors(args: Any) -> list[torch.Tensor]:
    return [
        t
        for arg in args
        for t in (arg if isinstance(arg, list) else [arg])
        if isinstance(t, torch.Tensor)
    ]


@both_providers
@pytest.mark.parametrize("max_rows", [1, 6])
@pytest.mark.parametrize("padding_len", [0, 1])
def test_a_replay_depends_on_what_it_is_told(
    provider: str, dtype: torch.dtype, max_rows: int, padding_len: int
) -> None:
    """Captured with some lengths and rows, replayed with others: pages, rows and lengths all come from memory or the update."""
    first = cache_of([300, 5, 129], 128, 2, 16, dtype)
    second = cache_of([7, 0, 500], 128, 2, 16, dtype)
    starts = [(0, 1, 2, 3), (0, 1, 1, 2)] if max_rows == 1 else [(0, 1, 3, 9), (0, 6, 7, 8)]
    num_rows = starts[0][-1]
    arguments = shared_arguments(
        normal(10, num_rows, 4, 16, dtype=dtype), first, starts[0], max_rows
    )
    arguments["max_kv"] = 512
    tape = Tape()
    with tape:
        out, lse = function(shared_attention, provider)(**arguments)
    check_shared(out, lse, arguments["q_NQD"], first, starts[0])

    q = normal(11, num_rows, 4, 16, dtype=dtype)
    arguments["q_NQD"].copy_(q)
    arguments["row_start_H1"].copy_(int32(starts[1]))
    for name, value in second.arguments().items():
        if isinstance(value, torch.Tensor):
            target = arguments[name]
            common = tuple(
                slice(min(sizes)) for sizes in zip(value.shape, target.shape, strict=True)
            )
            target[common] = value[common]
    tape.replay([max(n, padding_len) for n in second.kv_lens])
    check_shared(out, lse, q, second, starts[1])


@pytest.mark.parametrize("op", [unshared_attention, merge_attention_states])
@both_providers
def test_other_rounds_are_captured_too(op: Any, provider: str, dtype: torch.dtype) -> None:
    """Replayed while the lengths of the shared stage are updated, which must not reach them."""
    arguments = own_arguments(dtype) if op is unshared_attention else merge_arguments(dtype)
    tape = Tape()
    with tape:
        results = function(op, provider)(**arguments)
    changed = {
        name: value.flip(0) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    expected = [t.clone() for t in function(op, provider)(**changed)]
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            value.copy_(changed[name].clone())
    tape.replay([3, 4, 5])
    for got, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def own_arguments(dtype: torch.dtype, num_tokens: int = 2) -> dict[str, Any]:
    """Six rows in slots 5 .. 0 of seven; what is not theirs is NaN."""
    k, v = normal(12, 7, 4, 2, 16, dtype=dtype), normal(13, 7, 4, 2, 16, dtype=dtype)
    for rows in (k, v):
        rows[:, num_tokens:], rows[6] = torch.nan, torch.nan
    return {
        "q_NQD": normal(14, 6, 4, 16, dtype=dtype),
        "k_rows": k,
        "v_rows": v,
        "slot_N": int32([5, 4, 3, 2, 1, 0]),
        "num_tokens": num_tokens,
        "scale": SCALE,
    }


def merge_arguments(dtype: torch.dtype) -> dict[str, Any]:
    a, b = normal(15, 6, 4, 16, dtype=dtype), normal(16, 6, 4, 16, dtype=dtype)
    lse_a, lse_b = (normal(s, 6, 4, dtype=torch.float32) for s in (17, 18))
    lse_a[0], lse_b[1] = -torch.inf, -torch.inf
    return {"out_a_NQD": a, "lse_a_NQ": lse_a, "out_b_NQD": b, "lse_b_NQ": lse_b}
