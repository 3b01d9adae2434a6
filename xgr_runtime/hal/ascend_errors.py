"""Runtime errors of torch_npu as errors of this runtime: what failed, on which SoC, and what to do.

torch_npu raises RuntimeError for nearly everything; what happened stands in the text, mostly as a code of CANN's runtime or of
its op library. Form and codes are those of the headers in the wheel of torch-npu 2.13.0 (NPUException.h, op_api_common.h,
acl/error_codes/rt_error_codes.h) and of CANN's page "aclnn return codes". Which failures a process survives is our reading of
the codes' names; not run on hardware.
"""

import re

import torch

from xgr_runtime.errors import DeviceError, DeviceLost, OpUnavailable, XgrError

MEMORY_CODES = frozenset((207001, 207018))
HANDLE_CODES = {207007: "events", 207008: "streams", 207009: "notifies", 207010: "models"}
CAPTURE_CODES = frozenset((*range(107024, 107033), 107036, 107038, 107041, 107046, 507903))
UNSUPPORTED_CODES = frozenset((207000, 207019, 507009))
# Timeouts, faults of a core, of the driver, of memory, of a link: the context stays in that state.
LOST_CODES = frozenset(
    [
        *(107020, 107022, 107023, 107035, 207004, 507000, 507001, 507008, 507033),
        *range(507010, 507021),
        *range(507034, 507037),
        *range(507042, 507051),
        *range(507053, 507058),
        *range(507899, 507903),
    ]
)
ACLNN_INVALID = frozenset((161001, 161002))
ACLNN_INTERNAL = range(561000, 562000)
NO_KERNEL_CODES = frozenset((561003, 561103))

LOWER = (
    "lower cache.num_pages or cache.prefix_cache_bytes, scheduler.max_batch_tokens, scheduler.max_batch_rows or "
    "cache.catalog_slots"
)
NO_GRAPHS = "run without captured graphs (`--set graphs=false`)"
REPORT = "`xgr conformance --device npu --json report.json` shows which ops run here"

_MARKS = (
    "NPU function error",
    "OPS function error",
    "NPU out of memory",
    "host out of memory",
    " NPU error",
)
_STAMP = re.compile(r"\bERR(\d{2})(\d{3}) (PTA|OPS|DIST|GRAPH|PROF|UNKNOWN)\b")
_CODE = re.compile(r"error code is:? ?(\d+)")
_CALL = re.compile(r"function error:\s*(.+?), error code is")
_MEANING = re.compile(r"^\[Error\]: (.+)$", re.MULTILINE)
_DETAIL = re.compile(
    r"^.*?(?:\w+\((E[A-Z]\w{4})\)|(E[A-Z]\w{4})): *(?:\[PID: \d+\] [\d.:-]+ *)?(.+)$", re.MULTILINE
)
_ACLNN = re.compile(r"\b(aclnn\w+)")
_LOST_TEXT = re.compile(
    r"FORCE STOP|UCE ERROR|HBM MULTI BIT ECC ERROR|SUSPECT (?:MEM|REMOTE) ERROR|HCCS LINK ERROR|HCCL OP RETRY FAILED"
    r"|reason=\[?(?:device task abort|device mem error|hbm Multi-bit ECC error|suspect device mem error)"
)
_ABSENT_IN_CANN = re.compile(r"\b(aclnn\w+) or \w+GetWorkspaceSize not (?:in|found)")
_ABSENT_IN_TORCH_NPU = re.compile(r"'_OpNamespace' 'npu' object has no attribute '(\w+)'")
_NO_KERNEL = re.compile(
    r"Could not run '([\w:.]+)' with arguments from the '(?:NPU|PrivateUse1)\w*' backend"
)
_NOT_ON_SOC = re.compile(
    r"not support(?:ed)? (?:on|by)(?: the| this)?(?: current)? soc|[Uu]nsupported soc version",
    re.IGNORECASE,
)


def explain_npu_error(error: BaseException) -> XgrError | None:
    """The named error for an exception that torch_npu or torch raised for an NPU; None where its text tells nothing known.

    DeviceLost where the device cannot be used on in this process, DeviceError where something ran out, OpUnavailable where
    an op does not run like this. Never raises. The caller raises it `from` the original, whose text holds everything.
    """
    if isinstance(error, XgrError):
        return None
    text = str(error)
    absent = _absent_op(error, text)
    if absent is not None:
        return absent
    if (
        not any(mark in text for mark in _MARKS)
        and not _STAMP.search(text)
        and not _NOT_ON_SOC.search(text)
    ):
        return None
    codes = {int(code) for code in _CODE.findall(text)}
    for explain in (_out_of_memory, _lost, _out_of_handles, _broken_capture, _op_failed):
        explained = explain(text, codes)
        if explained is not None:
            return explained
    return None


