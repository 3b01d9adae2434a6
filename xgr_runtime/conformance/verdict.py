"""When a conformance run has passed.

No case failed, every provider module was loaded, and every part of the run ran. A part is one op or one engine check in
one dtype. It ran when one of its cases did: a refusal by name is no failure, as of small pages by kernels that take pages
of 128, but what is refused throughout was not checked; a provider that takes a dtype and ran no case of it has failed, whoever
else ran (parity.py). A fused op has run where it ran by its parts. An op's reference does
not count for its own providers; it counts only where the op has none on the device and engines may fall back on it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xgr_runtime.conformance.engines import EngineEntry
from xgr_runtime.conformance.parity import ParityEntry
from xgr_runtime.hal.registry import PARTS, REFERENCE

_OPTIONAL = "triton"  # the one package that a provider module may miss and be left out for it


@dataclass(frozen=True)
class ReportPart:
    """An op or an engine check in one dtype."""

    what: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.what} in {self.dtype}"


def is_optional(reason: str) -> bool:
    """Whether a module that was not loaded for this reason may be missing."""
    return f"No module named '{_OPTIONAL}'" in reason


def parts_that_never_ran(
    parity: Sequence[ParityEntry], engines: Iterable[EngineEntry], *, may_fall_back: bool
) -> list[ReportPart]:
    """The parts of which no case ran. may_fall_back: whether engines bind a reference where nobody else takes an op."""
    with_own = {entry.op for entry in parity if entry.provider not in (REFERENCE, PARTS)}
    has_run: dict[ReportPart, bool] = {}
    for entry in parity:
        is_reference = entry.provider == REFERENCE
        counts = not is_reference or (may_fall_back and entry.op not in with_own)
        part = ReportPart(entry.op, entry.dtype)
        has_run[part] = has_run.get(part, False) or (counts and entry.num_run > 0)
    for check in engines:
        part = ReportPart(check.what, check.shape.dtype_name)
        has_run[part] = has_run.get(part, False) or check.num_checked > 0
    return [part for part, ran in has_run.items() if not ran]
