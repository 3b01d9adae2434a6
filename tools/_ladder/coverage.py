"""Which functions are registered for the NPU, and the rungs that answer for those that nothing executed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools._ladder.venvs import MAIN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tools._ladder.processes import Processes
    from tools._ladder.report import Outcome, Pair
    from tools._ladder.venvs import Environments

TRITON = "triton"
LIST = """
import json, sys
from xgr_runtime.hal.providers import load_providers
from xgr_runtime.hal.registry import all_ops
failures = [f"{f.module} {f.reason}" for f in load_providers("npu")]
pairs = [(name, i.provider) for name, op in all_ops().items() for i in op.impls if i.device_kind == "npu"]
json.dump({"pairs": pairs, "failures": failures}, open(sys.argv[1], "w"))
"""


@dataclass(frozen=True)
class Registered:
    """The (op, provider) pairs of the NPU, and why modules of providers could not be imported."""

    pairs: tuple[Pair, ...]
    failures: tuple[str, ...]


def registered(environments: Environments, processes: Processes, folder: Path) -> Registered:
    """Ask the registry in a process that has Triton where its environment has been made."""
    answer, log = folder / "run" / "registered.json", folder / "logs" / "registry.log"
    place = next(iter(environments.ready()), MAIN)
    command = [str(place.python), "-c", LIST, str(answer)]
    code = processes.run(command, place.environment(), log, 120)
    if code != 0:
        return Registered((), (f"the registry could not be read: {log}",))
    found = json.loads(answer.read_text(encoding="utf-8"))
    pairs = tuple((op, provider) for op, provider in found["pairs"])
    failures = found["failures"] if pairs else [*found["failures"], "nothing is registered for npu"]
    return Registered(pairs, tuple(failures))


def causes(missing: Sequence[Pair], failures: Sequence[str]) -> dict[str, list[str]]:
    """By rung: L4 answers for Triton providers that no rung executed, L2 for all others and for modules not imported."""
    found = {"L2": list(failures), "L4": []}
    for op, provider in missing:
        rung = "L4" if provider == TRITON else "L2"
        found[rung].append(f"no rung executed provider {provider} of op {op}")
    return found


def judged(outcomes: Sequence[Outcome], found: Mapping[str, Sequence[str]]) -> list[Outcome]:
    """The outcomes with those failed for which there are causes, by rung."""
    return [_failed(outcome, found.get(outcome.rung, [])) for outcome in outcomes]


def _failed(outcome: Outcome, causes: Sequence[str]) -> Outcome:
    if not causes:
        return outcome
    reason = "; ".join(filter(None, [outcome.reason, *causes]))
    return dataclasses.replace(outcome, result="failed", reason=reason)
