"""Errors of torch_npu as named errors. The texts are those that torch-npu 2.13.0 itself made when the calls below it were given
these codes (tools/_ladder/errors_run.py), and such as people reported from hardware where CANN adds lines of its own."""

from __future__ import annotations

import pytest
import torch

from xgr_runtime.errors import ConfigError, DeviceError, DeviceLost, OpUnavailable
from xgr_runtime.hal.ascend_errors import explain_npu_error, first_line, what_failed

STAMP = "[ERROR] 2026-01-01-00:00:00 (PID:17, Device:0, RankID:-1) ERR00100 PTA call acl api failed"


def call_failed(call: str, code: int, meaning: str = ".", cann: str = "") -> RuntimeError:
    """As NPUException.h of torch_npu puts it together."""
    table = meaning if meaning == "." else f"\n[Error]: {meaning}"
    where = "run:../torch_npu/csrc/core/npu/NPUStream.cpp:466"
    text = f"{where} NPU function error: {call}, error code is {code}\n{STAMP}{table}\n{cann}"
    return RuntimeError(text)


OUT_OF_MEMORY = (
    "NPU out of memory. Tried to allocate 1.00 GiB (NPU 0; 64.00 GiB total capacity; 63.5 GiB already allocated; 0 bytes current "
    "active; 100.00 MiB free; 63.50 GiB reserved in total by PyTorch).If reserved memory is >> allocated memory try setting "
    "max_split_size_mb to avoid fragmentation."
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(OUT_OF_MEMORY),
        RuntimeError(OUT_OF_MEMORY),
        call_failed("aclrtMalloc", 207001, "Failed to apply for memory."),
        call_failed("call aclnnAdd failed", 361001, cann="EL0004: Failed to allocate memory."),
        call_failed("aclrtMapMem", 207018, "The memory on the device is exhausted. "),
    ],
)
def test_memory_that_runs_out_names_what_to_lower(error: RuntimeError) -> None:
    explained = explain_npu_error(error)
    assert type(explained) is DeviceError
    assert "has no memory left" in str(explained)
    for option in ("cache.num_pages", "scheduler.max_batch_tokens", "cache.catalog_slots"):
        assert option in str(explained)
    assert "max_split_size_mb" not in str(explained)


def test_pinned_memory_of_the_host() -> None:
    text = "Malloc pin memory failed, host out of memory, Rried to allocate size: 1048576"
    explained = explain_npu_error(RuntimeError(text))
    assert type(explained) is DeviceError
    assert "the host has no pinned memory left" in str(explained)


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (507035, "The vector core execution is abnormal. "),
        (507015, "The aicore execution is abnormal. "),
        (507014, "The aicore execution times out. "),
        (507010, "The task scheduler loses the heartbeat. "),
        (507053, "."),
        (507899, "An internal error occurs in the Driver module. "),
        (107022, "."),
    ],
)
def test_a_device_that_cannot_be_used_on_is_lost(code: int, meaning: str) -> None:
    error = call_failed("AclrtSynchronizeStreamWithTimeout(stream())", code, meaning)
    explained = explain_npu_error(error)
    assert type(explained) is DeviceLost
    assert f"AclrtSynchronizeStreamWithTimeout(stream()), error code {code}" in str(explained)
    assert meaning.strip(" .") in str(explained)
    assert "ASCEND_LAUNCH_BLOCKING=1" in str(explained)


@pytest.mark.parametrize("text", ["UCE ERROR", "HBM MULTI BIT ECC ERROR", " FORCE STOP"])
def test_faults_that_torch_npu_names_itself(text: str) -> None:
    assert type(explain_npu_error(call_failed(text, 1))) is DeviceLost


@pytest.mark.parametrize(("code", "kind"), [(207008, "streams"), (207007, "events")])
def test_handles_that_run_out_are_the_graphs(code: int, kind: str) -> None:
    explained = explain_npu_error(call_failed("AclrtCreateStreamWithConfig(...)", code))
    assert type(explained) is DeviceError
    assert f"has no more {kind}" in str(explained)
    assert "graphs=false" in str(explained)


@pytest.mark.parametrize("code", [107027, 107030, 107032, 107041, 507903])
def test_a_broken_capture(code: int) -> None:
    explained = explain_npu_error(call_failed("aclmdlRICaptureEnd", code))
    assert type(explained) is DeviceError
    assert "capturing a graph failed" in str(explained)
    assert "graphs=false" in str(explained)


