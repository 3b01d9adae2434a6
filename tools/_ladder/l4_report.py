"""What the rungs of the Triton kernels report, and the providers they run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from xgr_runtime.hal.registry import all_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

PROVIDER = "triton"
MODULE = "xgr_ops.ascend.triton_kernels"


class Report:
    """Counts, (op, provider) pairs that ran, and failures, each printed when it is found."""

    def __init__(self, versions: Mapping[str, str]) -> None:
        self.versions = dict(versions)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._op_names: set[str] = set()

    @property
    def is_passed(self) -> bool:
        return not self.failures and any(self.counts.values())

    def count(self, name: str) -> int:
        """One more of what is counted under `name`; returns how many there are."""
        self.counts[name] += 1
        return self.counts[name]

    def note(self, op_name: str) -> None:
        """The Triton provider of an op ran."""
        self._op_names.add(op_name)

    def require(self, is_so: bool, failure: str) -> None:
        """Note a failure unless it is so."""
        if not is_so:
            print(f"FAILED {failure}", flush=True)
            self.failures.append(failure)

    def write(self, path: Path) -> None:
        """As JSON to the file, as one line to standard output."""
        answer = {
            "set": self.versions,
            "counts": dict(self.counts),
            "providers": [{"op": name, "provider": PROVIDER} for name in sorted(self._op_names)],
            "result": "passed" if self.is_passed else "failed",
            "failures": self.failures,
        }
        path.write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
        print(f"{answer['result']}: {answer['set']} {answer['counts']}", flush=True)


def provider_functions(report: Report) -> dict[str, Callable[..., Any]]:
    """The Triton provider of each op that has one, by the op's name."""
    if importlib.util.find_spec("xgr_ops") is None:
        # not installed here: in the checkout the folder has its other name
        sys.modules["xgr_ops"] = importlib.import_module("ops")
    importlib.import_module(MODULE)
    found = {
        name: impl.fn
        for name, op in all_ops().items()
        for impl in op.impls
        if (impl.provider, impl.device_kind) == (PROVIDER, "npu")
    }
    report.require(bool(found), f"{MODULE} registers no {PROVIDER} provider for npu")
    return found