def first_line(text: str) -> str:
    """The first line with something on it, shortened; torch_npu's texts go on with a stamp, a table entry and a traceback."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return line if len(line) <= 300 else f"{line[:297]}..."


def what_failed(text: str) -> str:
    """The call that failed, its code, and what the vendor says about it, without paths, times and tracebacks."""
    call, code = _CALL.search(text), _CODE.search(text)
    if call is None:
        return first_line(text).partition(".If reserved memory")[0]
    parts = [f"{call[1].strip()}, error code {code[1]}" if code else call[1].strip()]
    meaning = _MEANING.search(text)
    if meaning:
        parts.append(meaning[1].strip().rstrip("."))
    details = [f"{found[1] or found[2]} {found[3].strip()}" for found in _DETAIL.finditer(text)]
    parts += [first_line(detail) for detail in details if "Inner Error" not in detail][:1]
    return ": ".join(parts)


def _absent_op(error: BaseException, text: str) -> XgrError | None:
    if isinstance(error, AttributeError):
        found = _ABSENT_IN_TORCH_NPU.search(text)
        if found:
            return OpUnavailable(
                f"this torch_npu has no op npu::{found[1]}; install torch-npu 2.13 with torch 2.13"
            )
    if isinstance(error, NotImplementedError):
        found = _NO_KERNEL.search(text)
        if found:
            return OpUnavailable(
                f"{found[1]} has no kernel on {_soc()} in this torch_npu; {REPORT}"
            )
    return None


def _out_of_memory(text: str, codes: set[int]) -> XgrError | None:
    if "host out of memory" in text:
        return DeviceError(
            f"the host has no pinned memory left: {first_line(text)}; lower scheduler.max_batch_tokens or raise `ulimit -l`"
        )
    if "NPU out of memory" in text or "EL0004" in text or codes & MEMORY_CODES:
        return DeviceError(f"{_soc()} has no memory left: {what_failed(text)}; {LOWER}")
    return None


def _lost(text: str, codes: set[int]) -> XgrError | None:
    if not codes & LOST_CODES and not _LOST_TEXT.search(text):
        return None
    return DeviceLost(
        f"{_soc()} failed: {what_failed(text)}; this process cannot use it any more: restart it, look at `npu-smi info`, and "
        "set ASCEND_LAUNCH_BLOCKING=1 to see which call it was"
    )


def _out_of_handles(text: str, codes: set[int]) -> XgrError | None:
    found = [kind for code, kind in HANDLE_CODES.items() if code in codes]
    if not found:
        return None
    return DeviceError(f"{_soc()} has no more {found[0]}: {what_failed(text)}; {NO_GRAPHS}")


def _broken_capture(text: str, codes: set[int]) -> XgrError | None:
    if not codes & CAPTURE_CODES and "during NPU graph capture" not in text:
        return None
    return DeviceError(f"capturing a graph failed on {_soc()}: {what_failed(text)}; {NO_GRAPHS}")


def _op_failed(text: str, codes: set[int]) -> XgrError | None:
    missing, called = _ABSENT_IN_CANN.search(text), _ACLNN.search(text)
    if missing or "GetOpApiFuncAddr failed" in text:
        return OpUnavailable(
            f"the installed CANN has no {missing[1] if missing else 'op library (libopapi.so)'}: install its op library for {_soc()} (the kernels or ops package), and "
            "the CANN that this torch-npu was released with"
        )
    name, what = called[1] if called else "an op", what_failed(text)
    if _NOT_ON_SOC.search(text) or codes & UNSUPPORTED_CODES or _stamps(text) & {7}:
        return OpUnavailable(f"{name} is not supported on {_soc()}: {what}; {REPORT}")
    if codes & NO_KERNEL_CODES:
        return OpUnavailable(
            f"{name} found no kernel for {_soc()}: {what}; CANN's op library for this SoC may be missing or of another version "
            f"than its toolkit or driver; {REPORT}"
        )
    if codes & ACLNN_INVALID or "EZ1001" in text:
        return OpUnavailable(f"{name} refused its arguments on {_soc()}: {what}; {REPORT}")
    if any(code in ACLNN_INTERNAL for code in codes):
        return OpUnavailable(f"{name} failed in CANN's op library on {_soc()}: {what}; {REPORT}")
    return None


def _stamps(text: str) -> set[int]:
    """torch_npu's own kinds of error in the text: 6 memory, 7 feature not supported, 100 a call into CANN, ..."""
    return {int(found[2]) for found in _STAMP.finditer(text)}


def _soc() -> str:
    """The SoC's name, as CANN gives it; it is asked on the way out of a failure, so any failure of its own is left out."""
    npu = getattr(torch, "npu", None)
    try:
        return str(npu.get_device_name(0)) if npu is not None else "the NPU"
    except Exception:  # noqa: BLE001 - a lost device refuses even this with whatever it likes, and the first error is the one to tell
        return "the NPU"
