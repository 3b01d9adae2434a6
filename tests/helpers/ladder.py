"""Which provider ran: one JSON line per pair, for whoever collects what a whole run of the ladder has executed."""

from __future__ import annotations

import json
import os
from pathlib import Path

from xgr_runtime.hal.registry import PARTS, REFERENCE

FILE_VARIABLE, RUNG_VARIABLE = "XGR_LADDER_PROVIDERS", "XGR_LADDER_RUNG"


def note_executed(device_kind: str, op: str, provider: str, dtype: str) -> None:
    """Note that cases of this provider ran on an NPU and agreed; nothing where the variable is not set.

    Parts are providers of ops of their own.
    """
    target = os.environ.get(FILE_VARIABLE)
    if not target or device_kind != "npu" or provider in (PARTS, REFERENCE):
        return
    line = {"op": op, "provider": provider, "dtype": dtype}
    line["rung"] = os.environ.get(RUNG_VARIABLE, "")
    with Path(target).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