def test_an_op_that_refuses_its_arguments() -> None:
    """The vendor's own line is kept, without process and time."""
    cann = (
        "[PID: 465] 2026-02-09-17:11:34.368.749 AclNN_Parameter_Error(EZ1001): Tensor scale not implemented for DT_FLOAT16, "
        "should be in dtype support list [DT_UINT64,DT_BFLOAT16].\n        TraceBack (most recent call last):"
    )
    error = call_failed("call aclnnFusedInferAttentionScoreV3 failed", 161002, cann=cann)
    explained = explain_npu_error(error)
    assert type(explained) is OpUnavailable
    assert str(explained).startswith("aclnnFusedInferAttentionScoreV3 refused its arguments on ")
    assert "EZ1001 Tensor scale not implemented for DT_FLOAT16" in str(explained)
    assert "465" not in str(explained)
    assert "TraceBack" not in str(explained)
    assert "xgr conformance --device npu" in str(explained)


def test_an_op_without_a_kernel() -> None:
    cann = (
        "EZ9999: Inner Error!\n"
        "EZ9999: [PID: 5625] 2026-09-19-14:34:08.166.059 Parse dynamic kernel config fail.\n"
        "        TraceBack (most recent call last):\n       AclOpKernelInit failed opType\n"
    )
    explained = explain_npu_error(call_failed("call aclnnArange failed", 561103, cann=cann))
    assert type(explained) is OpUnavailable
    assert str(explained).startswith("aclnnArange found no kernel for ")
    assert "EZ9999 Parse dynamic kernel config fail." in str(explained)
    assert "op library" in str(explained)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "aclnnAttentionUpdate or aclnnAttentionUpdateGetWorkspaceSize not in libopapi.so, or libopapi.so not found.\n"
            "[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR01004 OPS invalid pointer",
            "CANN has no aclnnAttentionUpdate",
        ),
        (
            "Current device only support aclnn operators, but aclnnX or aclnnXGetWorkspaceSize not found\n"
            "[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR01007 OPS feature not supported",
            "CANN has no aclnnX",
        ),
        (
            "GetOpApiFuncAddr failed.\n"
            "[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR01004 OPS invalid pointer",
            "CANN has no op library (libopapi.so)",
        ),
        (
            "npu_mla_prolog not support on this soc version, please use npu_mla_prolog_v3",
            "not supported on",
        ),
        (
            "customize_dtype is not supported by the current soc version.",
            "not supported on",
        ),
        (
            "some feature\n"
            "[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR01007 OPS feature not supported",
            "not supported on",
        ),
    ],
)
def test_an_op_that_this_cann_or_soc_lacks(text: str, words: str) -> None:
    explained = explain_npu_error(RuntimeError(text))
    assert type(explained) is OpUnavailable
    assert words in str(explained)


def test_an_op_that_torch_npu_lacks() -> None:
    with pytest.raises(AttributeError) as caught:
        _ = torch.ops.npu.npu_no_such_op
    explained = explain_npu_error(caught.value)
    assert type(explained) is OpUnavailable
    assert "no op npu::npu_no_such_op" in str(explained)


def test_an_op_without_a_kernel_of_this_backend() -> None:
    text = (
        "Could not run 'aten::foo.out' with arguments from the '{}' backend. This could be because"
    )
    explained = explain_npu_error(NotImplementedError(text.format("PrivateUse1")))
    assert type(explained) is OpUnavailable
    assert "aten::foo.out has no kernel" in str(explained)
    # A tensor on the wrong device is a defect, not a missing op.
    assert explain_npu_error(NotImplementedError(text.format("CPU"))) is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (2) must match the size of tensor b (3)"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("call to something else failed, error code is 507035"),
        RuntimeError(""),
        ValueError("161002"),
        AttributeError("'NoneType' object has no attribute 'npu_rms_norm'"),
        KeyboardInterrupt(),
        ConfigError("NPU out of memory"),
        # torch_npu's own check of arguments: whoever called is wrong, not the device.
        RuntimeError(
            "query's dim should be consistent with that of Layout\n"
            "[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR01003 OPS invalid value"
        ),
        call_failed("aclrtMemcpy", 107000, "Parameter verification failed."),
    ],
)
def test_what_is_not_known_is_left_alone(error: BaseException) -> None:
    assert explain_npu_error(error) is None


def test_texts_without_a_call_are_their_first_line() -> None:
    assert what_failed("\n  first \nsecond") == "first"
    assert first_line("") == "no message"
    assert len(first_line("x" * 1000)) == 300
