"""What reached the stubs of CANN, and which of it a captured segment, or any segment, may not do.

An op that torch_npu has no kernel for goes to the CPU and back: copies and waits show it. One that asks for the older operator
interface (`aclopCompileAndExecute`) cannot become part of a graph.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

TO_DEVICE, TO_HOST, INSIDE = 1, 2, 3
# What moves a batch's inputs and outcome; they are issued between segments, by the device's own `copy`.
COPYING = {"aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::_copy_from_and_resize"}


@dataclass(frozen=True)
class BorderCall:
    """One call of the stubs. operator: of the older interface; direction: of a copy."""

    name: str
    operator: str = ""
    direction: int = 0
    is_capturing: bool = False

    @property
    def is_kernel(self) -> bool:
        return self.name.startswith("aclnn")

    @property
    def is_wait(self) -> bool:
        return self.name.startswith("aclrtSynchronize")


class BorderLog:
    """The log of the stubs in this process."""

    def __init__(self, path: str = "libascendcl.so") -> None:
        library = ctypes.CDLL(path)
        library.xgr_log_name.restype = library.xgr_log_type.restype = ctypes.c_char_p
        self._library = library

    def clear(self) -> None:
        """Forget what came so far."""
        self._library.xgr_log_clear()

    def take(self) -> list[BorderCall]:
        """What came since `clear`, in order; the log is empty afterwards."""
        log = self._library
        calls = [
            BorderCall(
                log.xgr_log_name(place).decode(),
                log.xgr_log_type(place).decode(),
                log.xgr_log_kind(place),
                bool(log.xgr_log_is_capturing(place)),
            )
            for place in range(log.xgr_log_size())
        ]
        self.clear()
        return calls


def offences(calls: Mapping[str, Iterable[BorderCall]]) -> list[str]:
    """Per op what it may not do, as text; empty where there is nothing."""
    found = []
    for op, made in sorted(calls.items()):
        reasons = {reason for call in made if (reason := _offence(op, call))}
        found += [f"{op}: {reason}" for reason in sorted(reasons)]
    return found


def _offence(op: str, call: BorderCall) -> str | None:
    if call.name == "aclopCompileAndExecute":
        return f"asks for operator {call.operator} of the older interface, which no graph can hold"
    if call.name.startswith("aclrtMemcpy") and call.direction in (TO_DEVICE, TO_HOST):
        if call.is_capturing:
            return f"copies between host and device inside a captured segment ({call.name})"
        if op not in COPYING:
            return "runs on the CPU, with copies there and back"
    if call.is_wait and (call.is_capturing or op not in COPYING):
        return f"waits for the device ({call.name})"
    return None
