"""What rung L3 makes of the calls that reach the stand-ins of CANN."""

from __future__ import annotations

import pytest

from tools._ladder.l3_border import INSIDE, TO_DEVICE, TO_HOST, BorderCall, offences

KERNEL = BorderCall("aclnnAdd")
WAIT = BorderCall("aclrtSynchronizeStream")
CAPTURED_WAIT = BorderCall("aclrtSynchronizeStream", is_capturing=True)
INPUT = BorderCall("aclrtMemcpyAsync", direction=TO_DEVICE)
OUTCOME = BorderCall("aclrtMemcpyAsync", direction=TO_HOST)


def test_kernels_and_copies_of_a_batch_are_no_offence() -> None:
    inside = BorderCall("aclrtMemcpyAsync", direction=INSIDE, is_capturing=True)
    assert offences({"aten::add.Tensor": [KERNEL, inside]}) == []
    assert offences({"aten::copy_": [INPUT, OUTCOME, WAIT]}) == []


@pytest.mark.parametrize(
    ("op", "call", "expected"),
    [
        ("aten::scatter_reduce.two", OUTCOME, "runs on the CPU"),
        ("aten::sum", WAIT, "waits for the device"),
        ("aten::copy_", CAPTURED_WAIT, "waits for the device"),
        ("aten::sort", BorderCall("aclopCompileAndExecute", "Sort"), "operator Sort"),
        (
            "aten::copy_",
            BorderCall("aclrtMemcpyAsync", direction=TO_DEVICE, is_capturing=True),
            "inside a captured segment",
        ),
    ],
)
def test_an_offence_is_named_with_its_op(op: str, call: BorderCall, expected: str) -> None:
    found = offences({op: [KERNEL, call, call]})
    assert len(found) == 1
    assert found[0].startswith(f"{op}: ")
    assert expected in found[0]
