"""Calls of launchers, and each kernel that they would start, once, through the compiler."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from tools._ladder.l4_calls import EVERY_ROUND, ROUNDS, callers, cases, rounds
from tools._ladder.l4_report import Report, provider_functions
from tools._ladder.l4_sm90 import failures
from tools._ladder.l4_started import noting_starts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tools._ladder.l4_calls import Call
    from tools._ladder.l4_started import Started, Starts

NUM_PROCESSES = 2
# Layouts are chosen, where sizes matter most, up to ttgir; llir adds the code of each operation and takes as long again.
STAGE, LAST_STAGE = "ttgir", "llir"


def run_checks(is_every_size: bool = False) -> Report:
    """Kernels of all cases, and what rounds of other sizes add. is_every_size: of all that an engine has."""
    report = Report({name: metadata.version(name) for name in ("triton", "torch")})
    provider_functions(report)
    with noting_starts() as starts:
        start(cases(), starts, report)
        for caller in sorted(callers()):
            report.require(starts.num_starts[caller] > 0, f"{caller}: no case started a kernel")
        num_of_cases = len(starts.kernels)
        start(rounds(EVERY_ROUND if is_every_size else ROUNDS), starts, report)
    report.require(len(starts.kernels) > num_of_cases, "other rounds started no other kernels")
    kernels = with_stages(starts.kernels)
    for _, stage in kernels:
        report.count(f"kernels compiled to {stage}")
    for failure in failures(kernels, NUM_PROCESSES):
        report.require(False, failure)
    return report


def with_stages(kernels: Iterable[Started]) -> list[tuple[Started, str]]:
    """How far each is compiled: the first of its kind farther than those that differ in sizes."""
    first = {kernel.kind: kernel for kernel in reversed([*kernels])}
    return [(it, LAST_STAGE if first[it.kind] is it else STAGE) for it in kernels]


def start(calls: Iterable[Call], starts: Starts, report: Report) -> None:
    """Make the calls, whose starts are noted; one that raises is a failure."""
    for call in calls:
        starts.begin(call.caller, call.label)
        try:
            call.function(**call.args)
        except Exception as error:  # noqa: BLE001 - whatever a launcher raises is its failure
            told = f"{call.caller}, {call.label}: {type(error).__name__}: {error}"
            report.require(False, f"the launcher raised: {told}")
